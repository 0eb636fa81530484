"""Forks and snapshots from the command line: the same as the SDK's, and a snapshot's files as an image for others."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.test_snapshots import copy_store, make_with
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]

Barchan = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def barchan(
    make_node: Callable[[], NodeProcess], images: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Barchan]:
    """Runs the program, which uses a node with images of its own, to its end."""
    store = tmp_path_factory.mktemp("images")
    copy_store(images, store)
    node = make_with(make_node, store)
    node.start()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("BARCHAN_")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "barchan.cli", *arguments],
            env={**kept, "BARCHAN_STATE_DIR": str(node.state_dir)},
            capture_output=True,
            check=False,
            timeout=60,
            text=True,
        )

    yield run
    assert node.end() == []


def test_a_life_of_forks_and_snapshots(barchan: Barchan, tmp_path: Path) -> None:
    """Children by their ids, snapshots as a tree, what goes with one, and the files pushed as an image."""
    parent = barchan("run", "debian", "--keep", "--ttl-s", "100", "--", "sh", "-c", "echo one > /tmp/f").stdout.split()[
        0
    ]
    forked = barchan("fork", parent, "-n", "2", "--label", "of=test", "--env", "A=b")
    assert (forked.returncode, forked.stderr) == (0, "")
    children = forked.stdout.split()
    assert len(children) == 2
    assert barchan("exec", children[1], "--", "sh", "-c", "cat /tmp/f; echo $A").stdout == "one\nb\n"
    first = barchan("snapshot", "make", children[0], "--name", "kept:1", "--metadata", "step=1").stdout.strip()
    child = barchan("run", "kept:1", "--keep", "--ttl-s", "100", "--", "sh", "-c", "echo two > /tmp/g").stdout.split()[
        0
    ]
    second = barchan("snapshot", "make", child, "--json").stdout
    told = json.loads(second)
    assert (told["parent"], told["kind"]) == (first, "fs")
    lines = barchan("snapshot", "list", "--tree").stdout.splitlines()
    assert lines[0].split()[:2] == ["SNAPSHOT", "KIND"]
    assert [lines[1].split()[0], lines[2].split()[:2]] == [first, ["└─", told["snapshot_id"]]]
    assert [
        item["snapshot_id"] for item in json.loads(barchan("snapshot", "list", "--metadata", "step=1", "--json").stdout)
    ] == [first]
    shown = barchan("snapshot", "show", told["snapshot_id"]).stdout
    assert first in shown and told["image"]["name"] in shown
    pushed = barchan("image", "push", told["image"]["name"], f"file://{tmp_path}/store")
    assert pushed.returncode == 0, pushed.stderr
    assert any((tmp_path / "store").rglob("*"))
    removed = barchan("snapshot", "rm", first, "snap_0000000000000000")
    assert (removed.returncode, removed.stdout) == (1, "removed 1\n")
    assert "snap_0000000000000000" in removed.stderr
    assert "no snapshot" in barchan("snapshot", "show", first).stderr
    assert barchan("run", told["image"]["name"], "--", "cat", "/tmp/f", "/tmp/g").stdout == "one\ntwo\n"
    assert barchan("snapshot", "rm", told["snapshot_id"]).returncode == 0
    assert barchan("snapshot", "list").stdout.startswith("no snapshots")
    assert barchan("fork", "sb_none_0").returncode == 1
    assert barchan("kill", parent, child, *children).returncode == 0
