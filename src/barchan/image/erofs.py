"""Layers read without mounting them: the part of EROFS that our packer writes (docs/formats/erofs-layers.md).

Nothing in a file is believed: each offset is checked, no directory is entered twice, and depth and work are bounded.
Whatever is wrong is `BlobCorrupt`. Names, link targets and attributes are bytes, as the file system has them.
"""

import functools
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct as Record
from typing import NamedTuple, NoReturn, Self

import msgspec

from barchan.errors import BlobCorrupt, RequirementMissing

BLOCK_BITS = 12
BLOCK_BYTES = 1 << BLOCK_BITS
SUPER_AT = 1024
SUPER = Record("<I4xIB1xH20xII32x4xI")  # magic, compat, block bits, root, blocks, metadata block, incompat
MAGIC = 0xE0F5E1E2
INCOMPAT_CHUNKED_FILE = 0x4
INODE = Record("<HHHHQIIIIqII")
INODE_BYTES = 64
SLOT_BYTES = 32  # inode numbers count these
IDENTITY_AT, IDENTITY_BYTES = 1072, 16  # in the first block; what tells one file system from another
PLAIN, INLINE, CHUNKS = 0, 2, 4
DIRENT = Record("<QHBx")
HOLE = 0xFFFFFFFF
CHUNK_BITS_MASK = 0x1F
XATTR_HEADER_BYTES = 12
XATTR_PREFIXES = {
    1: b"user.",
    2: b"system.posix_acl_access",
    3: b"system.posix_acl_default",
    4: b"trusted.",
    6: b"security.",
}
XATTRS_KEPT = (
    b"system.posix_acl_access",
    b"system.posix_acl_default",
    b"trusted.overlay.opaque",
    b"trusted.overlay.redirect",
)
KINDS = {
    1: stat.S_IFREG,
    2: stat.S_IFDIR,
    3: stat.S_IFCHR,
    4: stat.S_IFBLK,
    5: stat.S_IFIFO,
    6: stat.S_IFSOCK,
    7: stat.S_IFLNK,
}
NAME_BYTES_MAX = 255
TARGET_BYTES_MAX = 4095
DEPTH_MAX = 2048  # as the packer has it
PIECE_BYTES = 64 << 10  # metadata is read and remembered in these
PIECES_MAX = 128
STREAM_BYTES = 1 << 20

Read = Callable[[int, int], bytes]


class Inode(msgspec.Struct, frozen=True):
    """One file, directory or link.

    Attributes:
        at: Where it lies, in bytes from the start of the layer.
        mode: As in `stat`, with the kind.
        value: First block, device number or form of the chunk table: what `layout` and kind ask for.
        links: Names of a file; always 1 for a directory.
    """

    number: int
    at: int
    mode: int
    size: int
    uid: int
    gid: int
    mtime_ns: int
    links: int
    layout: int
    value: int
    xattr_bytes: int

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_whiteout(self) -> bool:
        """Whether it says that a name of the layers below is gone."""
        return stat.S_ISCHR(self.mode) and self.value == 0


class Entry(NamedTuple):
    """One name of a directory; `kind` is the file type of a mode."""

    name: bytes
    number: int
    kind: int


class Erofs:
    """A layer, read through `read(offset, size) -> bytes`. Not for several threads at once.

    Raises:
        BlobCorrupt: It is no EROFS file, or damaged; so do all methods.
        RequirementMissing: It is one that an earlier release made, compressed.
    """

    def __init__(self, read: Read, *, name: str = "layer") -> None:
        self.name = name
        self._read = read
        self._close: Callable[[], None] = lambda: None
        self._piece = functools.lru_cache(PIECES_MAX)(self._read_piece)
        self.size = SUPER_AT + SUPER.size  # until it's known
        record = self._exactly(SUPER_AT, SUPER.size)
        magic, _, block_bits, root, blocks, meta_block, incompat = SUPER.unpack(record)
        if magic != MAGIC or block_bits != BLOCK_BITS:
            self.damaged("there is no EROFS file system with blocks of 4096 bytes")
        if incompat & ~INCOMPAT_CHUNKED_FILE:
            raise RequirementMissing(
                f"{name} is compressed, as earlier releases made layers, and can only be mounted; build its image again"
            )
        self.size = blocks << BLOCK_BITS
        self._meta_at = meta_block << BLOCK_BITS
        if self._meta_at >= self.size:
            self.damaged("the metadata lies behind its end")
        self.root = self.inode(root)
        if not self.root.is_dir:
            self.damaged("its root is not a directory")

    @classmethod
    def open(cls, path: Path) -> Self:
        """A layer in a file; a context manager, or `close` it."""
        file = path.open("rb", buffering=0)
        try:
            layer = cls(lambda offset, size: os.pread(file.fileno(), size, offset), name=path.name)
            if os.fstat(file.fileno()).st_size < layer.size:
                layer.damaged("the file is shorter than it says")
        except BaseException:
            file.close()
            raise
        layer._close = file.close
        return layer

    def close(self) -> None:
        """Free what `open` took; nothing can be read afterwards."""
        self._close()
        self._piece.cache_clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def metadata(self) -> tuple[int, int]:
        """First byte of the metadata and the one after its last. In layers of earlier releases that is all of it."""
        return self._meta_at, self.size

    def damaged(self, what: str) -> NoReturn:
        """Raise `BlobCorrupt` with the layer's name."""
        raise BlobCorrupt(
            f"{self.name} is damaged: {what}; remove its image and get or build it again", layer=self.name
        )

    def inode(self, number: int) -> Inode:
        """What lies at an inode's number."""
        at = self._meta_at + number * SLOT_BYTES
        piece, inside = self._view(at, INODE_BYTES)
        form, slots, mode, _, size, value, _, uid, gid, mtime_s, mtime_rest_ns, links = INODE.unpack_from(piece, inside)
        layout, kind = form >> 1, stat.S_IFMT(mode)
        if not form & 1 or kind not in _LAYOUTS or layout not in _LAYOUTS[kind] or mtime_rest_ns >= 1_000_000_000:
            self.damaged(f"inode {number} is none")
        if size > {stat.S_IFDIR: self.size, stat.S_IFLNK: TARGET_BYTES_MAX}.get(kind, size):
            self.damaged(f"inode {number} is larger than it can be")
        return Inode(
            number=number,
            at=at,
            mode=mode,
            size=size,
            uid=uid,
            gid=gid,
            mtime_ns=mtime_s * 1_000_000_000 + mtime_rest_ns,
            links=links,
            layout=layout,
            value=value,
            xattr_bytes=XATTR_HEADER_BYTES + 4 * (slots - 1) if slots else 0,
        )

    def entry_inode(self, entry: Entry) -> Inode:
        """The inode of an entry."""
        inode = self.inode(entry.number)
        if stat.S_IFMT(inode.mode) != entry.kind:
            self.damaged(f"a directory says that {_text(entry.name)} is of another kind than it is")
        return inode

    def entries(self, inode: Inode) -> Iterator[Entry]:
        """What is in a directory, sorted by name; without `.` and `..`."""
        last = b""
        for index in range(_blocks(inode.size)):
            block = self._directory_block(inode, index)
            for position in range(self._count(block)):
                entry = self._entry(block, position)
                if entry.name <= last:
                    self.damaged(f"the names of directory {inode.number} are not in order")
                last = entry.name
                if last not in (b".", b".."):
                    yield entry

    def find(self, directory: Inode, name: bytes) -> Inode | None:
        """The inode that a directory has under a name, by binary search."""
        low, high = 0, _blocks(directory.size)
        while high - low > 1:  # the last block that starts at or before it
            middle = (low + high) // 2
            if self._entry(self._directory_block(directory, middle), 0).name <= name:
                low = middle
            else:
                high = middle
        if high == 0 or name in (b".", b".."):
            return None
        block = self._directory_block(directory, low)
        low, high = 0, self._count(block)
        while low < high:
            middle = (low + high) // 2
            entry = self._entry(block, middle)
            if entry.name == name:
                return self.entry_inode(entry)
            if entry.name < name:
                low = middle + 1
            else:
                high = middle
        return None

    def lookup(self, path: bytes | str) -> Inode | None:
        """What lies at a path from the root; links are not followed."""
        found: Inode | None = self.root
        for name in os.fsencode(path).split(b"/"):
            if name:
                found = self.find(found, name) if found is not None and found.is_dir else None
        return found

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Everything with its path from the root (the root's is empty), by name, a directory before what is in it."""
        yield b"", self.root
        seen, room = {self.root.number}, self.size - self.root.size
        open_directories = [(b"", self.entries(self.root))]
        while open_directories:
            prefix, entries = open_directories[-1]
            for entry in entries:
                inode, path = self.entry_inode(entry), prefix + entry.name
                yield path, inode
                if inode.is_dir:
                    room -= inode.size
                    if inode.number in seen or room < 0 or len(open_directories) >= DEPTH_MAX:
                        self.damaged(f"directory {_text(path)} leads in circles or is too deep")
                    seen.add(inode.number)
                    open_directories.append((path + b"/", self.entries(inode)))
                    break
            else:
                open_directories.pop()

    def xattrs(self, inode: Inode) -> dict[bytes, bytes]:
        """Extended attributes by their whole names, in the order of the file."""
        if not inode.xattr_bytes:
            return {}
        body = self._exactly(inode.at + INODE_BYTES, inode.xattr_bytes)
        at, found = XATTR_HEADER_BYTES, dict[bytes, bytes]()
        while at + 4 <= len(body):
            name_bytes, index = body[at], body[at + 1]
            value_at = at + 4 + name_bytes
            end = value_at + int.from_bytes(body[at + 2 : at + 4], "little")
            if index not in XATTR_PREFIXES or end > len(body):
                break
            found[XATTR_PREFIXES[index] + body[at + 4 : value_at]] = body[value_at:end]
            at = (end + 3) & ~3
        if at != len(body) or body[4]:
            self.damaged(f"the attributes of inode {inode.number} are garbled")
        return found

    def readlink(self, inode: Inode) -> bytes:
        """What a symbolic link says."""
        target = self.read(inode, 0, inode.size)
        if b"\0" in target:
            self.damaged(f"link {inode.number} says nothing that a link can say")
        return target

    def read(self, inode: Inode, offset: int, size: int) -> bytes:
        """Bytes of a file or link, fewer at its end. All at once in memory: see `stream`."""
        parts = (
            bytes(length) if at is None else self._exactly(at, length)
            for at, length in self.extents(inode, offset, size)
        )
        return b"".join(parts)

    def stream(self, inode: Inode) -> Iterator[bytes]:
        """The whole content, in parts of at most 1 MiB."""
        zeros = bytes(STREAM_BYTES)
        for at, length in self.extents(inode, 0, inode.size):
            for done in range(0, length, STREAM_BYTES):
                size = min(STREAM_BYTES, length - done)
                if at is not None:
                    yield self._exactly(at + done, size)
                else:
                    yield zeros if size == STREAM_BYTES else zeros[:size]

    def extents(self, inode: Inode, offset: int, size: int) -> Iterator[tuple[int | None, int]]:
        """Where a range of a file's bytes lies: place in the layer (None: zeros that are not there) and length."""
        end = min(inode.size, offset + size)
        if inode.layout == CHUNKS:
            yield from self._chunk_extents(inode, offset, end)
            return
        tail_at = (_blocks(inode.size) - 1) << BLOCK_BITS if inode.layout == INLINE and inode.size else inode.size
        if offset < min(end, tail_at):
            yield self._bounded((inode.value << BLOCK_BITS) + offset, min(end, tail_at) - offset)
        if max(offset, tail_at) < end:
            at = self._tail_at(inode)
            yield self._bounded(at + max(offset, tail_at) - tail_at, end - max(offset, tail_at))

    def _chunk_extents(self, inode: Inode, offset: int, end: int) -> Iterator[tuple[int | None, int]]:
        bits = BLOCK_BITS + (inode.value & CHUNK_BITS_MASK)
        if inode.value & ~CHUNK_BITS_MASK:
            self.damaged(f"inode {inode.number} has chunks of an unknown form")
        table_at = (inode.at + INODE_BYTES + inode.xattr_bytes + 3) & ~3
        if inode.size > (self.size // 4) << bits:  # before it takes as long as the number is large
            self.damaged(f"inode {inode.number} has more chunks than there is room for")
        while offset < end:
            number, inside = offset >> bits, offset & ((1 << bits) - 1)
            piece, at = self._view(table_at + 4 * number, 4)
            block = int.from_bytes(piece[at : at + 4], "little")
            length = min(end - offset, (1 << bits) - inside)
            yield (None, length) if block == HOLE else self._bounded((block << BLOCK_BITS) + inside, length)
            offset += length

    def _bounded(self, at: int, size: int) -> tuple[int, int]:
        if at + size > self.size:
            self.damaged("a file reaches beyond the end")
        return at, size

    def _tail_at(self, inode: Inode) -> int:
        """Where the last part of an inline file, directory or link lies: behind its inode, in the same block."""
        at = inode.at + INODE_BYTES + inode.xattr_bytes
        tail = inode.size - ((_blocks(inode.size) - 1) << BLOCK_BITS)
        if at % BLOCK_BYTES + tail > BLOCK_BYTES:
            self.damaged(f"the end of inode {inode.number} does not fit where it should be")
        return at

    def _directory_block(self, inode: Inode, index: int) -> bytes:
        blocks = _blocks(inode.size)
        length = inode.size - (index << BLOCK_BITS) if index == blocks - 1 else BLOCK_BYTES
        if inode.layout == INLINE and index == blocks - 1:
            at = self._tail_at(inode)
        else:
            at = (inode.value + index) << BLOCK_BITS
        piece, inside = self._view(at, length)
        return piece[inside : inside + length]

    def _count(self, block: bytes) -> int:
        """Entries of a block: the first name starts behind the last record."""
        names_at = int.from_bytes(block[8:10], "little")
        if names_at % DIRENT.size or not 0 < names_at < len(block):
            self.damaged("a directory's block has no entries")
        return names_at // DIRENT.size

    def _entry(self, block: bytes, position: int) -> Entry:
        count = self._count(block)
        number, name_at, kind = DIRENT.unpack_from(block, position * DIRENT.size)
        if position + 1 < count:
            end = int.from_bytes(block[(position + 1) * DIRENT.size + 8 :][:2], "little")
            name = block[name_at:end]
        else:
            name = block[name_at:].split(b"\0", 1)[0]
        if name_at < count * DIRENT.size or not 0 < len(name) <= NAME_BYTES_MAX or b"/" in name or b"\0" in name:
            self.damaged("a directory has a name that is none")
        if kind not in KINDS:
            self.damaged(f"{_text(name)} is of no known kind")
        return Entry(name, number, KINDS[kind])

    def _view(self, at: int, size: int) -> tuple[bytes, int]:
        """Remembered bytes with the wanted ones in them, and where these start."""
        number, inside = divmod(at, PIECE_BYTES)
        if at + size > self.size:
            self.damaged("a record lies behind the end")
        if inside + size <= PIECE_BYTES:
            return self._piece(number), inside
        last = (at + size - 1) // PIECE_BYTES
        return b"".join(self._piece(each) for each in range(number, last + 1)), inside

    def _read_piece(self, number: int) -> bytes:
        return self._exactly(number * PIECE_BYTES, min(PIECE_BYTES, self.size - number * PIECE_BYTES))

    def _exactly(self, at: int, size: int) -> bytes:
        if at + size > self.size:
            self.damaged("something reaches beyond the end")
        data = self._read(at, size)
        if len(data) != size:
            self.damaged("the file is shorter than it says")
        return data


_FLAT = (PLAIN, INLINE)
_LAYOUTS = {
    stat.S_IFREG: (PLAIN, INLINE, CHUNKS),
    stat.S_IFDIR: _FLAT,
    stat.S_IFLNK: _FLAT,
    **dict.fromkeys((stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK), _FLAT),
}


def _blocks(size: int) -> int:
    return (size + BLOCK_BYTES - 1) >> BLOCK_BITS


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def verify_layer(path: Path, digest: str) -> None:
    """Read a whole layer: its bytes are those of its name, and everything in it lies where it can. Blocking.

    Of one that an earlier release made, compressed, only the first is looked at.

    Raises:
        BlobCorrupt: Something is wrong; the message says what.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        raise BlobCorrupt(
            f"{path.name} is damaged: its sha256 is {found}, not {digest}; remove its image and get or build it again",
            layer=path.name,
        )
    try:
        layer = Erofs.open(path)
    except RequirementMissing:
        return
    with layer:
        _check_files(layer)


def check_layer(read: Read, name: str) -> None:
    """Look at everything of a layer but its files' data: it lies where it can, and is what our packer writes. Blocking.

    For layers of others, before the kernel sees them.

    Raises:
        BlobCorrupt: Something is wrong; the message says what.
        RequirementMissing: It is compressed, so that it can't be looked into.
    """
    _check_files(Erofs(read, name=name))


def check_file(path: Path) -> None:
    """`check_layer` of a file."""
    with Erofs.open(path) as layer:
        _check_files(layer)


def _check_files(layer: Erofs) -> None:
    seen, room = set[int](), layer.size
    for path, inode in layer.walk():
        if (stat.S_ISCHR(inode.mode) or stat.S_ISBLK(inode.mode)) and not inode.is_whiteout:
            layer.damaged(f"{_text(path)} is a device")
        if stat.S_ISLNK(inode.mode):
            layer.readlink(inode)
        elif not inode.is_dir and not inode.xattr_bytes and inode.layout != CHUNKS:
            for _ in layer.extents(inode, 0, inode.size):
                pass
        elif inode.number not in seen:  # each once: there may be more names than there is time
            seen.add(inode.number)
            pieces = 0 if inode.is_dir else sum(1 for _ in layer.extents(inode, 0, inode.size))
            room -= inode.xattr_bytes + (4 * pieces if inode.layout == CHUNKS else 0)
            if room < 0:
                layer.damaged(f"{_text(path)} shares its attributes or chunks with other files")
            for name in layer.xattrs(inode):
                if not name.startswith(b"user.") and name not in XATTRS_KEPT:
                    layer.damaged(f"{_text(path)} has an attribute that no layer has, {_text(name)}")
