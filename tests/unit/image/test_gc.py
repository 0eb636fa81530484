"""Which images go to make room, and which never do."""

import hashlib
import os
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import BlobCorrupt
from barchan.image.gc import GRACE_S, choose
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.model.gc import GcReport, GcRequest

NOW = 1_000_000.0
DAY_S = 86_400.0


def layer(name: str) -> Layer:
    return Layer(hashlib.sha256(name.encode()).hexdigest(), "erofs")


def template(name: str, *layers: str) -> Template:
    """A template with layers of these names, topmost first."""
    stored = tuple(map(layer, layers))
    return Template(
        name=name,
        digest=name,
        layers=stored,
        size_bytes=0,
        created_unix_s=0,
        user="root",
        workdir="/",
        env={},
        source="",
    )


def chosen(
    templates: list[Template], ages_d: dict[str, float], busy: tuple[str, ...] = (), **asked: float
) -> list[str]:
    """Names in order; each layer has 10 bytes, `ages_d` are days since the last use (100 if not given)."""
    used = {item.name: NOW - DAY_S * ages_d.get(item.name, 100.0) for item in templates}
    sizes = {layer: 10 for item in templates for layer in item.layers}
    request = msgspec.convert(asked, GcRequest, strict=False)
    found = choose(templates, used, sizes, {layer(name).digest for name in busy}, request, NOW)
    return [item.template.name for item in found]


def test_nothing_goes_unless_it_is_asked_for() -> None:
    """Without an age and a budget, images stay whatever their age."""
    assert chosen([template("a", "1")], {}) == []


def test_unused_images_go_those_of_builds_first_then_the_oldest() -> None:
    """All that were not used for that long, in this order; the others stay."""
    templates = [template("a", "1"), template("b", "2"), template("prep-c", "3"), template("d", "4")]
    ages = {"a": 10, "b": 20, "prep-c": 9, "d": 6.9}
    assert chosen(templates, ages, unused_for_s=7 * DAY_S) == ["prep-c", "b", "a"]


def test_a_budget_ends_the_removal() -> None:
    """With both, only as many of the unused ones go as it takes; a layer that two have counts when both are gone."""
    templates = [template("a", "1", "x"), template("b", "2", "x"), template("c", "3"), template("d", "4")]
    ages = {"a": 40, "b": 30, "c": 20, "d": 10}
    assert chosen(templates, ages, keep_bytes=50) == []
    assert chosen(templates, ages, keep_bytes=40) == ["a"]
    assert chosen(templates, ages, keep_bytes=39) == ["a", "b"]
    assert chosen(templates, ages, keep_bytes=0, unused_for_s=15 * DAY_S) == ["a", "b", "c"]


def test_a_base_stays_while_an_image_on_it_does() -> None:
    """It is used when one that stands on it is; unused together, the one above goes first."""
    base, middle, top = template("base", "b"), template("prep-m", "m", "b"), template("top", "t", "m", "b")
    assert chosen([base, middle, top], {"top": 1}, unused_for_s=7 * DAY_S) == []
    assert chosen([base, middle, top], {"top": 8}, unused_for_s=7 * DAY_S) == ["top", "prep-m", "base"]
    assert chosen([base, middle, top], {}, keep_bytes=20) == ["top"]


def test_a_base_stays_however_its_layer_was_kept_once() -> None:
    """It was brought here whole after an image had been built on it; that one names the layer as it was."""
    base, above = template("base", "1"), template("above", "2", "1")
    lazily = msgspec.structs.replace(above, layers=(above.layers[0], Layer(base.layers[0].digest, "lazy")))
    assert chosen([base, lazily], {"above": 1}, unused_for_s=7 * DAY_S) == []
    assert chosen([base, lazily], {}, unused_for_s=7 * DAY_S) == ["above", "base"]


def test_two_names_of_one_image_go_together_or_not_at_all() -> None:
    """One is used when the other is."""
    one, other = template("one", "1"), template("other", "1")
    assert chosen([one, other], {"one": 1}, unused_for_s=7 * DAY_S) == []
    assert chosen([one, other], {}, unused_for_s=7 * DAY_S) == ["one", "other"]


def test_what_a_live_sandbox_was_made_of_stays() -> None:
    """Its image, also one whose name alone keeps the layers of a sandbox whose own image was removed."""
    base, above = template("base", "b"), template("above", "a", "b")
    assert chosen([base, above], {}, busy=("b",), unused_for_s=1) == ["above"]
    assert chosen([above], {}, busy=("b",), unused_for_s=1) == []
    assert chosen([base, above], {}, busy=("a", "b"), unused_for_s=1) == []


def test_what_was_made_or_used_just_now_stays() -> None:
    """A create may be on its way to it, whatever the budget."""
    grace_d = GRACE_S / DAY_S
    assert chosen([template("a", "1")], {"a": grace_d / 2}, keep_bytes=0, unused_for_s=0) == []
    assert chosen([template("a", "1")], {"a": grace_d * 2}, keep_bytes=0, unused_for_s=0) == ["a"]


@given(
    st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 2)), max_size=8),
    st.sets(st.integers(0, 7)),
    st.integers(0, 60),
    st.lists(st.integers(0, 20), min_size=8, max_size=8),
)
def test_no_rule_takes_what_stays_or_lives(
    made_on: list[tuple[int, int]], busy: set[int], keep_bytes: int, ages: list[int]
) -> None:
    """Whatever stands on what: layers of live sandboxes that have a name keep one, and a base the images on it."""
    templates: list[Template] = []
    for number, (base, own) in enumerate(made_on):  # some bring no layer of their own: another name of their base
        below = templates[base].layers if 0 <= base < number else (layer("ground"),)
        layers = (*(layer(f"{number}-{index}") for index in range(own)), *below)
        templates.append(msgspec.structs.replace(template(f"t{number}"), layers=layers))
    ages_d = {item.name: float(age) for item, age in zip(templates, ages, strict=False)}
    live = {found.digest for number in busy if number < len(templates) for found in templates[number].layers}
    used = {name: NOW - DAY_S * days for name, days in ages_d.items()}
    sizes = {found: 10 for item in templates for found in item.layers}
    asked = GcRequest(keep_bytes=keep_bytes, unused_for_s=5 * DAY_S)
    gone = choose(templates, used, sizes, live, asked, NOW)
    names = {item.template.name for item in gone}
    named = {found for item in templates if item.name not in names for found in item.layers}
    assert live <= {found.digest for found in named}
    assert all(ages_d[name] >= 5 for name in names)
    assert sum(item.freed_bytes for item in gone) == 10 * len(sizes.keys() - named)
    assert not named & {item.template.layers[0] for item in gone}


# through the store


def commit(store: ImageStore, name: str, content: bytes, below: tuple[Layer, ...] = ()) -> Template:
    with store.workspace() as workspace:
        path = workspace / "layer"
        path.write_bytes(content)
        new = NewLayer(Layer(hashlib.sha256(content).hexdigest(), "erofs"), path)
        return store.commit(TemplateConfig(name=name), (new, *below))


def age(root: Path, made: Template, days: float) -> None:
    """Let a template be this old, and its last use, too."""
    path = root / "templates" / f"{made.name}.json"
    older = msgspec.structs.replace(made, created_unix_s=made.created_unix_s - days * DAY_S)
    path.write_bytes(msgspec.json.encode(older))
    used = root / "used" / path.name
    if used.exists():
        os.utime(used, (time.time() - days * DAY_S,) * 2)


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != "lock"}


def collect(
    root: Path, *, unused_for_s: float | None = None, dry_run: bool = False, busy: tuple[str, ...] = ()
) -> GcReport:
    return ImageStore(root).collect(GcRequest(unused_for_s=unused_for_s, dry_run=dry_run), busy)


def test_the_store_removes_what_was_chosen_and_says_what_came_back(tmp_path: Path) -> None:
    """A dry run says the same and removes nothing; the mark of the last use goes with its image."""
    store = ImageStore(tmp_path)
    old, new = commit(store, "old", b"old"), commit(store, "new", b"newer")
    store.note_use("old")
    age(tmp_path, old, 8)
    before = files(tmp_path)
    for dry_run in (True, False):
        report = collect(tmp_path, unused_for_s=7 * DAY_S, dry_run=dry_run)
        assert [(image.name, image.freed_bytes) for image in report.images] == [("old", 3)]
        assert (report.freed_bytes, report.kept_bytes, report.left_overs) == (3, 5, ())
        if dry_run:
            assert files(tmp_path) == before
    assert files(tmp_path) == {"templates/new.json", f"layers/{new.layers[0].digest}.erofs"}


def test_a_noted_use_keeps_an_image(tmp_path: Path) -> None:
    """However long ago it was made."""
    store = ImageStore(tmp_path)
    age(tmp_path, commit(store, "x", b"x"), 8)
    store.note_use("x")
    assert collect(tmp_path, unused_for_s=7 * DAY_S).images == ()


def test_left_overs_go_without_being_asked_for(tmp_path: Path) -> None:
    """Layers that no template names, also whole directories; other files that lie there are not ours."""
    store = ImageStore(tmp_path)
    kept = commit(store, "kept", b"kept")
    stray = [layer("stray"), layer("tree")._replace(kind="dir"), layer("index")._replace(kind="lazy")]
    store.layer_path(stray[0]).write_bytes(b"12345")
    store.layer_path(stray[1]).mkdir()
    (store.layer_path(stray[1]) / "file").write_bytes(b"123")
    store.layer_path(stray[2]).write_bytes(b"1")
    (tmp_path / "layers" / "note.txt").write_bytes(b"mine")
    assert collect(tmp_path, dry_run=True).freed_bytes == 9
    report = collect(tmp_path)
    assert {(found.digest, found.kind) for found in report.left_overs} == set(stray)
    assert report.freed_bytes == 9
    assert {path.name for path in (tmp_path / "layers").iterdir()} == {"note.txt", f"{kept.layers[0].digest}.erofs"}


def test_a_damaged_template_stops_the_removal(tmp_path: Path) -> None:
    """Nobody knows which layers it names: it is told, and everything stays."""
    store = ImageStore(tmp_path)
    age(tmp_path, commit(store, "x", b"x"), 8)
    commit(store, "y", b"y")
    (tmp_path / "templates" / "y.json").write_bytes(b"{")
    before = files(tmp_path)
    with pytest.raises(BlobCorrupt, match=r"y\.json"):
        collect(tmp_path, unused_for_s=7 * DAY_S)
    assert files(tmp_path) == before
