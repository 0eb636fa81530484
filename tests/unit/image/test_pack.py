"""The packer as a function: digests, typed errors, and nothing left of what did not come to be."""

import hashlib
import io
import os
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from barchan.errors import BackendError, CapacityError, Conflict, InvalidSpec
from barchan.image.erofs import Erofs
from barchan.image.pack import Limits, keep_as, make_distinct, pack_tar, pack_tree

WAIT_S = 20.0


def tar_of(*members: tuple[str, bytes]) -> io.BytesIO:
    """An archive of files."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    made.seek(0)
    return made


def test_the_digest_is_the_files(tmp_path: Path) -> None:
    """Of an archive and of a tree, and the same for the same content."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"x" * 100_000)
    digests = [
        pack_tar(tar_of(("file", b"x" * 3_000_000)), tmp_path / "one"),
        pack_tar(tar_of(("file", b"x" * 3_000_000)), tmp_path / "two"),
        pack_tree(tmp_path / "tree", tmp_path / "three", mtime_unix_s=0),
    ]
    assert digests == [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("one", "two", "three")]
    assert digests[0] == digests[1] != digests[2]
    with Erofs.open(tmp_path / "one") as layer:
        file = layer.lookup("file")
        assert file is not None
        assert layer.read(file, 0, 1 << 22) == b"x" * 3_000_000


@pytest.mark.parametrize(
    ("members", "limits", "reason"),
    [
        ((("ok", b""), ("../up", b"x")), Limits(), r"the archive can't be a layer: \.\./up: a name with \.\."),
        ((("a", b""), ("b", b"")), Limits(entries_max=1), "b: more than 1 entries"),
        ((("big", b"x" * 9_000_000),), Limits(bytes_max=1 << 20), f"big: it has 9000000 bytes, of at most {1 << 20}"),
        ((("a/b/c", b""),), Limits(depth_max=2), "a/b/c: directories more than 2 deep"),
    ],
)
def test_what_is_refused_is_named_and_leaves_nothing(
    tmp_path: Path, members: tuple[tuple[str, bytes], ...], limits: Limits, reason: str
) -> None:
    """`InvalidSpec`, also when the packer ends long before its input does."""
    with pytest.raises(InvalidSpec, match=reason):
        pack_tar(tar_of(*members), tmp_path / "image", limits=limits)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    """Bytes of any kind, and none."""
    for content in (b"", b"x" * 5000, os.urandom(1 << 16)):
        with pytest.raises(InvalidSpec, match="the archive can't be a layer"):
            pack_tar(io.BytesIO(content), tmp_path / "image")
    assert list(tmp_path.iterdir()) == []


def test_a_tree_that_cannot_be_a_layer_is_refused(tmp_path: Path) -> None:
    """By the name of the entry; a tree that is not there is not."""
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    with pytest.raises(InvalidSpec, match="tree can't be a layer: a/b: directories more than 2 deep"):
        pack_tree(tmp_path / "tree", tmp_path / "image", limits=Limits(depth_max=2))
    with pytest.raises(BackendError, match="No such file or directory"):
        pack_tree(tmp_path / "none", tmp_path / "image")
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(Conflict, match="mine is there already"):
        pack_tree(tmp_path / "tree", tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "tree"]


class Breaking(io.BytesIO):
    """Breaks off in the middle."""

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if not data:
            raise ConnectionResetError("the other side is gone")
        return data


def test_a_source_that_breaks_off_breaks_the_packer_off(tmp_path: Path) -> None:
    """Its error is the caller's; there is no image, and no packer that waits for more."""
    with pytest.raises(ConnectionResetError, match="the other side is gone"):
        pack_tar(Breaking(tar_of(("file", b"x" * 5_000_000)).getvalue()[:4_000_000]), tmp_path / "image")
    assert list(tmp_path.iterdir()) == []
    assert packers(tmp_path) == []


@pytest.mark.requires("root")
def test_a_full_disk_is_no_room(tmp_path: Path) -> None:
    """`CapacityError`, which says when to ask again."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", small], check=True)
    try:
        with pytest.raises(CapacityError, match=r"no room for the layer: .*No space left on device") as caught:
            pack_tar(tar_of(("big", b"x" * 1_000_000)), small / "image")
        assert caught.value.details["retry_after_ms"] == 1000
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


def packers(folder: Path) -> list[int]:
    """Processes that pack into a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            argv = path.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"barchan-pack" in argv.split(b"\0")[0] and os.fsencode(folder) in argv:
            found.append(int(path.parent.name))
    return found


def until(folder: Path, wanted: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(packers(folder)) != wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_packer_dies_with_whoever_started_it(tmp_path: Path) -> None:
    """Killed with SIGKILL while its archive is still to come."""
    program = (
        "import os, sys, pathlib\n"
        "from barchan.image.pack import pack_tar\n"
        "pack_tar(os.fdopen(0, 'rb'), pathlib.Path(sys.argv[1]))\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "image")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as parent:
        until(tmp_path, 1)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        until(tmp_path, 0)


def test_equal_layers_are_made_distinct(tmp_path: Path) -> None:
    """By their identity alone, and always in the same way."""
    digests: list[str] = []
    for name in ("one", "two", "three", "two-again"):
        pack_tar(tar_of(("file", b"x")), tmp_path / name)
        digests.append(make_distinct(tmp_path / name, digests[: {"two-again": 1}.get(name, 3)]))
    assert len(set(digests)) == 3
    assert digests[1] == digests[3]
    images = [(tmp_path / name).read_bytes() for name in ("one", "two", "three")]
    assert len({image[:1072] + image[1088:] for image in images}) == 1


HOLES = b"a" * 70_000 + bytes(400_000) + b"b" * 5_000 + bytes(300_000) + b"c"


@pytest.mark.requires("root")
def test_a_layer_as_a_directory_says_the_same_to_those_below(tmp_path: Path) -> None:
    """Whiteouts, opaque directories, attributes and the mode of the root are there, too."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, mode in ((".", b"5", 0o711), ("opaque", b"5", 0o750), ("opaque/.wh..wh..opq", b"0", 0)):
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode
            info.pax_headers = {"SCHILY.xattr.user.note": "x"} if name == "opaque" else {}
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo(".wh.gone"))
        info = tarfile.TarInfo("holes")
        info.size, info.mode, info.mtime = len(HOLES), 0o4711, 1_000_000
        tar.addfile(info, io.BytesIO(HOLES))
    made.seek(0)
    digest = pack_tar(cast(BinaryIO, made), tmp_path / "image")
    new = keep_as(tmp_path / "image", digest, tmp_path, "dir")
    assert (new.layer.digest, new.layer.kind) == (digest, "dir")
    assert stat.S_IMODE(new.path.stat().st_mode) == 0o711
    gone = (new.path / "gone").lstat()
    assert (stat.S_ISCHR(gone.st_mode), gone.st_rdev) == (True, 0)
    holes = new.path / "holes"
    assert holes.read_bytes() == HOLES
    assert (stat.S_IMODE(holes.stat().st_mode), holes.stat().st_mtime) == (0o4711, 1_000_000)
    opaque = new.path / "opaque"
    assert {key: os.getxattr(opaque, key) for key in os.listxattr(opaque)} == {
        "trusted.overlay.opaque": b"y",
        "user.note": b"x",
    }
    assert [path.name for path in tmp_path.iterdir()] == [f"{digest}.dir"]
