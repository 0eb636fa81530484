"""Marks of new directories that would hide other images: taken out where they hide nothing, and only there."""

import os
from pathlib import Path

import pytest

from barchan.image.erofs import Erofs
from barchan.image.opaque import drop_needless_opaque
from barchan.image.pack import pack_tree
from barchan.image.stack import OPAQUE, Stack

pytestmark = [pytest.mark.requires("root")]


def pack(tmp_path: Path, name: str, paths: dict[str, dict[str, bytes]]) -> Path:
    """A layer of directories, with the attributes given."""
    tree = tmp_path / name
    for path, attributes in paths.items():
        (tree / path).mkdir(parents=True, exist_ok=True)
        for key, value in attributes.items():
            os.setxattr(tree / path, key, value)
    pack_tree(tree, tmp_path / f"{name}.erofs")
    return tmp_path / f"{name}.erofs"


def test_marks_that_hide_nothing(tmp_path: Path) -> None:
    """A new directory loses its mark, also in a merged or renamed one; one that replaces another keeps it."""
    below = pack(tmp_path, "below", {"kept/old": {}, "merged/in": {}, "was/named": {}, "plain": {}})
    opaque, redirect = {"trusted.overlay.opaque": b"y"}, "trusted.overlay.redirect"
    above = pack(
        tmp_path,
        "above",
        {
            "new": {"user.first": b"\x0e\x04\x01\x00overlay.opaquey", **opaque, "user.last": b"x"},
            "kept": opaque,
            "merged/new": opaque,
            "merged/in": opaque,
            "moved": {redirect: b"/was"},
            "moved/new": opaque,
            "moved/named": opaque,
        },
    )
    size = above.stat().st_size
    with Erofs.open(below) as lower:
        assert drop_needless_opaque(above, [lower])
        assert not drop_needless_opaque(above, [lower])
        with Erofs.open(above) as layer:
            marked = [path for path, inode in layer.walk() if layer.xattrs(inode).get(OPAQUE) == b"y"]
            assert marked == [b"kept", b"merged/in", b"moved/named"]
            first = layer.lookup("new")
            assert first is not None and layer.xattrs(first)[b"user.first"] == b"\x0e\x04\x01\x00overlay.opaquey"
            shown = [path for path, node in Stack([layer, lower]).walk() if node.inode.is_dir]
    shown.remove(b"")
    new = ["kept", "merged", "merged/in", "merged/new", "moved", "moved/named", "moved/new", "new"]
    assert [os.fsdecode(path) for path in shown] == [*new, "plain", "was", "was/named"]
    assert above.stat().st_size == size
