"""`barchan image` without a node: lists, trees, collection and verification of a store."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from barchan.cli.common import bytes_of, seconds_of
from barchan.cli.image_transfer import limits_of
from barchan.cli.main import main
from barchan.errors import InvalidSpec
from barchan.image.pack import Limits, pack_tree
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.model.image import ASLEEP_PREFIX

WEEK_S = 7 * 86_400


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    """A store with `base`, last used long ago, and `tool` on top of it."""
    for name in ("BARCHAN_URL", "BARCHAN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BARCHAN_STATE_DIR", str(tmp_path / "state"))
    store = ImageStore(tmp_path / "state" / "images")
    monkeypatch.setattr(time, "time", lambda real=time.time: real() - WEEK_S)
    base = commit(store, "base", b"b" * 5000)
    commit(store, "tool", b"t", base.layers, entrypoint=("/bin/tool", "--now"), cmd=("x",))
    monkeypatch.undo()
    monkeypatch.setenv("BARCHAN_STATE_DIR", str(tmp_path / "state"))
    return store


def commit(
    store: ImageStore, name: str, content: bytes, below: tuple[Layer, ...] = (), **config: tuple[str, ...]
) -> Template:
    with store.workspace() as workspace:
        (workspace / "tree").mkdir()
        (workspace / "tree" / "file").write_bytes(content)
        digest = pack_tree(workspace / "tree", workspace / "layer", mtime_unix_s=0)
        new = NewLayer(Layer(digest, "erofs"), workspace / "layer")
        made = TemplateConfig(name=name, base_layers=len(below), **config)  # type: ignore[arg-type]
        return store.commit(made, (new, *below))


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["image", *words]) == code
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return json.loads(said(capsys, *words, "--json", code=code).splitlines()[-1])


def test_list_tells_what_is_shared(store: ImageStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each image, the bytes of the layers that another one has, too."""
    base, tool = told(capsys, "list")
    assert (base["shared_bytes"], tool["shared_bytes"]) == (base["size_bytes"], base["size_bytes"])
    assert tool["size_bytes"] > tool["shared_bytes"]
    assert base["used_unix_s"] == base["created_unix_s"]
    head, *rows = said(capsys, "list").splitlines()
    assert head.split()[:6] == ["NAME", "DIGEST", "SIZE", "SHARED", "AGE", "USED"]
    assert [row.split()[0] for row in rows] == ["base", "tool"]


def test_what_hibernated_sandboxes_have_written_is_left_out(
    store: ImageStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such images are their node's business; --all and the tree show them, too."""
    commit(store, f"{ASLEEP_PREFIX}1234-sb_1234_5678", b"w", store.resolve("base").layers)
    assert [image["name"] for image in told(capsys, "list")] == ["base", "tool"]
    assert len(told(capsys, "list", "--all")) == 3
    assert ASLEEP_PREFIX in said(capsys, "list", "--tree")


def test_the_tree_shows_what_stands_on_what(store: ImageStore, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a layer, those on it below it, and what sharing saves."""
    own, below = store.resolve("tool").layers
    head, first, second, summary = said(capsys, "list", "--tree").splitlines()
    assert head.split() == ["LAYER", "SIZE", "KIND", "IMAGES"]
    assert (first.split()[0], first.split()[-1]) == (below.digest[:12], "base")
    assert second.startswith(f"└─ {own.digest[:12]}")
    top = commit(store, "top", b"u", (own, below)).layers[0]
    assert said(capsys, "list", "--tree").splitlines()[3].startswith(f"   └─ {top.digest[:12]}")
    store.remove("top")
    assert second.split()[-1] == "tool"
    assert summary.startswith("2 images, 2 layers, ")
    (root,) = told(capsys, "list", "--tree")
    assert (root["digest"], root["images"], root["children"][0]["images"]) == (below.digest, ["base"], ["tool"])


def test_show_tells_own_layers_from_the_base_and_what_other_runtimes_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Topmost first, with kind and size."""
    lines = said(capsys, "show", "tool").splitlines()
    layers = [line.split()[2:] for line in lines if line.startswith("layer")]
    assert [(words[0], words[-1]) for words in layers] == [("erofs,", "own"), ("erofs,", "base")]
    words = [line.split()[1] for line in lines if line.startswith(("entrypoint", "cmd"))]
    assert words == ['["/bin/tool","--now"]', '["x"]']
    shown = told(capsys, "show", "tool")
    assert [layer["size_bytes"] == layer["local_bytes"] for layer in shown["layers"]] == [True, True]


def test_gc_takes_what_it_is_told_to(store: ImageStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Left-overs always; images by age; a dry run nothing, though it says the same."""
    stray = store.root / "layers" / f"{hashlib.sha256().hexdigest()}.erofs"
    stray.write_bytes(b"123")
    assert "would free 3 B" in said(capsys, "gc", "--dry-run")
    assert stray.exists()
    report = told(capsys, "gc")
    assert [layer["size_bytes"] for layer in report["left_overs"]] == [3]
    assert not stray.exists()
    assert said(capsys, "gc", "--unused-for", "8d").splitlines()[0] == "nothing to remove"
    store.note_use("base")
    rows = said(capsys, "gc", "--unused-for", "6d").splitlines()
    assert [row.split()[0] for row in rows] == ["IMAGE", "tool", "freed"]
    os.utime(store.root / "used" / "base.json", (0, 0))
    report = told(capsys, "gc", "--keep-bytes", "1KiB")
    assert [image["name"] for image in report["images"]] == ["base"]
    assert report["kept_bytes"] == 0
    assert list((store.root / "layers").iterdir()) == []


def test_verify_fails_where_something_is_damaged(store: ImageStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and a line for each damage with the images that need it."""
    assert "nothing damaged" in said(capsys, "verify")
    with store.layer_path(store.resolve("base").layers[0]).open("r+b") as file:
        file.write(b"x")
    assert main(["image", "verify", "tool"]) == 1
    output = capsys.readouterr()
    assert "needed by tool" in output.err
    assert "1 damaged" in output.out
    assert told(capsys, "verify", code=1)["damages"][0]["images"] == ["base", "tool"]


def test_remove_works_without_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    """And starts none."""
    assert said(capsys, "remove", "tool", "base") == "removed tool\nremoved base\n"
    assert said(capsys, "list").startswith("no images")


def test_durations_and_sizes_are_written_as_people_do() -> None:
    """A number and a unit; anything else names the option and an example."""
    assert [seconds_of(text, "--x") for text in ("90s", "1.5m", "2h", "7d", "1w")] == [90, 90, 7200, WEEK_S, WEEK_S]
    assert [bytes_of(text, "--x") for text in ("0", "12", "1.5KiB", "2 MiB", "20GiB", "1TiB")] == [
        *(0, 12, 1536, 2 << 20, 20 << 30, 1 << 40),
    ]
    for text in ("", "7", "d", "-1d", "7 d", "1e9d", "inf"):
        with pytest.raises(InvalidSpec, match=r"--x .*7d"):
            seconds_of(text, "--x")
    for text in ("", "KiB", "-1", "1GB", "1e3", "nan"):
        with pytest.raises(InvalidSpec, match=r"--x .*20GiB"):
            bytes_of(text, "--x")


def test_limits_of_a_pull_are_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each by its name; a wrong one is refused with those there are."""
    (tmp_path / "tree").mkdir()
    for name in "abc":
        (tmp_path / "tree" / name).write_text(name)
    source = ("pull", f"dir:{tmp_path / 'tree'}", "--name", "t")
    said(capsys, *source, "--limit", "entries=2", code=2)
    said(capsys, *source, "--limit", "entries=10", "--limit", "bytes=1MiB")
    assert limits_of({"bytes": "2KiB", "depth": "7", "git-memory": "1GiB"}) == Limits(
        bytes_max=2048, depth_max=7, git_bytes_max=1 << 30
    )
    assert limits_of({}) == Limits()
    for given in ({"names": "1"}, {"entries": "1MiB"}, {"bytes": "x"}):
        with pytest.raises(InvalidSpec, match=r"there are: entries, bytes|whole number|KiB"):
            limits_of(given)
