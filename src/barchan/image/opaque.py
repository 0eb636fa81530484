"""Directories that hide what is not there.

An overlay marks each directory that is made in it as opaque, whether or not a layer below has one of that name. In a
stack of other layers such a mark would hide what another image has there, so that two images with, say, a /srv/tools of
their own could not be put together. Marks that hide nothing in the layers they were made on are taken out.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from barchan.image.erofs import INODE_BYTES, XATTR_HEADER_BYTES, XATTR_PREFIXES, Erofs, Inode
from barchan.image.stack import OPAQUE, REDIRECT, Node, Stack

PLAIN = b"n"  # an overlay looks for `y`
DEPTH_MAX = 512
ENTRY_BYTES = 4  # before the name of an attribute


def drop_needless_opaque(path: Path, below: Sequence[Erofs]) -> bool:
    """Take the marks that hide nothing out of a layer's file, in place; says whether there were any. Blocking.

    Only directories that the layers below have, too, are looked into: the marks are on those that are new in them.

    Args:
        below: All layers that it was made on, topmost first.

    Raises:
        BlobCorrupt: One of the layers is damaged.
    """
    with Erofs.open(path) as layer, path.open("r+b", buffering=0) as file:
        stack = Stack(below)
        places = list(_needless(layer, stack, layer.root, stack.root, 0))
        for place in places:
            os.pwrite(file.fileno(), PLAIN, place)
    return bool(places)


def _needless(layer: Erofs, stack: Stack, directory: Inode, below: Node, depth: int) -> Iterator[int]:
    """Where the values of the marks below a directory lie."""
    for entry in layer.entries(directory):
        if not stat.S_ISDIR(entry.kind):
            continue
        inode = layer.entry_inode(entry)
        marks = layer.xattrs(inode)
        if REDIRECT in marks:
            target = marks[REDIRECT]
            under = stack.lookup(target) if target.startswith(b"/") else stack.child(below, target)
        else:
            under = stack.child(below, entry.name)
        if marks.get(OPAQUE) == b"y":
            if under is None:
                yield _value_at(layer, inode)
        elif under is not None and under.inode.is_dir and depth < DEPTH_MAX:
            yield from _needless(layer, stack, inode, under, depth + 1)


def _value_at(layer: Erofs, inode: Inode) -> int:
    """Where the value of a directory's mark lies in the file."""
    at = inode.at + INODE_BYTES + XATTR_HEADER_BYTES
    for name, value in layer.xattrs(inode).items():
        prefix = next(prefix for prefix in XATTR_PREFIXES.values() if name.startswith(prefix))
        value_at = at + ENTRY_BYTES + len(name) - len(prefix)
        if name == OPAQUE:
            return value_at
        at = (value_at + len(value) + 3) & ~3
    layer.damaged(f"the attributes of inode {inode.number} are garbled")
