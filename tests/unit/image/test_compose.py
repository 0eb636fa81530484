"""How images are put together, which layers of a long stack become one, and what another base changes."""

import pytest
from msgspec.structs import replace

from barchan.image.compose import (
    compose,
    distinct,
    meeting_of,
    meetings,
    on_another_base,
    own_layers,
    run_to_merge,
    stands_on,
    turned_over,
)
from barchan.image.template import GUEST_PATH, Layer, Template


def layers(names: str) -> tuple[Layer, ...]:
    return tuple(Layer(name, "erofs") for name in names)


def image(name: str, stack: str, base_layers: int = 0, **settings: object) -> Template:
    fixed = {"user": "agent", "workdir": "/", "env": {}, "digest": name, "size_bytes": 1, "created_unix_s": 0.0}
    return Template(
        name=name,
        layers=layers(stack),
        base_layers=base_layers,
        source="",
        **(fixed | settings),  # type: ignore[arg-type]
    )


DEBIAN = image("debian", "D", env={"PATH": "/opt/bin", "A": "d"}, workdir="/home")
TOOL = image("tool", "TtD", 1, env={"PATH": GUEST_PATH, "A": "t"}, user="root")
TASK = image("task", "kTtD", 3, env={"B": "k"})


def test_own_layers_lie_above_the_base() -> None:
    """The last image is topmost; settings are the base's, variables go over each other, a usual PATH over none."""
    assert own_layers(TASK) == layers("k") and own_layers(DEBIAN) == layers("D")
    made = compose(DEBIAN, [TOOL, TASK])
    assert made.layers == layers("kTtD") and made.base_layers == 1
    assert made.env == {"PATH": "/opt/bin", "A": "t", "B": "k"}
    assert (made.name, made.user, made.workdir, made.source) == ("debian", "agent", "/home", "debian + tool + task")
    assert compose(DEBIAN, []) is DEBIAN
    assert len({made.digest, compose(DEBIAN, [TASK, TOOL]).digest, compose(DEBIAN, [TOOL]).digest}) == 3
    assert compose(image("bare", "B"), [TOOL]).env["PATH"] == GUEST_PATH


def test_a_digest_counts_once() -> None:
    """At its topmost place, also where it is the base's."""
    assert distinct(layers("abcab")) == layers("abc")
    assert compose(DEBIAN, [TOOL, TASK, TOOL]).layers == layers("TtkD")
    whole = compose(DEBIAN, [image("whole", "xD")])
    assert (whole.layers, whole.base_layers) == (layers("xD"), 0)


def test_layers_below_what_they_were_made_on_are_found() -> None:
    """That comes of a layer that counts once; in their own order, or with others between, nothing is turned over."""
    assert turned_over([layers("xS"), layers("yS")], layers("ySx")) == layers("x")
    assert turned_over([layers("yS"), layers("xS")], layers("xSy")) == layers("y")
    assert turned_over([layers("xS"), layers("xS")], layers("xS")) == ()
    assert turned_over([layers("xS"), layers("yaS")], layers("xySa")) == layers("ya")[1:]
    assert turned_over([layers("x"), layers("yD")], layers("xyD")) == ()


def test_an_image_stands_on_its_base_however_that_is_kept_now() -> None:
    """A pull may have made the base whole since; on another base it gets that one's layers as they are there."""
    whole, lazy = image("base", "B"), Layer("B", "lazy")
    above = replace(image("above", "aB", 1), layers=(*layers("a"), lazy))
    assert stands_on(above, whole)
    assert on_another_base(above, whole, image("new", "N"))[1] == layers("aN")


def test_only_layers_that_were_not_made_for_each_other_meet() -> None:
    """An image and its own base do not, nor equal layers; each pair of the others does."""
    assert [(upper.name, lower.name) for upper, lower, _ in meetings(DEBIAN, [TOOL, TASK])] == []
    other = image("other", "oX", 1)
    met = list(meetings(DEBIAN, [TOOL, other]))
    assert [(upper.name, lower.name) for upper, lower, _ in met] == [("other", "debian"), ("other", "tool")]
    assert met[1][2] == (layers("o"), layers("X"), layers("Tt"))
    assert meeting_of(TOOL, layers("DT")) is None


@pytest.mark.parametrize(
    ("sizes", "own", "surplus", "expected"),
    [
        ([1, 1, 1, 1, None], 4, 2, range(1, 4)),  # of equal ones the lowest
        ([1, 1, 9, 1, None], 4, 1, range(2)),  # the large one stays
        ([1, 1, 9, 1, 1, 1], 6, 9, range(6)),  # never more than there are
        ([1, 1, 1, 1], 2, 3, range(2, 4)),  # not over the border between own layers and the base
        ([1, None, 1, None], 4, 1, None),
        ([], 0, 1, None),
    ],
)
def test_which_layers_become_one(sizes: list[int | None], own: int, surplus: int, expected: range | None) -> None:
    """The least bytes of what can be merged, as far down as may be."""
    assert run_to_merge(sizes, own, surplus) == expected


def test_an_image_on_another_base() -> None:
    """Own layers and what differs from the old base stay; what is as there becomes as in the new one."""
    old = image("old", "oD", env={"same": "1", "changed": "1", "gone": "1", "taken": "1"}, user="a", workdir="/o")
    new = image("new", "nmD", env={"same": "1", "changed": "2", "fresh": "1", "taken": "2"}, user="b", workdir="/n")
    task = image("task", "koD", 2, env={"same": "1", "changed": "1", "gone": "1", "own": "x"}, user="a", workdir="/k")
    assert stands_on(task, old) and not stands_on(old, old) and not stands_on(task, new)
    config, stack = on_another_base(task, old, new)
    assert stack == layers("knmD") and config.base_layers == 3
    assert config.env == {"same": "1", "changed": "2", "fresh": "1", "own": "x"}
    assert (config.name, config.user, config.workdir) == ("task", "b", "/k")
    config, stack = on_another_base(image("more", "pkoD", 3), old, new)
    assert stack == layers("pknmD") and config.base_layers == 4  # its own is what it added to the image in between
