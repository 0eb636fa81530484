"""What all suites share: host requirements that skip by name, and a node of the test's own."""

import functools

import pytest

from tests.requirements import PROBES, must_run


@functools.cache
def _missing(name: str) -> str:
    if name not in PROBES:
        raise pytest.UsageError(f"unknown requirement {name!r}; known: {', '.join(PROBES)}")
    return PROBES[name]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose host requirement is unmet, naming it; fail it where the requirement is owed."""
    for marker in item.iter_markers("requires"):
        for name in marker.args:
            if reason := _missing(name):
                if name in must_run():
                    pytest.fail(f"requirement {name} must be met here: {reason}", pytrace=False)
                pytest.skip(f"{name}: {reason}")
