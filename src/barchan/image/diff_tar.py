"""Layers written as one layer of an OCI image: a tar of what is there, and `.wh.` names for what is gone.

The tar is a pure function of the layers: pax, sorted by name, a directory before what is in it. Holes of files are
written out as zeros, since not every reader of such layers knows another way. Sockets are left out: a tar has none.
"""

import io
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from barchan.errors import BlobCorrupt, InvalidSpec
from barchan.image.erofs import Erofs
from barchan.image.pack import DEFAULT_LIMITS, Limits, pack_tar
from barchan.image.stack import DEPTH_MAX, ENTRIES_MAX, Node, Stack

RECORD_BYTES = 512
END_BYTES = 2 * RECORD_BYTES
NAME_BYTES_MAX = 100  # in the header itself
TYPES = {stat.S_IFREG: b"0", stat.S_IFLNK: b"2", stat.S_IFDIR: b"5", stat.S_IFIFO: b"6"}
HARD_LINK = b"1"
WHITEOUT = b".wh."
OPAQUE_NAME = b".wh..wh..opq"
PART_BYTES = 1 << 20


def diff_tar(
    layers: Sequence[Erofs],
    *,
    out: BinaryIO,
    below: Sequence[Erofs] | None = None,
    is_bottom: bool = False,
    bytes_max: int = DEFAULT_LIMITS.bytes_max,
) -> None:
    """Write consecutive layers, topmost first, as one OCI layer that does the same to whatever lies below. Blocking.

    Args:
        below: All layers under them, topmost first. Only a renamed directory needs them: all that it shows is written.
        is_bottom: Nothing lies under them: marks that hide nothing are left out.
        bytes_max: Of file content and attributes, with the holes of sparse files.

    Raises:
        InvalidSpec: A name or attribute that the format can't say, a renamed directory without `below`, or more than
            `bytes_max`; the message names the path.
        BlobCorrupt: A layer is damaged.
        OSError: `out` could not be written.
    """
    for data in _Diff(layers, () if is_bottom else below, is_bottom, bytes_max).parts():
        out.write(data)


def merge(
    layers: Sequence[Erofs],
    target: Path,
    *,
    below: Sequence[Erofs] | None = None,
    is_bottom: bool = False,
    limits: Limits = DEFAULT_LIMITS,
) -> str:
    """Make one layer of consecutive ones, topmost first, in a new file; returns its digest. Blocking.

    What it shows, over `below` and under any others, is what they show, but for sockets: see `diff_tar`.

    Raises:
        InvalidSpec, BlobCorrupt: As `diff_tar`.
        CapacityError: The disk is full.
        RequirementMissing: The packer was not built.
    """
    parts = _Diff(layers, () if is_bottom else below, is_bottom, limits.bytes_max).parts()
    with io.BufferedReader(Parts(parts), PART_BYTES) as source:
        return pack_tar(source, target, limits=limits)


class Parts(io.RawIOBase):
    """Bytes that come in parts, as a file."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            data = next(self._parts, None)
            if data is None:
                return 0
            self._rest = memoryview(data)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


class _Diff:
    def __init__(self, layers: Sequence[Erofs], below: Sequence[Erofs] | None, is_bottom: bool, bytes_max: int) -> None:
        self._run = Stack(layers)
        self._whole = None if below is None else Stack([*layers, *below])
        self._is_bottom = is_bottom
        self._room = self._bytes_max = bytes_max
        self._first_names: dict[tuple[int, int], bytes] = {}  # of files with several, by layer and inode

    def parts(self) -> Iterator[bytes]:
        yield from self._entry(b"", self._run.root, self._run)
        # Of each directory on the way down: its path, the stack it's read from, whether all below is hidden, the rest.
        open_directories = [(b"", self._run, self._is_bottom, iter(self._run.listing(self._run.root)))]
        count = 0
        while open_directories:
            prefix, stack, is_hidden, children = open_directories[-1]
            for name, child in children:
                count += 1
                if count > ENTRIES_MAX or len(open_directories) > DEPTH_MAX:
                    raise BlobCorrupt(
                        f"these layers show more than {ENTRIES_MAX} files or are too deep; build them again"
                    )
                path = prefix + name
                is_gone = child is None or stat.S_ISSOCK(child.inode.mode)
                if is_gone and is_hidden:
                    continue
                if name.startswith(WHITEOUT):
                    raise InvalidSpec(f"{_text(path)}: in a layer of this format, that name would say that one is gone")
                if child is None or is_gone:
                    yield self._mark(prefix + WHITEOUT + name)
                    continue
                node, read_from = child, stack
                if stack is self._run and child.inode.is_dir and child.is_moved and not self._is_bottom:
                    node, read_from = self._moved(path)
                yield from self._entry(path, node, read_from)
                if node.inode.is_dir:
                    hides = read_from is not self._run or node.ends
                    if hides and not is_hidden:
                        yield self._mark(path + b"/" + OPAQUE_NAME)
                    listing = iter(read_from.listing(node))
                    open_directories.append((path + b"/", read_from, is_hidden or hides, listing))
                    break
            else:
                open_directories.pop()
        yield bytes(END_BYTES)

    def _moved(self, path: bytes) -> tuple[Node, Stack]:
        """A renamed directory with what it shows of the layers below, and the stack to read it from."""
        if self._whole is None:
            raise InvalidSpec(f"{_text(path)} is a renamed directory: writing it needs the layers below too")
        node = self._whole.lookup(path)
        assert node is not None  # it has the same topmost parts there
        return node, self._whole

    def _entry(self, path: bytes, node: Node, stack: Stack) -> Iterator[bytes]:
        inode, mode = node.inode, stat.S_IMODE(node.inode.mode)
        first = self._first_names.get((node.level, inode.number))
        if first is not None:
            # With owner and mode, since some who read it set them once more.
            yield header(path, HARD_LINK, mode, inode.uid, inode.gid, 0, inode.mtime_ns, first, {})
            return
        kind = stat.S_IFMT(inode.mode)
        if kind not in TYPES:
            raise InvalidSpec(f"{_text(path)} is a device, which a layer can't hold")
        if inode.links > 1 and not inode.is_dir:
            self._first_names[node.level, inode.number] = path
        target = stack.readlink(node) if kind == stat.S_IFLNK else b""
        size = inode.size if kind == stat.S_IFREG else 0
        xattrs = stack.xattrs(node)
        self._room -= size + sum(map(len, xattrs.values()))
        if self._room < 0:
            raise InvalidSpec(f"{_text(path)}: with it the layer has more than {self._bytes_max} bytes")
        name = path + b"/" if inode.is_dir else path
        yield header(
            name if path else b"./", TYPES[kind], mode, inode.uid, inode.gid, size, inode.mtime_ns, target, xattrs
        )
        if size:
            yield from stack.stream(node)
            yield _padding(size)

    def _mark(self, path: bytes) -> bytes:
        """An empty file whose name says something."""
        return header(path, b"0", 0, 0, 0, 0, 0, b"", {})


def header(
    path: bytes,
    kind: bytes,
    mode: int,
    uid: int,
    gid: int,
    size: int,
    mtime_ns: int,
    target: bytes,
    xattrs: dict[bytes, bytes],
) -> bytes:
    """A header, and before it the words of pax for all that the header can't say. Attributes' names are any bytes.

    Raises:
        InvalidSpec: An attribute has a name with `=`.
    """
    words: dict[bytes, bytes] = {}
    for name, value in xattrs.items():
        if b"=" in name:
            raise InvalidSpec(f"{_text(path)}: attribute {_text(name)} has a name that this format can't say")
        words[b"SCHILY.xattr." + name] = value
    for key, text in ((b"path", path), (b"linkpath", target)):
        if len(text) > NAME_BYTES_MAX:
            words[key] = text
    for key, number, digits in ((b"uid", uid, 7), (b"gid", gid, 7), (b"size", size, 11)):
        if number >= 8**digits:
            words[key] = b"%d" % number
    if mtime_ns % 1_000_000_000 or not 0 <= mtime_ns < 8**11 * 1_000_000_000:
        words[b"mtime"] = _decimal(mtime_ns)
    body = b"".join(_word(key, words[key]) for key in sorted(words))
    head = _ustar(b"pax", b"x", 0o644, 0, 0, len(body), 0, b"") + body + _padding(len(body)) if words else b""
    return head + _ustar(path, kind, mode, uid, gid, size, mtime_ns // 1_000_000_000, target)


def _padding(size: int) -> bytes:
    return bytes(-size % RECORD_BYTES)


def _ustar(path: bytes, kind: bytes, mode: int, uid: int, gid: int, size: int, mtime_s: int, target: bytes) -> bytes:
    """A header of 512 bytes; numbers that don't fit are 0, names are cut."""

    def octal(number: int, digits: int) -> bytes:
        return b"%0*o\0" % (digits, number if 0 <= number < 8**digits else 0)

    head = path[:NAME_BYTES_MAX].ljust(NAME_BYTES_MAX, b"\0")
    head += octal(mode, 7) + octal(uid, 7) + octal(gid, 7) + octal(size, 11) + octal(mtime_s, 11)
    tail = kind + target[:NAME_BYTES_MAX].ljust(NAME_BYTES_MAX, b"\0") + b"ustar\00000"
    tail = tail.ljust(RECORD_BYTES - len(head) - 8, b"\0")
    checksum = sum(head) + sum(tail) + 8 * ord(" ")
    return head + b"%06o\0 " % checksum + tail


def _word(key: bytes, value: bytes) -> bytes:
    """One record of pax: its length, which counts itself, then `key=value`."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def _decimal(ns: int) -> bytes:
    sign = b"-" if ns < 0 else b""
    whole, rest = divmod(abs(ns), 1_000_000_000)
    return b"%s%d.%09d" % (sign, whole, rest)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
