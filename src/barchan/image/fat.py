"""Small file systems that every guest can read: FAT12, one folder, made whole in memory.

Source: Microsoft's FAT specification, 1.03 (long names: section 7).
"""

import struct
from collections.abc import Mapping

from barchan.errors import InvalidSpec

SECTOR_BYTES = 512
CLUSTER_BYTES = 8 * SECTOR_BYTES
CLUSTERS_MAX = 4084  # a reader takes one with more for FAT16
ROOT_ENTRIES = 64
NAME_CHARS_MAX = 64
_RESERVED_SECTORS, _FATS = 1, 2
_END = 0xFFF
_ENTRY = struct.Struct("<11sBBBHHHHHHHI")
_LONG = struct.Struct("<B10sBBB12sH4s")
_VOLUME, _READ_ONLY, _LONG_NAME, _LAST = 0x08, 0x01, 0x0F, 0x40
_DATE = (2000 - 1980) << 9 | 1 << 5 | 1  # of every file: the same files give the same bytes
_CHARS_IN_ENTRY = 13


def file_system(label: str, files: Mapping[str, bytes]) -> bytes:
    """A file system with these files in its root, as large as it takes.

    Args:
        label: At most 11 capital letters and digits.
        files: Names of ASCII characters, at most 64, and what is in each.

    Raises:
        InvalidSpec: They don't fit: 16 MiB and some twenty names are the bound.
    """
    counts = {name: -(-len(data) // CLUSTER_BYTES) for name, data in files.items()}
    clusters = max(1, sum(counts.values()))
    if clusters > CLUSTERS_MAX:
        raise InvalidSpec(f"{clusters * CLUSTER_BYTES} bytes of files are more than a seed disk takes")
    root = bytearray(_ENTRY.pack(label.encode().ljust(11), _VOLUME, 0, 0, 0, _DATE, 0, 0, 0, _DATE, 0, 0))
    table = [0xFF8, _END]
    for number, (name, data) in enumerate(files.items()):
        count = counts[name]
        first = len(table) if count else 0
        table += [*range(first + 1, first + count), _END] if count else []
        root += _entries(name, number, first, len(data))
    if len(root) > ROOT_ENTRIES * _ENTRY.size:
        raise InvalidSpec(f"{len(files)} files are more than a seed disk takes")
    fat_sectors = -(-(clusters + 2) * 3 // 2 // SECTOR_BYTES) + 1
    fat = _packed(table).ljust(fat_sectors * SECTOR_BYTES, b"\0")
    content = b"".join(data.ljust(counts[name] * CLUSTER_BYTES, b"\0") for name, data in files.items())
    parts = (
        _boot_sector(label, fat_sectors, clusters),
        fat * _FATS,
        bytes(root).ljust(ROOT_ENTRIES * _ENTRY.size, b"\0"),
        content.ljust(clusters * CLUSTER_BYTES, b"\0"),
    )
    return b"".join(parts)


def _boot_sector(label: str, fat_sectors: int, clusters: int) -> bytes:
    sectors = _RESERVED_SECTORS + _FATS * fat_sectors + ROOT_ENTRIES * _ENTRY.size // SECTOR_BYTES
    sectors += clusters * CLUSTER_BYTES // SECTOR_BYTES
    head = struct.pack(
        "<3s8sHBHBHHBHHHII",
        *(b"\xeb\x3c\x90", b"BARCHAN ", SECTOR_BYTES, CLUSTER_BYTES // SECTOR_BYTES, _RESERVED_SECTORS, _FATS),
        *(ROOT_ENTRIES, sectors, 0xF8, fat_sectors, 32, 2, 0, 0),
    )
    head += struct.pack("<BBBI11s8s", 0x80, 0, 0x29, 0, label.encode().ljust(11), b"FAT12   ")
    return head.ljust(SECTOR_BYTES - 2, b"\0") + b"\x55\xaa"


def _packed(table: list[int]) -> bytes:
    """Entries of 12 bits, two in three bytes."""
    padded = table + [0] * (len(table) % 2)
    return b"".join(
        (low | high << 12).to_bytes(3, "little") for low, high in zip(padded[::2], padded[1::2], strict=True)
    )


def _entries(name: str, number: int, first: int, size: int) -> bytes:
    """Those of one file: its long name, the last part first, then the entry itself under a short name of ours."""
    if not name.isascii() or not 0 < len(name) <= NAME_CHARS_MAX:
        raise InvalidSpec(f"{name!r} can't be the name of a file on a seed disk")
    short = f"FILE{number:04}".encode() + b"   "
    check = 0
    for byte in short:
        check = ((check & 1) << 7 | check >> 1) + byte & 0xFF
    parts = [name[at : at + _CHARS_IN_ENTRY] for at in range(0, len(name), _CHARS_IN_ENTRY)]
    long = b""
    for order, part in reversed(list(enumerate(parts, 1))):
        text = (part + "\0" if len(part) < _CHARS_IN_ENTRY else part).encode("utf-16-le").ljust(26, b"\xff")
        flags = order | (_LAST if order == len(parts) else 0)
        long += _LONG.pack(flags, text[:10], _LONG_NAME, 0, check, text[10:22], 0, text[22:])
    return long + _ENTRY.pack(short, _READ_ONLY, 0, 0, 0, _DATE, _DATE, 0, 0, _DATE, first, size)
