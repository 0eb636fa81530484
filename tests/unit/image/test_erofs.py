"""The reader of layers on files made by hand: forms that our packer no longer writes, and lies."""

import stat
import struct
from collections.abc import Callable

import pytest

from barchan.errors import BlobCorrupt, RequirementMissing
from barchan.image.erofs import BLOCK_BYTES, CHUNKS, INLINE, PLAIN, Erofs

DIR, FILE, LINK = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777
KINDS = {DIR: 2, FILE: 1, LINK: 7}
ROOT, SECOND, THIRD = 64, 80, 96  # inode numbers: at 2048, 2560 and 3072 of block 0
BLOCKS = 3


def inode(mode: int, size: int, *, layout: int = INLINE, value: int = 0, tail: bytes = b"", slots: int = 0) -> bytes:
    form = 1 | layout << 1
    return struct.pack("<HHHHQIIIIqII16x", form, slots, mode, 0, size, value, 1, 5, 6, -2, 7, 1) + tail


def directory(*names: tuple[bytes, int, int]) -> bytes:
    """One block's content: records and then names."""
    at, records, text = 12 * len(names), b"", b""
    for name, number, mode in names:
        records += struct.pack("<QHBx", number, at + len(text), KINDS.get(mode, mode))
        text += name
    return records + text


def listing(*names: tuple[bytes, int, int]) -> bytes:
    """A directory's inode, with what is in it behind it."""
    body = directory(*names)
    return inode(DIR, len(body), tail=body)


def image(*parts: tuple[int, bytes], incompat: int = 4, meta_block: int = 0) -> bytearray:
    """A file of three blocks with inodes at their numbers."""
    data = bytearray(BLOCKS * BLOCK_BYTES)
    struct.pack_into("<I4xIB1xH20xII36xI", data, 1024, 0xE0F5E1E2, 2, 12, ROOT, BLOCKS, meta_block, incompat)
    for number, part in parts:
        at = meta_block * BLOCK_BYTES + number * 32
        data[at : at + len(part)] = part
    return data


def opened(data: bytes | bytearray) -> Erofs:
    return Erofs(lambda offset, size: bytes(data[offset : offset + size]))


def read_all(data: bytes | bytearray) -> None:
    """Everything that there is to read."""
    layer = opened(data)
    for _, found in layer.walk():
        layer.xattrs(found)
        if stat.S_ISLNK(found.mode):
            layer.readlink(found)
        for _ in layer.stream(found):
            pass


def test_metadata_among_data_and_ends_of_files_behind_inodes_are_read() -> None:
    """As the first release's packer wrote them: a file's last part, a link and a directory behind their inodes."""
    tail = b"the end"
    data = image(
        (ROOT, listing((b"file", SECOND, FILE), (b"link", THIRD, LINK))),
        (SECOND, inode(FILE, BLOCK_BYTES + len(tail), value=1, tail=tail)),
        (THIRD, inode(LINK, 6, tail=b"target")),
    )
    data[BLOCK_BYTES : 2 * BLOCK_BYTES] = b"x" * BLOCK_BYTES
    layer = opened(data)
    assert [path for path, _ in layer.walk()] == [b"", b"file", b"link"]
    assert layer.metadata == (0, BLOCKS * BLOCK_BYTES)
    file, link = layer.lookup("/file"), layer.lookup(b"link")
    assert file is not None and link is not None
    assert (file.uid, file.gid, file.mtime_ns, file.is_dir) == (5, 6, -1_999_999_993, False)
    assert layer.read(file, BLOCK_BYTES - 2, 100) == b"xxthe end"
    assert b"".join(layer.stream(file)) == b"x" * BLOCK_BYTES + tail
    assert layer.readlink(link) == b"target"
    assert layer.lookup("link/below") is None and layer.lookup("nothing") is None


def test_metadata_of_its_own_region_is_found() -> None:
    """Inode numbers count from there, and the region is told to who wants it first."""
    data = image(
        (ROOT, listing((b"file", SECOND, FILE))), (SECOND, inode(FILE, 3, layout=PLAIN, value=1)), meta_block=2
    )
    data[BLOCK_BYTES : BLOCK_BYTES + 3] = b"abc"
    layer = opened(data)
    assert layer.metadata == (2 * BLOCK_BYTES, 3 * BLOCK_BYTES)
    assert [layer.read(found, 0, 9) for path, found in layer.walk() if path] == [b"abc"]


def test_holes_are_zeros() -> None:
    """A table of chunks, of which the second is not there."""
    table = struct.pack("<2I", 1, 0xFFFFFFFF)
    data = image(
        (ROOT, listing((b"file", SECOND, FILE))),
        (SECOND, inode(FILE, BLOCK_BYTES + 5, layout=CHUNKS, value=0, tail=table)),
    )
    data[BLOCK_BYTES : BLOCK_BYTES + 3] = b"abc"
    layer = opened(data)
    file = layer.lookup("file")
    assert file is not None
    assert layer.read(file, 0, 1 << 40) == b"abc" + bytes(BLOCK_BYTES + 2)
    assert list(layer.extents(file, BLOCK_BYTES - 1, 3)) == [(2 * BLOCK_BYTES - 1, 1), (None, 2)]


LIES: dict[str, tuple[Callable[[], bytearray], str]] = {
    "no magic": (lambda: bytearray(BLOCKS * BLOCK_BYTES), "no EROFS file system"),
    "root is a file": (lambda: image((ROOT, inode(FILE, 0))), "root is not a directory"),
    "no inode": (lambda: image((ROOT, bytes(64))), "inode 64 is none"),
    "inode behind the end": (lambda: image((ROOT, listing((b"a", 1 << 60, FILE)))), "behind the end"),
    "itself below": (lambda: image((ROOT, listing((b"a", ROOT, DIR)))), "in circles"),
    "in circles": (
        lambda: image((ROOT, listing((b"a", SECOND, DIR))), (SECOND, listing((b"b", SECOND, DIR)))),
        "in circles",
    ),
    "twice": (
        lambda: image(
            (ROOT, listing((b"a", SECOND, DIR), (b"b", SECOND, DIR))), (SECOND, listing((b".", SECOND, DIR)))
        ),
        "in circles",
    ),
    "not in order": (
        lambda: image((ROOT, listing((b"b", SECOND, FILE), (b"a", SECOND, FILE))), (SECOND, inode(FILE, 0))),
        "not in order",
    ),
    "slash": (lambda: image((ROOT, listing((b"a/b", SECOND, FILE)))), "a name that is none"),
    "empty name": (lambda: image((ROOT, listing((b"", SECOND, FILE), (b"a", SECOND, FILE)))), "a name that is none"),
    "long name": (lambda: image((ROOT, listing((b"a" * 256, SECOND, FILE)))), "a name that is none"),
    "unknown kind": (lambda: image((ROOT, listing((b"a", SECOND, 9)))), "no known kind"),
    "other kind": (
        lambda: image((ROOT, listing((b"a", SECOND, LINK))), (SECOND, inode(FILE, 0))),
        "another kind than it is",
    ),
    "tail over the end of its block": (
        lambda: image((ROOT, listing((b"a", SECOND, FILE))), (SECOND, inode(FILE, 3000))),
        "does not fit",
    ),
    "file beyond the end": (
        lambda: image((ROOT, listing((b"a", SECOND, FILE))), (SECOND, inode(FILE, 9000, layout=PLAIN, value=1))),
        "beyond the end",
    ),
    "endless table": (
        lambda: image((ROOT, listing((b"a", SECOND, FILE))), (SECOND, inode(FILE, 1 << 62, layout=CHUNKS))),
        "more chunks than there is room for",
    ),
    "long link": (
        lambda: image((ROOT, listing((b"a", SECOND, LINK))), (SECOND, inode(LINK, 5000, layout=PLAIN, value=1))),
        "larger than it can be",
    ),
    "garbled attributes": (
        lambda: image((ROOT, listing((b"a", SECOND, FILE))), (SECOND, inode(FILE, 0, slots=2, tail=b"\xff" * 16))),
        "garbled",
    ),
    "cut off": (lambda: image((ROOT, listing((b"a", ROOT, DIR))))[:3000], "shorter than it says"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_damage(lie: str) -> None:
    """Whatever does not lie where it can, or leads in circles, is refused by name, and nothing else is raised."""
    make, said = LIES[lie]
    with pytest.raises(BlobCorrupt, match=said):
        read_all(make())


def test_forms_of_later_times_are_refused() -> None:
    """Features that change the meaning of the rest, such as compression."""
    with pytest.raises(RequirementMissing, match="build its image again"):
        opened(image((ROOT, listing()), incompat=1))
