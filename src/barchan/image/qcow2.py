"""Disk images in QEMU's own format, version 3: the header of one that was given, and empty ones over another.

Source: QEMU's docs/interop/qcow2.rst. Nothing in a file that was given is believed.
"""

import struct
from typing import BinaryIO, Literal

from msgspec import Struct

from barchan.errors import InvalidSpec
from barchan.image.template import DISK_BYTES_MAX

MAGIC = b"QFI\xfb"
CLUSTER_BITS = 16
CLUSTER_BYTES = 1 << CLUSTER_BITS
SECTOR_BYTES = 512
_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_V2_BYTES, _V3_BYTES = 72, 104
_REFCOUNT_ORDER = 4  # 16 bits for each cluster
_DIRTY, _CORRUPT, _EXTERNAL_DATA = 1, 2, 4  # incompatible features
_COMPRESSION, _EXTENDED_L2 = 8, 16
_REFUSED = {_CORRUPT: "is marked as corrupt", _EXTERNAL_DATA: "keeps its data in another file"}
_EXT_BACKING_FORMAT = 0xE2792ACA


class Image(Struct, frozen=True, kw_only=True):
    """What a disk image is: its format, and its size in bytes as a guest sees it."""

    format: Literal["raw", "qcow2"]
    size_bytes: int


def look(file: BinaryIO, name: str) -> Image:
    """What a given file is; one that is not qcow2 is the bytes of the disk themselves.

    Raises:
        InvalidSpec: It can't stand alone, is damaged, or has no size that a disk can have.
    """
    head = file.read(_V3_BYTES)
    if head[:4] != MAGIC:
        size = file.seek(0, 2)
        if size % SECTOR_BYTES or not SECTOR_BYTES <= size <= DISK_BYTES_MAX:
            raise InvalidSpec(f"{name} is no disk: {size} bytes, and neither qcow2 nor whole sectors of {SECTOR_BYTES}")
        return Image(format="raw", size_bytes=size)
    if len(head) < _V3_BYTES:
        raise InvalidSpec(f"{name} is damaged: it ends in its header")
    _, version, backing_at, _, _, size, encryption, _, _, _, _, _, _, incompatible, _, _, _, _ = _HEADER.unpack(head)
    if version not in (2, 3):
        raise InvalidSpec(f"{name} is qcow2 of version {version}, and only 2 and 3 are known")
    if backing_at:
        raise InvalidSpec(f"{name} lies above another disk image (try: qemu-img convert -O qcow2 {name} WHOLE)")
    if encryption:
        raise InvalidSpec(f"{name} is encrypted, and nobody could give a sandbox its key")
    flags = incompatible if version == 3 else 0
    for flag, reason in _REFUSED.items():
        if flags & flag:
            raise InvalidSpec(f"{name} {reason} (try: qemu-img convert -O qcow2 {name} WHOLE)")
    if flags & ~(_DIRTY | _CORRUPT | _EXTERNAL_DATA | _COMPRESSION | _EXTENDED_L2):
        raise InvalidSpec(f"{name} uses features of qcow2 that are not known: {flags:#x}")
    if size % SECTOR_BYTES or not SECTOR_BYTES <= size <= DISK_BYTES_MAX:
        raise InvalidSpec(f"{name} has {size} bytes, which no disk can have")
    return Image(format="qcow2", size_bytes=size)


def empty_above(backing: str, backing_format: Literal["raw", "qcow2"], size_bytes: int) -> bytes:
    """A new image in which nothing is written: all is read from `backing`, and what lies beyond that are zeros.

    Args:
        backing: As the new image's reader finds it: a path, or one relative to the new image's folder.
    """
    name = backing.encode()
    table_entries = -(-size_bytes // (CLUSTER_BYTES * (CLUSTER_BYTES // 8)))  # each L1 entry is a cluster of L2 entries
    table_clusters = max(1, -(-table_entries * 8 // CLUSTER_BYTES))
    # Clusters: the header, the table of refcounts, one block of them, then the L1 table.
    clusters = 3 + table_clusters
    extension = backing_format.encode()
    extensions = struct.pack(">II", _EXT_BACKING_FORMAT, len(extension)) + extension.ljust(
        -(-len(extension) // 8) * 8, b"\0"
    )
    extensions += struct.pack(">II", 0, 0)
    header = _HEADER.pack(
        *(MAGIC, 3, _V3_BYTES + len(extensions), len(name), CLUSTER_BITS, size_bytes, 0),
        *(table_entries, 3 * CLUSTER_BYTES, CLUSTER_BYTES, 1, 0, 0),
        *(0, 0, 0, _REFCOUNT_ORDER, _V3_BYTES),
    )
    refcount_table = struct.pack(">Q", 2 * CLUSTER_BYTES)
    refcounts = struct.pack(">H", 1) * clusters
    parts = (header + extensions + name, refcount_table, refcounts)
    return b"".join(part.ljust(CLUSTER_BYTES, b"\0") for part in parts) + bytes(table_clusters * CLUSTER_BYTES)
