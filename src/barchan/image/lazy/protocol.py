"""The part of the kernel's FUSE protocol that a read-only directory of plain files needs. No I/O."""

import errno
import stat
import struct
from typing import Final, NamedTuple

MAJOR: Final = 7
MINOR: Final = 40  # the newest whose answers are written here; a newer kernel speaks it too
ROOT_ID: Final = 1
MESSAGE_BYTES_MAX: Final = 64 << 10  # of a request: nobody writes here
READ_BYTES_MAX: Final = 1 << 20

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
FLUSH, INIT, INTERRUPT, DESTROY, BATCH_FORGET = 25, 26, 36, 38, 42
SILENT: Final = frozenset({FORGET, BATCH_FORGET, DESTROY})
"""Operations that are not answered."""

_ASYNC_READ, _PARALLEL_DIROPS, _MAX_PAGES, _INIT_EXT = 1 << 0, 1 << 18, 1 << 22, 1 << 30
_HAS_RESEND = 1 << 7  # in the second word of flags
_DIRECT_IO, _KEEP_CACHE, _NOFLUSH = 1 << 0, 1 << 1, 1 << 5
_NOTIFY_RESEND = 7
_FOREVER_S = 1 << 31
_PAGE = 4096

_IN = struct.Struct("=IIQQIIIHH")
_OUT = struct.Struct("=IiQ")
_READ_IN = struct.Struct("=QQIIQII")
_INIT_OUT = struct.Struct("=IIIIHHIIHHII24s")
_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY_OUT = struct.Struct("=QQQQII")
_ATTR_OUT = struct.Struct("=QII")
_OPEN_OUT = struct.Struct("=QIi")
_STATFS_OUT = struct.Struct("=QQQQQIIII24s")


class Request(NamedTuple):
    """One request of the kernel; `pid` is the thread that waits for it, in the host's pid namespace, or 0."""

    opcode: int
    unique: int
    node_id: int
    pid: int
    body: memoryview


def parse(packet: memoryview) -> Request:
    _, opcode, unique, node_id, _, _, pid, _, _ = _IN.unpack_from(packet)
    return Request(opcode, unique, node_id, pid, packet[_IN.size :])


def header(unique: int, length: int) -> bytes:
    """What comes before `length` bytes of an answer."""
    return _OUT.pack(_OUT.size + length, 0, unique)


def failure(unique: int, number: int) -> bytes:
    return _OUT.pack(_OUT.size, -number, unique)


def resend() -> bytes:
    """Ask for every request again that somebody took and did not answer; since Linux 6.9."""
    return _OUT.pack(_OUT.size, _NOTIFY_RESEND, 0)


def init(body: memoryview) -> bytes:
    """The answer to INIT.

    Raises:
        OSError: The kernel speaks another major version.
    """
    major, _, readahead = struct.unpack_from("=III", body)
    if major != MAJOR:
        raise OSError(errno.EPROTO, f"the kernel speaks version {major} of FUSE, and this reader {MAJOR}")
    flags = _ASYNC_READ | _PARALLEL_DIROPS | _MAX_PAGES | _INIT_EXT
    pages = READ_BYTES_MAX // _PAGE
    return _INIT_OUT.pack(MAJOR, MINOR, readahead, flags, 64, 48, _PAGE, 1, pages, 0, _HAS_RESEND, 0, b"")


def attributes(node_id: int, size_bytes: int | None) -> bytes:
    """Of a file of that size, or (None) of the directory."""
    mode = stat.S_IFDIR | 0o500 if size_bytes is None else stat.S_IFREG | 0o400
    size = size_bytes or 0
    return _ATTR.pack(node_id, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, _PAGE, 0)


def attr_out(node_id: int, size_bytes: int | None) -> bytes:
    return _ATTR_OUT.pack(_FOREVER_S, 0, 0) + attributes(node_id, size_bytes)


def entry_out(node_id: int, size_bytes: int) -> bytes:
    """The answer to LOOKUP. Names are looked up anew each time: a layer may go and come back."""
    return _ENTRY_OUT.pack(node_id, 0, 0, _FOREVER_S, 0, 0) + attributes(node_id, size_bytes)


def open_out() -> bytes:
    """Data goes past the page cache, where the file system on top keeps it already; its metadata does not."""
    return _OPEN_OUT.pack(0, _DIRECT_IO | _KEEP_CACHE | _NOFLUSH, 0)


def statfs_out() -> bytes:
    return _STATFS_OUT.pack(0, 0, 0, 0, 0, _PAGE, 255, _PAGE, 0, b"")


def read_in(body: memoryview) -> tuple[int, int]:
    """Offset and size of a READ, in bytes."""
    _, offset, size, _, _, _, _ = _READ_IN.unpack_from(body)
    return offset, size


def node_id_of(digest: str) -> int:
    """The node id of a layer: the same for every reader, and never that of the directory."""
    return int(digest[:16], 16) | 1 << 63
