"""Directories as layers: same tree, same digest; what a layer can't hold is refused by name."""

import os
import socket
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec, NotFound, RequirementMissing
from barchan.image import pack
from barchan.image.directory import check_tree, default_user, import_directory
from barchan.image.store import ImageStore
from barchan.image.template import LayerKind, Template, TemplateConfig


def make_tree(root: Path, names: tuple[str, ...]) -> Path:
    """A tree with the same content, whatever the order in which it is made."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name * 3000)
    (root / "link").symlink_to("a/x")
    (root / "a" / "x").chmod(0o751)
    return root


def imported(store: ImageStore, tree: Path, name: str, kind: LayerKind = "erofs") -> Template:
    return import_directory(store, tree, TemplateConfig(name=name), kind, lambda stage: None)


def test_the_same_tree_gives_the_same_digest(tmp_path: Path) -> None:
    """Neither the time nor the order in which a tree was made counts; its content, names and modes do."""
    names = ("a/x", "a/y", "b/z", "c")
    store = ImageStore(tmp_path / "images")
    first = make_tree(tmp_path / "one", names)
    one = imported(store, first, "one")
    second = make_tree(tmp_path / "two", names[::-1])
    assert imported(store, second, "two").digest == one.digest
    (second / "c").chmod(0o600)
    mode = imported(store, second, "two")
    (second / "c").chmod(0o644)
    (second / "c").write_text("other")
    content = imported(store, second, "two")
    assert len({one.digest, mode.digest, content.digest}) == 3


def test_a_layer_kept_as_a_directory_has_the_digest_of_its_file(tmp_path: Path) -> None:
    """Where the kernel can't mount EROFS files a layer is unpacked, under the same digest, with modes and links."""
    tree = make_tree(tmp_path / "tree", ("a/x", "b"))
    packed = imported(ImageStore(tmp_path / "one"), tree, "x")
    store = ImageStore(tmp_path / "two")
    unpacked = imported(store, tree, "x", "dir")
    assert unpacked.digest == packed.digest
    assert unpacked.layers[0].kind == "dir"
    root = store.layer_path(unpacked.layers[0])
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == ["a", "a/x", "b", "link"]
    assert (root / "a/x").read_text() == "a/x" * 3000
    assert (root / "a/x").stat().st_mode & 0o777 == 0o751
    assert (root / "link").readlink() == Path("a/x")
    assert unpacked.size_bytes >= 9000
    store.remove("x")
    assert not root.exists()


def test_what_a_layer_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    """Named pipes and sockets are `InvalidSpec` naming the entry, and nothing is stored."""
    store = ImageStore(tmp_path / "images")
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    os.mkfifo(tree / "deep" / "pipe")
    with pytest.raises(InvalidSpec, match=r"tree/deep/pipe is a named pipe"):
        imported(store, tree, "x")
    (tree / "deep" / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tree / "deep" / "sock"))
        with pytest.raises(InvalidSpec, match=r"tree/deep/sock is a socket"):
            imported(store, tree, "x")
    assert store.list() == []


@pytest.mark.requires("root")
def test_devices_and_foreign_ids_are_refused_by_name(tmp_path: Path) -> None:
    """A device node, or an owner beyond a sandbox's 65,536 ids, is `InvalidSpec` naming the entry."""
    os.mknod(tmp_path / "null", 0o600 | 0o020000, os.makedev(1, 3))
    with pytest.raises(InvalidSpec, match="null is a character device"):
        check_tree(tmp_path)
    (tmp_path / "null").unlink()
    (tmp_path / "file").touch()
    os.chown(tmp_path / "file", 65_536, 0)
    with pytest.raises(InvalidSpec, match="file belongs to 65536:0"):
        check_tree(tmp_path)
    os.chown(tmp_path / "file", 65_535, 65_535)
    check_tree(tmp_path)


def test_a_link_out_of_the_tree_is_kept_and_not_followed(tmp_path: Path) -> None:
    """Symbolic links are content: what they point to on this host is not looked at."""
    outside = tmp_path / "outside"
    outside.mkdir()
    os.mkfifo(outside / "pipe")
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "out").symlink_to(outside)
    check_tree(tree)


def test_a_directory_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    """So is a file in its place."""
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        with pytest.raises(NotFound, match="not a directory"):
            imported(ImageStore(tmp_path / "images"), tmp_path / name, "x")


def test_the_default_user_is_one_the_tree_has(tmp_path: Path) -> None:
    """`agent` where the tree's user list has it, else root; an unreadable list is none."""
    assert default_user(tmp_path, "agent") == "root"
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_bytes(b"agents:x:1:1:\xff\nroot:x:0:0:::\n")
    assert default_user(tmp_path, "agent") == "root"
    (tmp_path / "etc/passwd").write_text("root:x:0:0:::\nagent:x:1000:1000:::\n")
    assert default_user(tmp_path, "agent") == "agent"


def test_a_missing_tool_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RequirementMissing` says which program is missing and how to get it; nothing is left in the store."""
    (tmp_path / "tree").mkdir()
    store = ImageStore(tmp_path / "images")
    monkeypatch.setattr(pack, "PACKER", tmp_path / "barchan-pack")
    with pytest.raises(RequirementMissing, match=r"barchan-pack, which was not built \(try: make setup"):
        imported(store, tmp_path / "tree", "x")
    assert list((tmp_path / "images/tmp").iterdir()) == []
