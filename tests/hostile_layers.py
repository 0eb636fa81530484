"""Layers that no packer of ours makes."""

import hashlib
import os
import stat
from pathlib import Path

from barchan.image.erofs import Erofs
from barchan.image.pack import pack_tree

_VALUE_AT = 16  # of an inode, where a device's number is
_KIND_AT = 64 + 12 + 1  # of an inode, where the kind of its first attribute is
_SECURITY = 6


def pack_hostile(tree: Path, target: Path, device: int = 0x103) -> str:
    """Pack the new folder `tree`, in which `null` is a device of the host; needs root. Returns the digest."""
    tree.mkdir(exist_ok=True)
    os.mknod(tree / "null", stat.S_IFCHR | 0o666, 0)
    pack_tree(tree, target)
    return _changed(target, "null", _VALUE_AT, device.to_bytes(4, "little"))


def pack_labelled(tree: Path, target: Path) -> str:
    """Pack the new folder `tree`, in which `tool` has an attribute for the kernel. Returns the digest."""
    tree.mkdir(exist_ok=True)
    (tree / "tool").write_bytes(b"")
    os.setxattr(tree / "tool", "user.capability", b"all")
    pack_tree(tree, target)
    return _changed(target, "tool", _KIND_AT, bytes([_SECURITY]))


def _changed(target: Path, name: str, at: int, data: bytes) -> str:
    with Erofs.open(target) as layer:
        found = layer.lookup(name)
    assert found is not None
    with target.open("r+b") as file:
        file.seek(found.at + at)
        file.write(data)
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()
