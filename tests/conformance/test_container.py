"""Containers keep every promise of the contract."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.testing.check import Check
from barchan.testing.plugin import Running, each_check

pytestmark = [
    pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs", "criu", "slirp4netns"),
    pytest.mark.timeout(150),
]


@pytest.fixture(scope="module")
def running(images: Path) -> Iterator[Running]:
    running = Running("container", "debian", images)
    yield running
    running.end()


@each_check()
def test_promise(check: Check, running: Running) -> None:
    """Kept, with no gap: containers lack nothing that a backend may lack."""
    running.verify(check)


def test_nothing_is_left(running: Running) -> None:
    """When the node has ended, after all of that, the host is as it was. Runs last."""
    assert running.end() == []
