"""Real faults in small runs: no reward comes of one, and nothing is left."""

import asyncio
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec
from barchan.testing.faults.campaign import LOG, Campaign
from barchan.testing.faults.events import FILE, read_events
from barchan.testing.faults.judge import FaultTable
from barchan.testing.faults.plan import read_plan
from barchan.testing.faults.policies import NAME, half_right

pytestmark = [pytest.mark.requires("root", "cgroup", "userns"), pytest.mark.timeout(180)]
HUNG_S = 120.0


def carried_out(out: Path, images: Path, *words: str, group: int = 6) -> FaultTable:
    """One task in a group, half right, under a plan."""
    arguments = ["humaneval", "--limit=1", f"--group={group}", "--refill=4", f"--policy={NAME}"]
    campaign = Campaign(read_plan(words, 3), arguments, out, images=images, wall_s_max=HUNG_S, quiet=True)
    table = asyncio.run(campaign.run(half_right))
    assert not campaign.has_hung
    assert campaign.exit_code == 0, (out / LOG).read_text()
    assert table.false_valid == table.false_void == table.left == ()
    return table


def test_inits_that_are_killed(tmp_path: Path, images: Path) -> None:
    """Each is in the list of faults with its rollout; what they hit is void or scored with the true reward, and a void
    attempt is tried again."""
    table = carried_out(
        tmp_path / "run",
        images,
        "init-kill:share=60%",
        "init-kill:share=60%,role=grader",
        "connection-cut:after=0s,every=2s",
    )
    events = read_events(tmp_path / "run" / FILE)
    assert table.rows[-1].kind == "none"
    assert {event.kind for event in events} >= {"init-kill"}
    killed = {rollout for event in events if event.kind == "init-kill" for rollout in event.rollouts}
    row = next(row for row in table.rows if row.kind == "init-kill")
    assert row.injected >= row.hit == len(killed) > 0
    assert row.right + sum(row.void.values()) == row.hit


def test_a_node_and_a_client_that_are_killed(tmp_path: Path, images: Path) -> None:
    """The node's sandboxes and the client's rollouts are found again: every place ends scored, and right."""
    table = carried_out(tmp_path / "run", images, "node-kill:after=1s", "client-kill:after=2s", group=10)
    assert (table.right, table.void) == (10, 0)


def test_what_it_refuses(tmp_path: Path, images: Path) -> None:
    """Faults of a server that the run does not talk to, and a folder that holds a run."""
    with pytest.raises(InvalidSpec, match="--policy chat"):
        Campaign(read_plan(["endpoint-429"]), ["humaneval"], tmp_path, images=images)
    (tmp_path / "run.json").touch()
    campaign = Campaign(read_plan(["node-kill"]), ["humaneval"], tmp_path, images=images)
    with pytest.raises(InvalidSpec, match="holds a run already"):
        asyncio.run(campaign.run(half_right))
