"""What makes two recipes the same image, and how one with several networks is split. No node is asked."""

import os
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec, NotFound
from barchan.model.node import ImageInfo
from barchan.sdk.build import PREFIX, parted, plan
from barchan.sdk.put import put_digest
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


def name(recipe: Recipe) -> str:
    return plan(recipe, [DEBIAN]).name


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


def test_a_base_that_is_not_there() -> None:
    """The message names it, what there is, and how to have it."""
    with pytest.raises(NotFound, match=r"no image 'python:3' .*there are: debian .*--base python:3=NAME"):
        name(Recipe(base="python:3", steps=(Run(command="x"),)))


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
    last = plan(recipe, [DEBIAN])
    first = last.base
    assert not isinstance(first, ImageInfo)
    assert first.recipe == Recipe(base="debian", layers=("debian",), steps=(put, a), memory_mib=100)
    assert (first.before, first.total, first.layers) == (0, 3, (DEBIAN,))
    assert (last.recipe.steps, last.recipe.user, last.layers) == ((b,), "agent", ())
    assert last.place(0) == "step 3 of 3"
    assert first.name == name(Recipe(base="debian", layers=("d" * 64,), steps=(put, a)))
    assert first.name != name(Recipe(base="debian", steps=(put, a)))
