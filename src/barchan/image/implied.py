"""Directories that a layer's archive has entries in, but none for: what is said about them is in a layer below.

An overlay shows the topmost layer's directory, with its owner, mode and time. Some tools (umoci) leave out directories
that did not change themselves, so the packer has to make them up; unpacking would have kept what was there. The packer
gives such directories a time that no real one has, and a small layer on top says what is true of them.
"""

import io
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from barchan.image.diff_tar import END_BYTES, Parts, header
from barchan.image.erofs import Erofs, Inode
from barchan.image.pack import Limits, pack_tar
from barchan.image.stack import DEPTH_MAX, PRIVATE, Node, Stack

MTIME_NS = 1  # as guest/pack has it
_Way = tuple[tuple[bytes, tuple[int, Inode]], ...]  # a directory's path and what is true of it, from the root down


def restore(
    layers: Sequence[Erofs], target: Path, *, limits: Limits, go_on: Callable[[], None] = lambda: None
) -> str | None:
    """Make the layer that says what is true of made-up directories in a stack, topmost first. Blocking.

    Args:
        go_on: Called at each directory; what it raises ends the work.

    Returns:
        The sha256 of the file made, in hex; None if there is nothing to say, and no file.

    Raises:
        BlobCorrupt: A layer is damaged.
    """
    hidden = _hidden(Stack(layers), go_on)
    if not hidden:
        return None

    def parts() -> Iterator[bytes]:
        for path, (level, inode) in sorted(hidden.items()):
            go_on()
            xattrs = {key: value for key, value in layers[level].xattrs(inode).items() if not key.startswith(PRIVATE)}
            mode = stat.S_IMODE(inode.mode)
            yield header(path or b"./", b"5", mode, inode.uid, inode.gid, 0, inode.mtime_ns, b"", xattrs)
        yield bytes(END_BYTES)

    with io.BufferedReader(Parts(parts())) as source:
        return pack_tar(source, target, limits=limits)


def _hidden(stack: Stack, go_on: Callable[[], None]) -> dict[bytes, tuple[int, Inode]]:
    """What a lower layer says about each directory that is made up in the topmost one that has it.

    With the directories on the way there, or the layer would make those up.
    """
    found: dict[bytes, tuple[int, Inode]] = {}
    pending: list[tuple[_Way, bytes, Node]] = [((), b"", stack.root)]
    while pending:
        go_on()
        above, path, node = pending.pop()
        real = next((part for part in node.parts if part[1].mtime_ns != MTIME_NS), node.parts[0])
        way = (*above, (path, real))
        if real != node.parts[0]:
            found |= dict(way)
        if len(node.parts) > 1 and len(way) < DEPTH_MAX:
            children = stack.entries(node)
            pending += [(way, path + name + b"/", child) for name, child in children if len(child.parts) > 1]
    return found
