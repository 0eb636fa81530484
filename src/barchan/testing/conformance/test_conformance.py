"""Collected by pytest, with `-p barchan.testing.plugin`: each check as a test."""

import pytest

from barchan.testing.check import Check
from barchan.testing.plugin import Running, each_check


@pytest.mark.filterwarnings("error")
@each_check()
def test_promise(check: Check, running_suite: Running) -> None:
    """The backend keeps this promise, or refuses as one that declares to lack it."""
    running_suite.verify(check)


def test_nothing_is_left(running_suite: Running) -> None:
    """When the node has ended, after all of that, the host is as it was. Runs last."""
    assert running_suite.end() == []
