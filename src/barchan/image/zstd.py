"""zstd frames, each compressed on its own, and refused before memory is taken for more than they may hold."""

import threading
from typing import TYPE_CHECKING

from barchan.errors import RequirementMissing

if TYPE_CHECKING:
    import zstandard


class _Own(threading.local):
    """A thread's own: neither compressors, kept by level, nor decompressors may be shared."""

    def __init__(self) -> None:
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor: zstandard.ZstdDecompressor | None = None


_own = _Own()


def compress(raw: bytes | memoryview, level: int) -> bytes:
    """One frame that tells its content's size.

    Raises:
        RequirementMissing: There is no zstd library.
    """
    if level not in _own.compressors:
        check_installed()
        import zstandard

        _own.compressors[level] = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True)
    return _own.compressors[level].compress(raw)


def decompress(stored: bytes | memoryview, bytes_max: int, *, exactly: bool = False) -> bytes:
    """One frame's content, of at most, or `exactly`, so many bytes.

    Raises:
        ValueError: It is anything else.
        RequirementMissing: There is no zstd library.
    """
    check_installed()
    import zstandard

    try:
        size = zstandard.frame_content_size(stored)
        if not 0 <= size <= bytes_max or (exactly and size != bytes_max):
            raise ValueError(f"it claims to hold {size} bytes")
        if _own.decompressor is None:
            _own.decompressor = zstandard.ZstdDecompressor()
        return _own.decompressor.decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"no zstd frame: {error}") from error


def check_installed() -> None:
    """Raises `RequirementMissing` where there is no zstd library."""
    try:
        import zstandard  # noqa: F401
    except ImportError as error:
        raise RequirementMissing(
            "blob stores and memory snapshots need zstandard: pip install 'barchan[images]'"
        ) from error
