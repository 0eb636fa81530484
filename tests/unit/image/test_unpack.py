"""Layers kept as directories: all that the file says is in them, and what changes there is noticed."""

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from barchan.image.pack import keep_as, make_distinct, pack_tar
from barchan.image.store import ImageStore
from barchan.image.template import TemplateConfig
from barchan.image.unpack import IDENTITY
from barchan.image.verify import verify
from tests.layouts import member, tar_of

pytestmark = pytest.mark.requires("root")

HOLES = b"a" * 70_000 + bytes(400_000) + b"b" * 5_000


def archive() -> bytes:
    """A bit of everything that a layer can hold."""
    holes, su = tarfile.TarInfo("opt/holes"), tarfile.TarInfo("bin/su")
    su.mode, su.size, su.mtime, su.uid, su.gid = 0o6755, 3, 1.5, 7, 8
    holes.size = len(HOLES)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member(".", tarfile.DIRTYPE, mode=0o711, mtime=5))
        tar.addfile(member("bin", tarfile.DIRTYPE, mode=0o2750, uid=3))
        tar.addfile(su, io.BytesIO(b"su\n"))
        tar.addfile(member("bin/again", tarfile.LNKTYPE, "bin/su"))
        tar.addfile(member("bin/sh", tarfile.SYMTYPE, "/no/where", mode=0o777, uid=9))
        tar.addfile(member("pipe", tarfile.FIFOTYPE, mode=0o640))
        tar.addfile(holes, io.BytesIO(HOLES))
        tar.addfile(member("opt/.wh.gone", tarfile.REGTYPE))
        tar.addfile(member("d", tarfile.DIRTYPE, mode=0o755))
        tar.addfile(member("d/.wh..wh..opq", tarfile.REGTYPE))
    return out.getvalue()


@pytest.fixture
def kept(tmp_path: Path) -> tuple[ImageStore, Path]:
    """A store with that layer as a directory."""
    return keep(ImageStore(tmp_path / "images"), archive())


def keep(store: ImageStore, data: bytes, *, is_distinct: bool = False) -> tuple[ImageStore, Path]:
    with store.workspace() as workspace:
        packed = workspace / "layer.erofs"
        digest = pack_tar(cast(BinaryIO, io.BytesIO(data)), packed)
        new = keep_as(packed, make_distinct(packed, {digest} if is_distinct else ()), workspace, "dir")
        template = store.commit(TemplateConfig(name="x"), (new,))
    return store, store.layer_path(template.layers[0])


def damages(store: ImageStore) -> list[str]:
    return [damage.cause for damage in verify(store, (), lambda stage: None).damages]


def test_all_of_a_layer_is_there(kept: tuple[ImageStore, Path]) -> None:
    """Owners, set-id bits, links to one file, times, holes, and what it says to the layers below."""
    store, tree = kept
    su = (tree / "bin/su").stat()
    assert (stat.S_IMODE(su.st_mode), su.st_uid, su.st_gid, su.st_nlink, su.st_mtime) == (0o6755, 7, 8, 2, 1.5)
    assert (tree / "bin/again").stat().st_ino == su.st_ino
    assert stat.S_IMODE((tree / "bin").stat().st_mode) == 0o2750
    assert (tree / "bin/sh").lstat().st_uid == 9
    assert (tree.stat().st_mtime, stat.S_IMODE(tree.stat().st_mode)) == (5, 0o711)
    holes = tree / "opt/holes"
    assert holes.read_bytes() == HOLES and holes.stat().st_blocks * 512 < len(HOLES) - 300_000
    assert (tree / "opt/gone").lstat().st_rdev == 0 and stat.S_ISCHR((tree / "opt/gone").lstat().st_mode)
    assert os.getxattr(tree / "d", "trusted.overlay.opaque") == b"y"
    report = verify(store, (), lambda stage: None)
    assert (report.damages, report.bytes_read > 70_000) == ((), True)
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "bin/su").write_bytes(b"xx\n"),
        lambda tree: (tree / "bin/su").chmod(0o755),
        lambda tree: os.chown(tree / "bin/sh", 0, 0, follow_symlinks=False),
        lambda tree: (tree / "bin/again").unlink(),
        lambda tree: (tree / "new").write_bytes(b""),
        lambda tree: os.removexattr(tree / "d", "trusted.overlay.opaque"),
        lambda tree: os.utime(tree / "d", (1, 1)),
        lambda tree: os.setxattr(tree, IDENTITY, bytes(16)),
        lambda tree: os.mknod(tree / "dev", stat.S_IFCHR | 0o600, os.makedev(1, 3)),
        shutil.rmtree,
    ],
)
def test_what_changes_is_noticed(kept: tuple[ImageStore, Path], change: Callable[[Path], object]) -> None:
    """Content, mode, owner, links, entries, attributes, times: whatever of it is not the layer's."""
    store, tree = kept
    change(tree)
    (cause,) = damages(store)
    assert tree.name in cause and "(try: remove its images" in cause


def test_an_identity_of_its_own_stays(tmp_path: Path) -> None:
    """A layer that was changed in place after it was packed is still itself."""
    data = archive()
    store, usual = keep(ImageStore(tmp_path / "images"), data)
    _, tree = keep(store, data, is_distinct=True)
    assert tree.name != usual.name
    assert damages(store) == []


def test_of_some_directories_nobody_can_tell(tmp_path: Path) -> None:
    """A link's mode can't be kept; and those that earlier releases made say nothing of themselves."""
    store, tree = keep(ImageStore(tmp_path / "images"), tar_of(member("l", tarfile.SYMTYPE, "x", mode=0o644)))
    assert IDENTITY not in os.listxattr(tree)
    (tree / "new").write_bytes(b"")
    assert damages(store) == []
    shutil.rmtree(tree)
    assert len(damages(store)) == 1
