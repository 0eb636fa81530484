"""The function backend keeps the promises of the contract; its whole suite is run by `make conformance`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.testing.check import Check
from barchan.testing.plugin import Running, each_check
from tests.conformance.essence import ESSENCE

pytestmark = [
    pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs", "criu", "slirp4netns"),
    pytest.mark.timeout(150),
]


@pytest.fixture(scope="module")
def running(images: Path) -> Iterator[Running]:
    running = Running("function", "debian", images)
    yield running
    running.end()


@each_check(ESSENCE)
def test_promise(check: Check, running: Running) -> None:
    """Kept, or refused as one that is declared to be lacking."""
    running.verify(check)


def test_nothing_is_left(running: Running) -> None:
    """When the node has ended, after all of that, the host is as it was. Runs last."""
    assert running.end() == []
