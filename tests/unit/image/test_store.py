"""The image store: names, digests, crash safety, builders side by side."""

import hashlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest

from barchan.errors import BlobCorrupt, InvalidSpec, NotFound
from barchan.image import holds
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.model.gc import GcRequest


def commit(store: ImageStore, name: str, content: bytes = b"layer", **config: object) -> Template:
    """Store a template with one layer of these bytes."""
    with store.workspace() as workspace:
        path = workspace / "layer"
        path.write_bytes(content)
        layer = Layer(hashlib.sha256(content).hexdigest(), "erofs")
        return store.commit(msgspec.convert({"name": name, **config}, TemplateConfig), (NewLayer(layer, path),))


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_template_is_found_by_name_digest_and_prefix(tmp_path: Path) -> None:
    """`resolve` takes a name, a digest with or without `sha256:`, or its first twelve digits."""
    store = ImageStore(tmp_path / "images")
    made = commit(store, "swe/django:1.2", user="agent", workdir="/work", env={"A": "1"}, source="dir:/x")
    for wanted in ("swe/django:1.2", made.digest, f"sha256:{made.digest}", made.digest[:12]):
        assert store.resolve(wanted) == made
    assert made.size_bytes == len(b"layer")
    assert store.layer_path(made.layers[0]).read_bytes() == b"layer"
    assert [info.name for info in store.list()] == ["swe/django:1.2"]
    assert store.list()[0].layers == (made.layers[0].digest,)


def test_what_is_missing_is_answered_with_what_there_is(tmp_path: Path) -> None:
    """`NotFound` names the images there are and the command that builds one; an absent store is an empty one."""
    store = ImageStore(tmp_path / "images")
    with pytest.raises(NotFound, match=r"store is empty.*barchan image build debian"):
        store.resolve("debian")
    assert store.list() == []
    assert not (tmp_path / "images").exists()
    made = commit(store, "one")
    for made_by_itself in ("snap-0a1b", "prep-0a1b"):
        commit(store, made_by_itself)
    for wanted in ("two", made.digest[:11], "x" * 1000, "../one", "one\0"):
        with pytest.raises(NotFound, match=r"there are: one \(try"):
            store.resolve(wanted)


def test_an_ambiguous_prefix_is_not_guessed(tmp_path: Path) -> None:
    """Two names of one content share a digest, which is fine; a prefix of two digests is nobody's."""
    store = ImageStore(tmp_path)
    one, other = commit(store, "one"), commit(store, "other")
    assert one.digest == other.digest
    assert store.resolve(one.digest).digest == one.digest
    path = tmp_path / "templates" / "third.json"
    third = msgspec.structs.replace(one, name="third", digest=one.digest[:20] + "0" * 44)
    path.write_bytes(msgspec.json.encode(third))
    with pytest.raises(NotFound):
        store.resolve(one.digest[:12])


def test_the_digest_covers_what_a_sandbox_sees_and_nothing_else(tmp_path: Path) -> None:
    """Same layers, user, workdir and env in any order: same digest; any of them changed: another one."""
    store = ImageStore(tmp_path)
    first = commit(store, "a", env={"A": "1", "B": "2"}, source="x").digest
    assert commit(store, "b", env={"B": "2", "A": "1"}, source="y").digest == first
    others = [
        commit(store, "c", b"other", env={"A": "1", "B": "2"}).digest,
        commit(store, "c", env={"A": "1"}).digest,
        commit(store, "c", env={"A": "1", "B": "2"}, user="root").digest,
        commit(store, "c", env={"A": "1", "B": "2"}, workdir="/w").digest,
    ]
    assert len({first, *others}) == 5


def test_removing_keeps_the_layers_that_others_need(tmp_path: Path) -> None:
    """A layer goes with its last template; replacing a template drops the layer that it alone had."""
    store = ImageStore(tmp_path)
    commit(store, "one")
    shared = commit(store, "two")
    store.remove("one")
    assert store.layer_path(shared.layers[0]).exists()
    commit(store, "two", b"newer")
    assert not store.layer_path(shared.layers[0]).exists()
    store.remove("two")
    assert files(tmp_path) == set()
    with pytest.raises(NotFound):
        store.remove("two")


def over(store: ImageStore, name: str, content: bytes, below: tuple[Layer, ...]) -> Template:
    """Store a template with a layer of these bytes over layers that the store has."""
    with store.workspace() as workspace:
        path = workspace / "layer"
        path.write_bytes(content)
        layer = Layer(hashlib.sha256(content).hexdigest(), "erofs")
        return store.commit(TemplateConfig(name=name), (NewLayer(layer, path), *below))


def test_a_template_can_stand_on_layers_of_others(tmp_path: Path) -> None:
    """They stay for as long as one template names them, whichever goes first; `has_layer` tells."""
    store = ImageStore(tmp_path)
    base = commit(store, "base", b"base")
    top = over(store, "top", b"top", base.layers)
    assert [store.layer_path(layer).read_bytes() for layer in top.layers] == [b"top", b"base"]
    assert top.size_bytes == len(b"topbase")
    store.remove("base")
    assert [store.has_layer(layer.digest) for layer in top.layers] == [True, True]
    over(store, "top", b"other", top.layers[1:])
    assert [store.has_layer(layer.digest) for layer in top.layers] == [False, True]
    store.remove("top")
    assert files(tmp_path) == set()


def test_a_layer_that_is_gone_can_not_be_stood_on(tmp_path: Path) -> None:
    """The image below was removed meanwhile: `NotFound`, and neither name nor layer is stored."""
    store = ImageStore(tmp_path)
    base = commit(store, "base", b"base")
    store.remove("base")
    with pytest.raises(NotFound, match="image was removed"):
        over(store, "top", b"top", base.layers)
    assert files(tmp_path) == set()


def test_a_commit_reads_no_other_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it costs does not grow with the store: only when a layer may have lost its last name are all looked at."""
    store = ImageStore(tmp_path)
    for number in range(5):
        commit(store, f"image-{number}", b"%d" % number)
    read: list[str] = []
    read_text = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path.name), read_text(path))[1])
    other = ImageStore(tmp_path)
    over(other, "new", b"new", ())
    assert read == []
    over(other, "new", b"newer", ())
    assert set(read) == {"new.json", *(f"image-{number}.json" for number in range(5))}


def test_a_damaged_template_stops_neither_others_nor_its_own_repair(tmp_path: Path) -> None:
    """Nobody knows which layers it names, so none is removed until it is built again; then what is unused goes."""
    store = ImageStore(tmp_path)
    commit(store, "x", b"first")
    other = commit(store, "y", b"second")
    (tmp_path / "templates" / "x.json").write_bytes(b"{")
    store.remove("y")
    assert store.layer_path(other.layers[0]).exists()
    made = commit(store, "x", b"third")
    assert files(tmp_path) == {"templates/x.json", f"layers/{store.layer_path(made.layers[0]).name}"}


@pytest.mark.parametrize(
    "config",
    [
        {"name": ""},
        {"name": "../x"},
        {"name": "a" * 129},
        {"name": "a" + "/" * 127},
        {"name": "0123456789ab"},
        {"name": "sha256:x"},
        {"name": "x", "user": "a b"},
        {"name": "x", "user": "a:b:c"},
        {"name": "x", "workdir": "home"},
        {"name": "x", "workdir": "/a\0"},
        {"name": "x", "env": {"": "1"}},
        {"name": "x", "env": {"A=B": "1"}},
        {"name": "x", "env": {"A": "\0"}},
    ],
)
def test_a_template_that_no_sandbox_could_use_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    """A bad name, user, directory or variable is `InvalidSpec`, and nothing is stored."""
    with pytest.raises(InvalidSpec):
        commit(ImageStore(tmp_path), **{"name": "x", **config})  # type: ignore[arg-type]
    assert files(tmp_path) == set()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"name": "x"}'])
def test_a_damaged_template_is_told_not_guessed(tmp_path: Path, content: bytes) -> None:
    """A template file that does not decode is `BlobCorrupt`, also when another image is asked for by digest."""
    store = ImageStore(tmp_path)
    commit(store, "x")
    (tmp_path / "templates" / "x.json").write_bytes(content)
    with pytest.raises(BlobCorrupt, match="barchan image remove x, then build"):
        store.resolve("x")


def test_a_damaged_template_hides_itself_only_and_can_be_removed(tmp_path: Path) -> None:
    """Lists and lookups go on without it; its name can be removed, and then what only it had goes."""
    store = ImageStore(tmp_path)
    bad, good = commit(store, "bad", b"bad"), commit(store, "good", b"good")
    (tmp_path / "templates" / "bad.json").write_bytes(b"{")
    for now in (store, ImageStore(tmp_path)):
        assert [info.name for info in now.list()] == ["good"]
        assert now.resolve(good.digest[:12]) == now.resolve("good") == good
        with pytest.raises(NotFound, match="there are: bad, good"):
            now.resolve("other")
    assert store.remove("bad").name == "bad"
    assert [store.has_layer(made.layers[0].digest) for made in (bad, good)] == [False, True]
    with pytest.raises(NotFound):
        store.resolve("bad")


def test_a_damaged_layer_is_replaced_by_the_same_one_brought_again(tmp_path: Path) -> None:
    """One that is right stays the very file that it is."""
    store = ImageStore(tmp_path)
    (layer,) = commit(store, "x", b"content").layers
    path = store.layer_path(layer)
    inode = path.stat().st_ino
    commit(store, "y", b"content")
    assert path.stat().st_ino == inode
    path.write_bytes(b"c0ntent")
    assert store.is_damaged(layer)
    commit(store, "x", b"content")
    assert path.read_bytes() == b"content"
    assert not store.is_damaged(layer)


def test_few_of_many_names_are_told(tmp_path: Path) -> None:
    """Of a store of thousands a message names twenty, and how many more there are."""
    store = ImageStore(tmp_path)
    for number in range(25):
        commit(store, f"image-{number:02}")
    with pytest.raises(NotFound, match=r"image-19 and 5 more \("):
        store.resolve("other")


def test_a_known_digest_is_found_without_a_look_at_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is whether there is a name; a digest also after its image has got another name."""
    store = ImageStore(tmp_path)
    made = [commit(store, f"image-{number}", b"%d" % number) for number in range(5)]
    assert store.resolve(made[3].digest) == made[3]
    looks: list[str] = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: (looks.append(str(path)), stat(path, **how))[1])
    assert store.resolve(made[3].digest) == made[3]
    assert store.find("image-7") is None
    assert [Path(look).name for look in looks] == [f"{made[3].digest}.json", "image-3.json", "image-7.json"]
    monkeypatch.undo()
    commit(store, "again", b"3")
    store.remove("image-3")
    assert store.resolve(made[3].digest).name == "again"


def test_nothing_is_remembered_of_what_is_gone(tmp_path: Path) -> None:
    """A node makes and removes images for as long as it runs, and so do other processes beside it."""
    store, other = ImageStore(tmp_path), ImageStore(tmp_path)
    for number in range(5):
        store.resolve(commit(other, "theirs", b"%d" % number).digest)
        commit(store, f"mine-{number}", b"x%d" % number)
        store.remove(f"mine-{number}")
    other.remove("theirs")
    assert store.list() == []
    index = store._index
    assert not (index._known or index._by_digest)
    store.collect(GcRequest())
    assert not index._counted
    assert len(store._sizes) <= 1


def test_layers_that_a_living_process_holds_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever removes or replaces their image; they go once they are let go of, or their holder is no more for long."""
    store, other = ImageStore(tmp_path), ImageStore(tmp_path)
    kept = [commit(store, f"image-{number}", b"%d" % number).layers[0] for number in range(3)]
    holder = store.hold_as("node")
    for layer in kept:
        holder.note(layer.digest)
    other.remove("image-0")
    commit(other, "image-1", b"newer")
    other.remove("image-2")
    report = other.collect(GcRequest())
    assert (report.left_overs, report.freed_bytes) == ((), 0)
    assert all(store.layer_path(layer).exists() for layer in kept)
    holder.drop(kept[0].digest)
    assert store.settle()
    assert [store.layer_path(layer).exists() for layer in kept] == [False, True, True]
    over(other, "image-3", b"top", kept[1:2])
    holder.close()
    for _ in range(2):  # the next one of that name may be on its way
        assert other.settle()
        assert [store.layer_path(layer).exists() for layer in kept] == [False, True, True]
    again = store.hold_as("node")
    assert again.noted == {layer.digest for layer in kept[1:]}
    again.close()
    assert other.settle()
    monkeypatch.setattr(holds, "EXPIRY_S", 0.0)
    assert other.settle()
    assert [store.layer_path(layer).exists() for layer in kept] == [False, True, False]
    assert not store.settle()
    assert list((tmp_path / "live").iterdir()) == []


def test_what_sandboxes_on_disk_need_waits_as_long_as_their_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody need be there for them; without the journal nobody knows them any more."""
    monkeypatch.setattr(holds, "EXPIRY_S", 0.0)
    store, journal = ImageStore(tmp_path / "images"), tmp_path / "journal"
    journal.touch()
    (layer,) = commit(store, "x").layers
    holder = store.hold_as("node")
    holder.note(layer.digest)
    holder.tell_stored(journal)
    holder.close()
    store.remove("x")
    for _ in range(2):
        store.collect(GcRequest())
        assert store.layer_path(layer).exists()
    journal.unlink()
    for _ in range(2):
        store.collect(GcRequest())
    assert not store.layer_path(layer).exists()


def test_a_template_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """The format number decides, even where the fields would decode."""
    store = ImageStore(tmp_path)
    made = commit(store, "x")
    (tmp_path / "templates" / "x.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(made, format=2)))
    with pytest.raises(BlobCorrupt, match="format 2"):
        store.resolve("x")


# Commits a second version of `x`, and dies by SIGKILL at the n-th call that changes or syncs a file.
KILLED_BUILDER = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from tests.unit.image.test_store import commit
    from barchan.image.store import ImageStore

    left = int(sys.argv[2])
    def dying(call):
        def wrapper(*args, **kwargs):
            global left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapper
    for owner, name in ((os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "unlink"), (Path, "write_bytes")):
        setattr(owner, name, dying(getattr(owner, name)))
    commit(ImageStore(Path(sys.argv[1])), "x", b"second")
""")


def run_builder(root: Path, dies_at: int) -> int:
    source = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{source / 'src'}:{source}"}
    argv = [sys.executable, "-c", KILLED_BUILDER, str(root), str(dies_at)]
    return subprocess.run(argv, env=environment, check=False, timeout=60).returncode


def test_a_builder_killed_anywhere_leaves_a_whole_store(tmp_path: Path) -> None:
    """At every step: the old template or the new one, its layers whole; the next build removes the remains."""
    dies_at, returncode = 0, -signal.SIGKILL
    while returncode != 0:
        dies_at += 1
        root = tmp_path / str(dies_at)
        store = ImageStore(root)
        commit(store, "x", b"first")
        returncode = run_builder(root, dies_at)
        assert returncode in (0, -signal.SIGKILL)
        found = store.resolve("x")
        content = store.layer_path(found.layers[0]).read_bytes()
        assert content in (b"first", b"second")
        assert hashlib.sha256(content).hexdigest() == found.layers[0].digest
        commit(store, "y", b"third")
        assert list((root / "tmp").iterdir()) == []
        assert files(root / "layers") == {store.layer_path(template.layers[0]).name for template in store.templates()}
    assert dies_at > 8  # the builder was killed at many different steps
    assert store.layer_path(store.resolve("x").layers[0]).read_bytes() == b"second"


def test_a_living_builder_keeps_its_workspace(tmp_path: Path) -> None:
    """Builders work side by side: entering a workspace removes only those whose owner is dead."""
    store = ImageStore(tmp_path)
    with store.workspace() as mine:
        (mine / "half").write_bytes(b"x")
        commit(store, "other")
        with store.workspace() as second:
            assert second != mine
        assert (mine / "half").read_bytes() == b"x"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    """An exception in a workspace removes it."""
    with pytest.raises(RuntimeError), ImageStore(tmp_path).workspace() as workspace:
        (workspace / "deep" / "er").mkdir(parents=True)
        raise RuntimeError
    assert list((tmp_path / "tmp").iterdir()) == []
