"""The conformance suite under pytest: `pytest -p barchan.testing.plugin --pyargs barchan.testing.conformance --backend
NAME`. Other test suites take `Running` and `each_check` from here.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from barchan.sdk.endpoint import default_state_dir
from barchan.testing.check import Check
from barchan.testing.profiles import profile_of
from barchan.testing.suite import Suite, chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("barchan", "conformance of a backend")
    group.addoption("--backend", default="container", help="name of the backend to check")
    group.addoption("--template", default="debian", help="image that its sandboxes are made of")
    group.addoption("--lacks", action="append", default=[], help="what a backend of another package lacks; repeats")
    group.addoption("--images", type=Path, default=None, help="image store (default: that of this user's node)")


class Running:
    """A suite with its node, and an event loop of its own, for tests that are plain functions.

    Args:
        lacks: What a backend of another package lacks.
    """

    def __init__(self, backend: str, template: str, images: Path, lacks: Sequence[str] = ()) -> None:
        self._runner = asyncio.Runner()
        self._suite = Suite(backend, template, profile_of(backend, tuple(lacks)), images)
        self._runner.run(self._suite.__aenter__())
        self._is_open = True

    def verify(self, check: Check) -> None:
        """Run one check; the test fails with it, and is skipped where the host lacks something."""
        outcome = self._runner.run(self._suite.outcome(check))
        if outcome.result == "unmet":
            pytest.skip(outcome.message)
        if not outcome.ok:
            pytest.fail(outcome.message, pytrace=False)

    def end(self) -> list[str]:
        """End the node; returns what it has left on the host."""
        if self._is_open:
            self._is_open = False
            self._runner.run(self._suite.__aexit__(None, None, None))
            self._runner.close()
        return self._suite.left


def each_check(only: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Parametrizes a test with `check`: all of them, or those of some areas or names."""
    checks = chosen(only)
    return pytest.mark.parametrize("check", checks, ids=[f"{check.area}-{check.name}" for check in checks])


@pytest.fixture(scope="session")
def running_suite(pytestconfig: pytest.Config) -> Iterator[Running]:
    """The backend that the command line names."""
    images = pytestconfig.getoption("images") or default_state_dir() / "images"
    backend, template = pytestconfig.getoption("backend"), pytestconfig.getoption("template")
    running = Running(backend, template, images, pytestconfig.getoption("lacks"))
    yield running
    running.end()
