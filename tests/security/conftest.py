"""The nodes that hostile programs meet; started once each."""

from collections.abc import Callable, Iterator

import pytest

from tests.nodes import NodeProcess
from tests.security.lab import Lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/security/" in str(item.path):
            item.add_marker(pytest.mark.requires("root", "userns", "cgroup", "static-libc", "mkfs.btrfs", "fsck.erofs"))


@pytest.fixture(scope="session")
def lab(make_lasting_node: Callable[[], NodeProcess]) -> Iterator[Lab]:
    lab = Lab(make_lasting_node)
    yield lab
    lab.close()
