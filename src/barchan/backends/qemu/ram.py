"""A QEMU's guest memory, seen from the host: where it lies in the process, read out of it and written into it.

The kernel's files under /proc say what the process has mapped; QEMU itself is only asked where in its address space a
block begins, and can so make nothing readable but its own memory.
"""

import errno
import os
import re
import stat
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from barchan.backends.hosted.outer import read_in
from barchan.backends.hosted.target import CHECK_BYTES, Target
from barchan.errors import BackendError

PAGE = 4096
PIECE_BYTES = 1 << 20
PAGEMAP_PAGES = 1 << 16  # whose entries are read at a time: 512 KiB
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61  # of /proc/PID/pagemap
_BLOCK = re.compile(r"[ \t]*(\S+)[ \t]+[0-9]+ [KMG]iB" + 4 * r"[ \t]+(0x[0-9a-f]{1,16})")
BLOCKS_MAX = 64
TEXT_CHARS_MAX = 1 << 16  # some 500 lines
ADDRESS_MAX = 1 << 56  # of a process, on every architecture


class Block(NamedTuple):
    """A piece of guest memory: QEMU's name for it, where the process has it, and its size in bytes."""

    name: str
    address: int
    size: int


class _Area(NamedTuple):
    """One mapping of a process. `offset`: in its file, if `is_file`."""

    start: int
    end: int
    is_shared: bool
    offset: int
    is_file: bool


def blocks(text: object) -> list[Block]:
    """What `info ramblock` says.

    Raises:
        BackendError: Nothing that can be read, or be so.
    """
    if not isinstance(text, str) or len(text) > TEXT_CHARS_MAX:
        raise BackendError("QEMU does not say where its guest's memory is")
    rows = [row.groups() for line in text.splitlines() if (row := _BLOCK.match(line))]
    found = [Block(name, int(address, 16), int(used, 16)) for name, _, used, _, address in rows]
    if not found or len(found) > BLOCKS_MAX or not all(_can_be(block) for block in found):
        raise BackendError(f"QEMU does not say where its guest's memory is: {text[:200]!r}")
    return found


def _can_be(block: Block) -> bool:
    return block.address % PAGE == block.size % PAGE == 0 and block.address + block.size <= ADDRESS_MAX


class Process:
    """A process on this host, by its directory under /proc: another one can't take its place. Close it."""

    def __init__(self, pid: int | str) -> None:
        self._fd = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def status(self) -> dict[str, str]:
        """What the kernel says of it."""
        lines = read_in(self._fd, "status").split("\n")
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def save(self, block: Block, target: Path) -> int:
        """Write a block of a machine that stands still into the new, sparse file `target`; returns bytes of data in it.

        Pages that nobody has touched are holes. It blocks, for some 0.5 ms a MiB that is in use.

        Raises:
            OSError: The process is gone, or there is no room. BackendError: It has no such memory.
        """
        with Target(target) as out:
            os.ftruncate(out.fd, block.size)
            at = block.address
            for area in self._areas(block.address, block.address + block.size):
                if area.start > at:
                    raise BackendError(f"QEMU has nothing mapped at {at:#x}, where its guest's memory should be")
                at = min(area.end, block.address + block.size)
                self._save_area(area, max(area.start, block.address), at, out, block.address)
            if at < block.address + block.size:
                raise BackendError(f"QEMU has nothing mapped at {at:#x}, where its guest's memory should be")
            return os.fstat(out.fd).st_blocks * 512

    def read(self, block: Block) -> bytes:
        """The content of a small block."""
        mem = self._open("mem", os.O_RDONLY)
        try:
            return _pread(mem, block.address, block.size)
        finally:
            os.close(mem)

    def write(self, block: Block, data: bytes) -> None:
        """Change the content of a small block."""
        mem = self._open("mem", os.O_RDWR)
        try:
            view, at = memoryview(data), block.address
            while view:
                count = os.pwrite(mem, view[:PIECE_BYTES], at)
                view, at = view[count:], at + count
        finally:
            os.close(mem)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_CLOEXEC, dir_fd=self._fd)

    def _areas(self, start: int, end: int) -> Iterator[_Area]:
        fd = self._open("maps", os.O_RDONLY)
        with os.fdopen(fd, encoding="utf-8", errors="replace", newline="\n") as maps:
            for line in maps:
                span, modes, offset, _, inode = line.split(maxsplit=5)[:5]
                low, high = (int(part, 16) for part in span.split("-"))
                if high > start and low < end:
                    yield _Area(low, high, modes[3] == "s", int(offset, 16), inode != "0")

    def _open_mapped(self, area: _Area) -> int:
        """The plain file that is mapped there; a device is not even opened."""
        found = self._open(f"map_files/{area.start:x}-{area.end:x}", os.O_PATH)
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise BackendError(f"QEMU has no plain file mapped at {area.start:#x}")
            return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(found)

    def _save_area(self, area: _Area, start: int, end: int, out: Target, base: int) -> None:
        """Write what lies from `start` to `end`; `base` is the address of the target's first byte."""
        if area.is_file:
            source = self._open_mapped(area)
            try:
                _copy_data(source, area.offset + start - area.start, end - start, out, start - base)
            finally:
                os.close(source)
        if not area.is_shared:
            mem = self._open("mem", os.O_RDONLY)
            try:
                for low, high in self._own_pages(start, end):
                    for at in range(low, high, PIECE_BYTES):
                        out.will_have(min(PIECE_BYTES, high - at))
                        _pwrite(out.fd, _pread(mem, at, min(PIECE_BYTES, high - at)), at - base)
            finally:
                os.close(mem)

    def _own_pages(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Runs of pages that are the process's own, not those of the file below."""
        pagemap = self._open("pagemap", os.O_RDONLY)
        first: int | None = None
        try:
            for piece in range(start, end, PAGEMAP_PAGES * PAGE):
                pages = min(PAGEMAP_PAGES, (end - piece) // PAGE)
                entries = array("Q", _pread(pagemap, piece // PAGE * 8, pages * 8))
                for index, entry in enumerate(entries):
                    is_own = entry >= _SWAPPED and not entry & _OF_FILE
                    if is_own and first is None:
                        first = piece + index * PAGE
                    elif not is_own and first is not None:
                        yield first, piece + index * PAGE
                        first = None
        finally:
            os.close(pagemap)
        if first is not None:
            yield first, end


def _copy_data(source: int, offset: int, size: int, out: Target, target: int) -> None:
    """Copy what a sparse plain file has between `offset` and `offset + size` to `target` and on."""
    at, end = offset, offset + size
    while at < end:
        try:
            low = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        high = os.lseek(source, low, os.SEEK_HOLE)
        if not at <= low < high:
            raise BackendError(f"a file says that its data begin at {low} and end at {high}")
        high = min(high, end)
        os.lseek(out.fd, target + low - offset, os.SEEK_SET)
        while low < high:
            piece = min(CHECK_BYTES, high - low)
            out.will_have(piece)
            count = os.sendfile(out.fd, source, low, piece)
            if count == 0:
                return
            low += count
        at = high


def copy_sparse(source: int, target: Path, bytes_max: int | None = None) -> None:
    """Copy a whole plain file into the new file `target`, holes as holes. It blocks.

    Raises:
        OSError: There is no room. BackendError: It has more than `bytes_max`.
    """
    size = os.fstat(source).st_size
    if bytes_max is not None and size > bytes_max:
        raise BackendError(f"a file to be copied has {size} bytes, more than {bytes_max}")
    with Target(target) as out:
        os.ftruncate(out.fd, size)
        _copy_data(source, 0, size, out, 0)


def _pread(fd: int, at: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.pread(fd, size - len(data), at + len(data))
        if not part:
            raise BackendError(f"QEMU's memory at {at + len(data):#x} can't be read")
        data += part
    return bytes(data)


def _pwrite(fd: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count
