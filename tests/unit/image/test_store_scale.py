"""The store at the size of a training set, next to other processes, on a full disk, and killed at any time."""

import errno
import hashlib
import os
import random
import signal
import subprocess
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from barchan.errors import CapacityError, NotFound
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.model.gc import GcRequest

TEMPLATES = 2000


def commit(store: ImageStore, name: str, content: bytes, below: tuple[Layer, ...] = ()) -> Template:
    with store.workspace() as workspace:
        path = workspace / "layer"
        path.write_bytes(content)
        new = NewLayer(Layer(hashlib.sha256(content).hexdigest(), "erofs"), path)
        return store.commit(TemplateConfig(name=name), (new, *below))


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != "lock"}


def broken(store: ImageStore) -> list[str]:
    """What is wrong with a store that nobody is changing: missing or wrong layers, files that nobody needs."""
    templates = store.templates()
    layers = {store.layer_path(layer) for template in templates for layer in template.layers}
    wrong = [f"{path} is missing" for path in layers if not path.exists()]
    for path in (store.root / "layers").iterdir():
        if path not in layers:
            wrong.append(f"{path} is nobody's")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != path.stem:
            wrong.append(f"{path} is damaged")
    return wrong + [f"{path} is left" for name in ("tmp", "doubtful") for path in (store.root / name).iterdir()]


@pytest.fixture
def large(tmp_path: Path) -> ImageStore:
    """A store with many templates of a layer each on a base they share, written as its users would find it."""
    store = ImageStore(tmp_path)
    base = commit(store, "base", b"base")
    for number in range(TEMPLATES):
        content = b"own %d" % number
        own = Layer(hashlib.sha256(content).hexdigest(), "erofs")
        store.layer_path(own).write_bytes(content)
        made = msgspec.structs.replace(base, name=f"task-{number}", layers=(own, *base.layers), digest=own.digest)
        (tmp_path / "templates" / f"task-{number}.json").write_bytes(msgspec.json.encode(made))
    return ImageStore(tmp_path)


def test_changes_of_a_large_store_look_at_each_template_once(
    large: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first change that may end a layer looks at every file; those after it only at what others have changed."""
    looked: list[str] = []
    real = os.stat

    def counted(path: object, *args: object, **kwargs: object) -> os.stat_result:
        if str(path).endswith(".json"):
            looked.append(str(path))
        return real(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", counted)
    new_base = commit(large, "new-base", b"new base")

    def rebase(number: int) -> None:
        template = large.resolve(f"task-{number}")
        large.commit(TemplateConfig(name=template.name), (template.layers[0], *new_base.layers))

    rebase(0)
    assert len(looked) >= TEMPLATES
    looked.clear()
    for number in range(1, 21):
        rebase(number)
    assert len(looked) <= 20 * 4
    commit(ImageStore(large.root), "of-another-process", b"other")
    looked.clear()
    rebase(21)
    assert len(looked) >= TEMPLATES
    large.remove("base")  # the other tasks still stand on it
    assert broken(large) == []


def test_two_stores_see_what_the_other_does(tmp_path: Path) -> None:
    """Counts kept from before do not outlive a change by another: neither loses a layer that the other has named."""
    one, other = ImageStore(tmp_path), ImageStore(tmp_path)
    (base,) = commit(one, "base", b"base").layers
    commit(other, "scratch", b"1")
    commit(other, "scratch", b"2")  # the other has counted now
    commit(one, "mine", b"mine", (base,))
    one.remove("base")
    other.remove("scratch")
    assert one.layer_path(base).exists()
    other.remove("mine")
    one.collect(GcRequest())
    assert files(tmp_path) == set()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", mounted], check=True)
    yield mounted
    subprocess.run(["umount", mounted], check=True)


def fill(path: Path, spare_bytes: int) -> None:
    """Leave this much room on a disk."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
        file.truncate(file.tell() // 4096 * 4096 - spare_bytes)


@pytest.mark.requires("root")
@pytest.mark.parametrize("spare_bytes", [0, 4096, 8192, 12288, 16384, 20480])
def test_a_full_disk_is_told_and_leaves_nothing(small_disk: Path, spare_bytes: int) -> None:
    """Wherever the room ends, it is `CapacityError`: the store has what it had before, and works once there is room."""
    store = ImageStore(small_disk / "images")
    old = commit(store, "x", b"old")
    before = files(store.root)
    fill(small_disk / "filler", spare_bytes)
    try:
        commit(store, "x", bytes(4096), old.layers)
        assert spare_bytes > 0
    except CapacityError as error:
        assert "barchan image gc" in str(error)
        assert files(store.root) == before
    (small_disk / "filler").unlink()
    store.collect(GcRequest())
    assert broken(store) == []
    assert commit(store, "y", bytes(8192)).size_bytes == 8192


def churn(root: Path, seed: int) -> None:
    """Change a store at random, for as long as the process lives."""
    choices = random.Random(seed)
    store = ImageStore(root)
    while True:
        name = f"image-{choices.randrange(6)}"
        try:
            action = choices.randrange(6)
            if action == 0:
                store.remove(name)
            elif action == 1:
                store.collect(GcRequest(unused_for_s=0, keep_bytes=choices.randrange(200)))
            else:
                below = store.resolve(f"image-{choices.randrange(6)}").layers[:3] if action > 2 else ()
                commit(store, name, b"layer %d" % choices.randrange(12), below)
        except NotFound:
            continue


def test_processes_killed_at_any_time_leave_a_whole_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at a time commit, remove and collect until they are killed: then every template's layers are whole, and what
    nobody needs is gone after the next change.
    """
    monkeypatch.setattr("barchan.image.gc.GRACE_S", 0.0)
    choices = random.Random(4)
    for round_ in range(40):
        children = []
        for offset in range(2):
            pid = os.fork()
            if pid == 0:
                try:
                    churn(tmp_path, 2 * round_ + offset)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children.append(pid)
        time.sleep(choices.uniform(0.002, 0.04))
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert ended == [-signal.SIGKILL] * 2
        store = ImageStore(tmp_path)
        for template in store.templates():
            for layer in template.layers:
                assert hashlib.sha256(store.layer_path(layer).read_bytes()).hexdigest() == layer.digest
        store.collect(GcRequest())
        assert broken(store) == []
