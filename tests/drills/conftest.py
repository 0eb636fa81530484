"""The drills run on each backend that BARCHAN_BACKENDS names, on the nodes of the security tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.drills.programs import BACKENDS, DrillLab
from tests.nodes import NodeProcess


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", BACKENDS, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/drills/" in str(item.path):
            item.add_marker(pytest.mark.requires("root", "userns", "cgroup", "static-libc", "mkfs.btrfs"))


@pytest.fixture(scope="session")
def lab(make_lasting_node: Callable[[], NodeProcess]) -> Iterator[DrillLab]:
    lab = DrillLab(make_lasting_node)
    yield lab
    lab.close()
