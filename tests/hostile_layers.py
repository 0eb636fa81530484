"""Layers that no packer of ours makes."""

import hashlib
import os
import stat
from pathlib import Path

from barchan.image.erofs import Erofs
from barchan.image.pack import pack_tree

_VALUE_AT = 16  # of an inode, where a device's number is


def pack_hostile(tree: Path, target: Path, device: int = 0x103) -> str:
    """Pack the new folder `tree`, in which `null` is a device of the host; needs root. Returns the digest."""
    tree.mkdir(exist_ok=True)
    os.mknod(tree / "null", stat.S_IFCHR | 0o666, 0)
    pack_tree(tree, target)
    with Erofs.open(target) as layer:
        found = layer.lookup("null")
    assert found is not None
    with target.open("r+b") as file:
        file.seek(found.at + _VALUE_AT)
        file.write(device.to_bytes(4, "little"))
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()
