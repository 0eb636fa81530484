"""Layers as archives of the OCI format: what other tools make of them, what can't be said, what a merged one is."""

import hashlib
import io
import os
import random
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from barchan.errors import BlobCorrupt, InvalidSpec, RequirementMissing
from barchan.image.diff_tar import diff_tar, merge
from barchan.image.erofs import Erofs, verify_layer
from barchan.image.pack import pack_tar, pack_tree
from barchan.image.stack import Conflict, Stack, conflicts
from tests.integration.layer_trees import Seen, make_tree, shown_by_kernel, shown_of_tree

pytestmark = [pytest.mark.requires("root"), pytest.mark.timeout(120)]

SEED = 5
Open = Callable[[Path], Erofs]


def layer(target: Path, *entries: str) -> Path:
    """A layer of empty files, directories (`name/`), links (`name -> target`) and marks (`.wh.name`)."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for entry in entries:
            name, _, target_of_link = entry.partition(" -> ")
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type = tarfile.DIRTYPE if entry.endswith("/") else tarfile.REGTYPE
            if target_of_link:
                info.type, info.linkname = tarfile.SYMTYPE, target_of_link
            tar.addfile(info)
    archive.seek(0)
    pack_tar(archive, target)
    return target


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens layers for as long as a test runs."""
    with ExitStack() as exits:
        yield lambda path: exits.enter_context(Erofs.open(path))


def tar_of(layers: list[Erofs], below: list[Erofs] | None = None, **options: bool) -> bytes:
    out = io.BytesIO()
    diff_tar(layers, out=out, below=below, **options)
    return out.getvalue()


@pytest.mark.requires("umoci")
def test_other_tools_unpack_the_same_tree(tmp_path: Path, opened: Open) -> None:
    """Each layer of random stacks as an archive: `tar` lists it, and `umoci` unpacks all to what the overlay shows."""
    source, stacks = random.Random(SEED), []
    for number in range(4):
        paths = [tmp_path / f"{number}-{level}.erofs" for level in range(3)]
        for path in paths:
            make_tree(path.with_suffix(".tree"), source)
            pack_tree(path.with_suffix(".tree"), path)
        stacks.append(paths)
    for paths, (expected, _) in zip(stacks, shown_by_kernel(stacks, tmp_path / "work"), strict=True):
        image, layers = f"{paths[0].with_suffix('.oci')}:it", [opened(path) for path in paths]
        subprocess.run(["umoci", "init", "--layout", paths[0].with_suffix(".oci")], check=True)
        subprocess.run(["umoci", "new", "--image", image], check=True)
        for index in reversed(range(len(layers))):
            archive = paths[index].with_suffix(".tar")
            archive.write_bytes(tar_of([layers[index]], layers[index + 1 :], is_bottom=index == len(layers) - 1))
            listed = subprocess.run(["tar", "-tf", archive], capture_output=True, check=True)
            assert listed.stderr == b"" and listed.stdout.startswith(b"./\n")
            subprocess.run(["umoci", "raw", "add-layer", "--image", image, archive], check=True)
        bundle = paths[0].with_suffix(".bundle")
        subprocess.run(["umoci", "unpack", "--image", image, bundle], check=True, capture_output=True)
        found, _ = shown_of_tree(bundle / "rootfs")
        assert with_values(found) == with_values(expected)


def with_values(seen: Seen) -> Seen:
    """In pax, an attribute of no bytes is none; some tools take it so."""
    named = {path: facts[-1] for path, facts in seen.items()}
    kept = {path: {k: v for k, v in xattrs.items() if v} for path, xattrs in named.items() if isinstance(xattrs, dict)}
    return {path: (*facts[:-1], kept[path]) for path, facts in seen.items()}


def test_the_same_layers_give_the_same_archive_and_layer(tmp_path: Path, opened: Open) -> None:
    """Byte for byte; and a layer that was made from an archive is what its own archive makes."""
    make_tree(tmp_path / "tree", random.Random(SEED))
    pack_tree(tmp_path / "tree", tmp_path / "one")
    one = opened(tmp_path / "one")
    assert tar_of([one], []) == tar_of([one], [])
    digest = merge([one], tmp_path / "two", below=())
    two = opened(tmp_path / "two")
    assert merge([two], tmp_path / "three") == digest
    assert pack_tar(io.BytesIO(tar_of([two])), tmp_path / "four") == digest


def test_marks_stay_as_long_as_anything_may_lie_below(tmp_path: Path, opened: Open) -> None:
    """Whiteouts and opaque directories of all merged layers; at the bottom they hide nothing and are left out."""
    upper = opened(layer(tmp_path / "upper", "a/", "a/.wh..wh..opq", "a/new", ".wh.gone", "b/", "b/.wh.y"))
    lower = opened(layer(tmp_path / "lower", "a/", "a/old", "gone", ".wh.away", "b/", "b/x", "b/y"))
    with tarfile.open(fileobj=io.BytesIO(tar_of([upper, lower]))) as tar:
        names = [member.name for member in tar]
    assert names == [".", "a", "a/.wh..wh..opq", "a/new", ".wh.away", "b", "b/x", "b/.wh.y", ".wh.gone"]
    with tarfile.open(fileobj=io.BytesIO(tar_of([upper, lower], is_bottom=True))) as tar:
        names = [member.name for member in tar]
    assert names == [".", "a", "a/new", "b", "b/x"]


def test_hard_links_and_holes_come_through(tmp_path: Path, opened: Open) -> None:
    """Names of one file stay names of one file, and a file of 1 GiB with little in it takes little again."""
    tree = tmp_path / "tree"
    (tree / "dir").mkdir(parents=True)
    (tree / "one").write_text("x")
    os.link(tree / "one", tree / "dir" / "two")
    with open(tree / "sparse", "wb") as file:
        file.truncate(1 << 30)
        file.seek(500_000_000)
        file.write(b"island")
    pack_tree(tree, tmp_path / "layer")
    merge([opened(tmp_path / "layer")], tmp_path / "merged")
    merged = opened(tmp_path / "merged")
    one, two, sparse = (merged.lookup(path) for path in ("one", "dir/two", "/sparse"))
    assert one is not None and one == two and one.links == 2
    assert sparse is not None and sparse.size == 1 << 30
    assert merged.read(sparse, 499_999_998, 10) == b"\0\0island\0\0"
    assert (tmp_path / "merged").stat().st_size < 1 << 20


def test_what_the_format_cannot_say_is_refused_by_name(tmp_path: Path, opened: Open) -> None:
    """Names like marks, attributes with `=`, more bytes than allowed, renamed directories without what lies below."""
    cases = {"name": "a/.wh.b", "attribute": "attr", "renamed": "moved"}
    for case, named in cases.items():
        tree = tmp_path / case
        (tree / named).parent.mkdir(parents=True)
        (tree / named).mkdir()
        if case != "name":
            key = "user.a=b" if case == "attribute" else "trusted.overlay.redirect"
            os.setxattr(tree / named, key, b"old")
        pack_tree(tree, tmp_path / f"{case}.erofs")
        with pytest.raises(InvalidSpec, match=f"^{named}"):
            tar_of([opened(tmp_path / f"{case}.erofs")])
        with pytest.raises(InvalidSpec, match=f"^{named}"):
            merge([opened(tmp_path / f"{case}.erofs")], tmp_path / "target")
        assert not (tmp_path / "target").exists()
    (tree / "large").write_bytes(bytes(4097))
    pack_tree(tree, tmp_path / "large.erofs")
    with pytest.raises(InvalidSpec, match=r"^large: .* more than 4096 bytes"):
        diff_tar([opened(tmp_path / "large.erofs")], out=io.BytesIO(), below=(), bytes_max=4096)


def test_a_socket_is_left_out_and_still_hides_what_is_below(tmp_path: Path, opened: Open) -> None:
    """Since no archive can hold one; at the bottom nothing of it is left."""
    tree = tmp_path / "tree"
    tree.mkdir()
    os.mknod(tree / "socket", stat.S_IFSOCK | 0o600)
    pack_tree(tree, tmp_path / "layer")
    upper, lower = opened(tmp_path / "layer"), opened(layer(tmp_path / "lower", "socket"))
    for is_bottom, marks in ((False, [".wh.socket"]), (True, [])):
        with tarfile.open(fileobj=io.BytesIO(tar_of([upper], is_bottom=is_bottom))) as tar:
            assert [member.name for member in tar] == [".", *marks]
    merge([upper, lower], tmp_path / "merged", is_bottom=True)
    assert Stack([opened(tmp_path / "merged")]).lookup("socket") is None


def test_conflicts_are_told_by_path_and_kind(tmp_path: Path, opened: Open) -> None:
    """A directory where the other side has none, either way and below merged directories; what is replaced knowingly is
    no conflict, nor is anything that only one side has."""
    above = opened(
        layer(
            *(tmp_path / "above", "a/", "a/file", "a/dir/", "a/link -> x", "b/", "b/.wh.gone", "same/", "same/x"),
            *("new/", "new/.wh..wh..opq", "only/", "only/x"),
        )
    )
    below = opened(
        layer(
            *(tmp_path / "below", "a/", "a/file/", "a/file/deep", "a/dir", "a/link/", "b/", "b/gone/", "same/"),
            *("same/y", "new", "other/"),
        )
    )
    told = [
        Conflict("/a/dir", "directory", "file"),
        Conflict("/a/file", "file", "directory"),
        Conflict("/a/link", "link", "directory"),
    ]
    assert conflicts(above, below) == told
    swapped = [Conflict(path, lower_kind, upper_kind) for path, upper_kind, lower_kind in told]
    assert conflicts(below, above) == [*swapped, Conflict("/new", "file", "directory")]
    hidden = opened(layer(tmp_path / "hidden", ".wh.a", "new/.wh..wh..opq"))
    assert conflicts(above, [hidden, below]) == []
    assert conflicts([], below) == []


def test_a_damaged_layer_is_found(tmp_path: Path) -> None:
    """A changed byte anywhere, and a wrong structure under the right digest."""
    path = layer(tmp_path / "layer", "dir/", "dir/file", "link -> target")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    verify_layer(path, digest)
    data = bytearray(path.read_bytes())
    data[data.index(b"target")] = 0
    path.write_bytes(data)
    with pytest.raises(BlobCorrupt, match="sha256"):
        verify_layer(path, digest)
    with pytest.raises(BlobCorrupt, match="says nothing that a link can say"):
        verify_layer(path, hashlib.sha256(data).hexdigest())


@pytest.mark.requires("mkfs.erofs")
def test_compressed_layers_of_earlier_releases_are_told_apart(tmp_path: Path) -> None:
    """They can't be read here, which is said with what to do; their bytes can still be verified."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"x" * 100_000)
    path = tmp_path / "layer"
    subprocess.run(["mkfs.erofs", "--quiet", "-x-1", "-zlz4hc", path, tmp_path / "tree"], check=True)
    with pytest.raises(RequirementMissing, match="build its image again"):
        Erofs.open(path)
    with path.open("rb") as file:
        verify_layer(path, hashlib.file_digest(file, "sha256").hexdigest())
