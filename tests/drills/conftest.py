"""The drills run on each backend that BARCHAN_BACKENDS names, on the nodes of the security tests."""

import os
from collections.abc import Callable, Iterator

import pytest

from tests.nodes import NodeProcess
from tests.security.lab import Lab

BACKENDS = os.environ.get("BARCHAN_BACKENDS", "container").split()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/drills/" in str(item.path):
            item.add_marker(pytest.mark.requires("root", "userns", "cgroup", "static-libc", "mkfs.btrfs"))


@pytest.fixture(scope="session")
def lab(make_node: Callable[[], NodeProcess]) -> Iterator[Lab]:
    lab = Lab(make_node)
    yield lab
    lab.close()
