"""What makes two recipes the same image, and how one with several networks is split. No node is asked."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec, TaskError
from barchan.model.node import ImageInfo
from barchan.sdk.build import PREFIX, parted, plan
from barchan.sdk.put import PutDigests, _local, put_digest
from barchan.sdk.recipe import Put, Recipe, Run

DEBIAN = ImageInfo(
    name="debian",
    digest="d" * 64,
    layers=("l",),
    size_bytes=1,
    created_unix_s=0.0,
    user="agent",
    workdir="/home/agent",
    env={},
)
IMAGES = dict.fromkeys(("debian", "d" * 12, "d" * 64), DEBIAN)


def name(recipe: Recipe) -> str:
    return plan(recipe, IMAGES).name


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "a").write_text("one")
    (root / "sub" / "link").symlink_to("../a")
    return root


def test_equal_content_is_one_image(tree: Path) -> None:
    """Age, place and the order of variables don't count, nor does how the base is called."""
    steps = (Run(command="x", env={"A": "1", "B": "2"}), Put(path="/t", source=str(tree)))
    first = name(Recipe(base="debian", steps=steps))
    os.utime(tree / "a", (1, 1))
    other = tree.rename(tree.parent / "moved").rename(tree)
    steps = (Run(command="x", env={"B": "2", "A": "1"}), Put(path="/t", source=f"{other}/"))
    assert name(Recipe(base="d" * 12, steps=steps, memory_mib=100)) == first
    assert first.startswith(PREFIX) and len(first) == len(PREFIX) + 24


def test_other_content_is_another_image(tree: Path) -> None:
    """Bytes, modes, links, names, steps, their order and what sandboxes start with: each makes another image."""
    put, run = Put(path="/t", source=str(tree)), Run(command="x")
    base = Recipe(base="debian", steps=(put, run))
    names = [
        name(recipe)
        for recipe in (
            base,
            Recipe(base="debian", steps=(run, put)),
            Recipe(base="debian", steps=(put,)),
            Recipe(base="debian", steps=(put, run), env={"A": "1"}),
            Recipe(base="debian", steps=(put, run), user="root"),
            Recipe(base="debian", steps=(put, run), workdir="/t"),
            Recipe(base="debian", steps=(put, Run(command="x", network="open"))),
            Recipe(base=base),
        )
    ]
    (tree / "a").chmod(0o755)
    names.append(name(base))
    (tree / "a").write_text("two")
    names.append(name(base))
    (tree / "sub" / "link").unlink()
    (tree / "sub" / "link").symlink_to("../sub")
    names.append(name(base))
    (tree / "b").touch()
    names.append(name(base))
    assert len(set(names)) == len(names) == 12


def test_a_source_that_can_t_be_sent(tree: Path) -> None:
    """A missing source, one that is neither file nor folder, and a link that leads out are refused by name."""
    with pytest.raises(InvalidSpec, match=r"can't read .*/no: No such file"):
        name(Recipe(base="debian", steps=(Put(path="/t", source=str(tree / "no")),)))
    os.mkfifo(tree / "fifo")
    with pytest.raises(InvalidSpec, match="fifo is neither file, directory nor link"):
        put_digest(Put(path="/t", source=str(tree)))
    (tree / "fifo").unlink()
    (tree / "out").symlink_to("/etc/passwd")
    with pytest.raises(InvalidSpec, match="out links to '/etc/passwd', an absolute path"):
        put_digest(Put(path="/t", source=str(tree)))
    for wrong in (Put(path="/t"), Put(path="/t", source=str(tree), data=b"")):
        with pytest.raises(InvalidSpec, match="exactly one of source and data"):
            put_digest(wrong)


def test_a_source_is_read_again_when_it_looks_changed(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only then: bytes, modes, and what a link names; a folder that can't be looked into is no empty one."""
    read: list[Put] = []
    monkeypatch.setattr("barchan.sdk.put.put_digest", lambda put, real=put_digest: (read.append(put), real(put))[1])
    digests, put = PutDigests(), Put(path="/t", source=str(tree))
    seen = [digests.of(put), digests.of(put)]
    assert seen[0] == seen[1] and len(read) == 1
    (tree / "a").write_text("two")
    seen.append(digests.of(put))
    (tree / "a").chmod(0o755)
    seen.append(digests.of(put))
    (tree / "sub" / "link").unlink()
    (tree / "sub" / "link").symlink_to("../sub")
    seen.append(digests.of(put))
    assert len(set(seen)) == 4 and len(read) == 4

    def closed(top: Path, onerror: Callable[[OSError], None]) -> list[object]:
        onerror(PermissionError(13, "Permission denied", str(top / "sub")))
        return []

    monkeypatch.setattr("os.walk", closed)
    for digest_of in (digests.of, put_digest):
        with pytest.raises(InvalidSpec, match=r"can't read .*/sub: Permission denied"):
            digest_of(put)


def test_a_mode_reaches_what_is_in_folders(tree: Path, tmp_path: Path) -> None:
    """The content first: after it, a mode like 0640 closes its folder to all but root."""
    (tree / "sub" / "b").touch()
    changed: list[str] = []

    def chmod(path: str, mode: int, *, real: Callable[..., None] = os.chmod, **more: bool) -> None:
        if mode == 0o640:
            changed.append(os.path.basename(path))
        real(path, mode, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.chmod", chmod)
        _local(Put(path="/t", source=str(tree), mode=0o640), tmp_path / "copy", None)
    assert changed.index("b") < changed.index("sub")
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "copy").rglob("*")}
    assert found == {"a": 0o640, "sub": 0o640, "b": 0o640, "link": 0o640}


def test_what_is_sent_is_what_was_planned(tree: Path, tmp_path: Path) -> None:
    """A source that was changed after it was named is refused; one that was not goes as it is."""
    for index, put in enumerate(
        (
            Put(path="/t", source=str(tree), without=("sub",), mode=0o600),
            Put(path="/t", source=str(tree)),
            Put(path="/t", source=str(tree / "a")),
            Put(path="/t", source=str(tree / "sub" / "link"), mode=0o600),
        )
    ):
        (tree / "a").write_text("one")
        digest = put_digest(put)
        local = _local(put, tmp_path / f"same-{index}", digest)
        assert local.path is not None and not local.path.is_relative_to(tree)
        assert local.is_folder or local.path.name == Path(put.source or "").name
        (tree / "a").write_text("two")
        with pytest.raises(TaskError, match="was changed while"):
            _local(put, tmp_path / f"other-{index}", digest)


def test_a_part_ends_with_each_command() -> None:
    """Files go with the command after them; what comes last is a part of its own."""
    put, a, b = Put(path="/p", data=b""), Run(command="a"), Run(command="b", network="open")
    assert parted((put, put, a, b, put)) == [(put, put, a), (b,), (put,)]
    assert parted((put, a)) == [(put, a)]
    assert parted(()) == [()]


def test_the_parts_of_a_recipe() -> None:
    """Equal beginnings are one image, whatever follows; settings are the last part's, and steps count through."""
    a, b, put = Run(command="a"), Run(command="b", network="open"), Put(path="/p", data=b"")
    recipe = Recipe(base="debian", layers=("debian",), steps=(put, a, b), user="agent", memory_mib=100)
    last = plan(recipe, IMAGES)
    first = last.base
    assert not isinstance(first, ImageInfo)
    assert first.recipe == Recipe(base="debian", layers=("debian",), steps=(put, a), memory_mib=100)
    assert (first.before, first.total, first.layers) == (0, 3, (DEBIAN,))
    assert (last.recipe.steps, last.recipe.user, last.layers) == ((b,), "agent", ())
    assert last.place(0) == "step 3 of 3"
    assert first.name == name(Recipe(base="debian", layers=("d" * 64,), steps=(put, a)))
    assert first.name != name(Recipe(base="debian", steps=(put, a)))
