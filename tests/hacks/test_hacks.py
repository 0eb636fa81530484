"""The attacks that run with every change; `make hacks` plays all of them."""

from pathlib import Path

import pytest

import barchan
from tests.hacks import CASES
from tests.hacks.play import Player
from tests.hacks.table import is_good, rows, text
from tests.integration.test_tests_grader import node  # noqa: F401  # the fixture
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns")]


def test_the_corpus_is_whole() -> None:
    """Twelve classes, each name once in its format, ten or more that want a void."""
    assert len({case.hack for case in CASES}) == 12
    assert len({(case.format, case.name) for case in CASES}) == len(CASES) >= 50
    assert sum(case.hack == "buying a void" for case in CASES) >= 10


async def test_no_quick_attack_is_paid(node: NodeProcess, tmp_path: Path) -> None:  # noqa: F811
    """None in silence, none with a void; their twins are paid, and nothing is said against those."""
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        played = await Player(client, tmp_path).play_all([case for case in CASES if case.quick])
    assert is_good(played), text(played)
    assert rows(played)[-1]["false alarms"] == 0, text(played)
