"""Directories that a layer's archive has entries in, but none for: what is said about them is in a layer below.

An overlay shows the topmost layer's directory, with its owner, mode and time. Some tools (umoci) leave out directories
that did not change themselves, so the packer has to make them up; unpacking would have kept what was there. The packer
gives such directories a time that no real one has, and a small layer on top says what is true of them.
"""

import io
import stat
import tarfile
from collections.abc import Sequence
from pathlib import Path

from barchan.image.erofs import Erofs, Inode
from barchan.image.pack import Limits, pack_tar
from barchan.image.stack import DEPTH_MAX, Node, Stack

MTIME_NS = 1  # as guest/pack has it
_Way = tuple[tuple[bytes, tuple[int, Inode]], ...]  # a directory's path and what is true of it, from the root down


def restore(layers: Sequence[Erofs], target: Path, *, limits: Limits) -> str | None:
    """Make the layer that says what is true of made-up directories in a stack, topmost first. Blocking.

    Returns:
        The sha256 of the file made, in hex; None if there is nothing to say, and no file.

    Raises:
        BlobCorrupt: A layer is damaged.
    """
    stack = Stack(layers)
    made = io.BytesIO()
    for path, (level, inode) in sorted(_hidden(stack).items()):
        made.write(_header(path, inode, layers[level].xattrs(inode)))
    if not made.tell():
        return None
    made.write(bytes(2 * tarfile.BLOCKSIZE))
    made.seek(0)
    return pack_tar(made, target, limits=limits)


def _hidden(stack: Stack) -> dict[bytes, tuple[int, Inode]]:
    """What a lower layer says about each directory that is made up in the topmost one that has it.

    With the directories on the way there, or the layer would make those up.
    """
    found: dict[bytes, tuple[int, Inode]] = {}
    pending: list[tuple[_Way, bytes, Node]] = [((), b"", stack.root)]
    while pending:
        above, path, node = pending.pop()
        real = next((part for part in node.parts if part[1].mtime_ns != MTIME_NS), node.parts[0])
        way = (*above, (path, real))
        if real != node.parts[0]:
            found |= dict(way)
        if len(node.parts) > 1 and len(way) < DEPTH_MAX:
            children = stack.entries(node)
            pending += [(way, path + b"/" + name, child) for name, child in children if len(child.parts) > 1]
    return found


def _header(path: bytes, inode: Inode, xattrs: dict[bytes, bytes]) -> bytes:
    info = tarfile.TarInfo("." + path.decode("utf-8", "surrogateescape"))
    info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, stat.S_IMODE(inode.mode), inode.uid, inode.gid
    seconds, nanos = divmod(abs(inode.mtime_ns), 10**9)
    info.pax_headers = {
        f"SCHILY.xattr.{key.decode('utf-8', 'surrogateescape')}": value.decode("utf-8", "surrogateescape")
        for key, value in xattrs.items()
        if not key.startswith(b"trusted.")
    } | {"mtime": f"{'-' if inode.mtime_ns < 0 else ''}{seconds}.{nanos:09}"}
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
