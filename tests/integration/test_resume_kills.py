"""SIGKILL at every step of the protocol, for the client, the node and the init: nothing runs twice, nothing that was
acknowledged changes, nothing is scored wrongly. `make resume-kills` tries all steps, `make test` some.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.resume_kills import Lives, Step, faults, until
from tests.integration.resume_node import MortalNode, init_of
from tests.integration.resume_tasks import SLOW_GRADER, SLOW_PYTHON, SLOW_SHELL, WORK

pytestmark = [pytest.mark.timeout(240), pytest.mark.requires("root", "cgroup", "userns")]

LEASE_GRACE_S = 20.0
WHOLE = os.environ.get("BARCHAN_RESUME_KILLS") == "all"
ANSWERED = "result|entry"  # a model call is one or the other

# What is asked of the sandbox, by what its line holds; each has all the steps of one operation.
PROGRAM, SHELL, WRITE = ("exec", "T1 "), ("exec", "T2b "), ("file_write", "two")
STEPS = {
    "before the rollout has a sandbox": Step("after", "entry", "message"),
    "before it is told that it has one": Step("before", "result|entry", "sandbox"),
    "after it was told that it has one": Step("after", "result|entry", "sandbox"),
    "before a turn is told": Step("before", "entry", "turn", "T2b "),
    "after a turn was told": Step("after", "entry", "turn", "T2b "),
    "a model call in flight": Step("before", "sample", "", "3"),
    "between a model call and its turn": Step("after", ANSWERED, "model_call", '"turn": 2'),
    "between a model call's answer and its line": Step("before", ANSWERED, "model_call", '"turn": 2'),
    "after a turn's first call of two": Step("after", "result", "exec", "T2a "),
    "before a call's result": Step("before", "result", "tool_call", "T2b "),
    "after a turn's last result": Step("after", "result", "tool_call", "T2b "),
    "before a program is told": Step("before", "intent", *PROGRAM),
    "with half of a program's intent": Step("torn", "intent", *PROGRAM),
    "after a program's intent": Step("after", "intent", *PROGRAM),
    "while a program runs": Step("during", "intent", *PROGRAM, SLOW_PYTHON),
    "before a program's result": Step("before", "result", *PROGRAM),
    "with half of a program's result": Step("torn", "result", *PROGRAM),
    "after a program's result": Step("after", "result", *PROGRAM),
    "before a command is told": Step("before", "intent", *SHELL),
    "with half of a command's intent": Step("torn", "intent", *SHELL),
    "after a command's intent": Step("after", "intent", *SHELL),
    "while a command runs": Step("during", "intent", *SHELL, SLOW_SHELL),
    "before a command's result": Step("before", "result", *SHELL),
    "with half of a command's result": Step("torn", "result", *SHELL),
    "after a command's result": Step("after", "result", *SHELL),
    "the shell's first command": Step("after", "intent", "exec", "T0 "),
    "before the result of the shell's first command": Step("before", "result", "exec", "T0 "),
    "an edit that has read": Step("after", "result", "file_read", "note"),
    "an edit that is about to write": Step("before", "intent", *WRITE),
    "an edit that may have written": Step("after", "intent", *WRITE),
    "an edit that has written": Step("before", "result", *WRITE),
    "an edit whose write is told": Step("after", "result", *WRITE),
    "before the artifact is taken": Step("before", "intent", "file_read", WORK),
    "while the artifact is taken": Step("after", "intent", "file_read", WORK),
    "before it is told that the artifact was taken": Step("before", "result", "file_read", WORK),
    "after the artifact was taken": Step("after", "result", "file_read", WORK),
    "before it is told that the work is handed in": Step("before", "entry", "hand_in"),
    "after it was told that the work is handed in": Step("after", "entry", "hand_in"),
    "before the artifact is kept": Step("before", "entry", "artifact"),
    "after the artifact was kept": Step("after", "entry", "artifact"),
    "before the grading": Step("before", "intent", "grade"),
    "in the grading": Step("after", "intent", "grade"),
    "while the grader runs": Step("during", "intent", "grade", "", SLOW_GRADER),
    "before the grading is told": Step("before", "result", "grade"),
    "after the grading": Step("after", "result", "grade"),
    "before the verdict": Step("before", "entry", "verdict"),
    "after the verdict": Step("after", "entry", "verdict"),
    "before the row": Step("before", "row"),
    "with half of the row": Step("torn", "row"),
    "after the row": Step("after", "row"),
}
# Enough for every run of the suite: one of each kind.
OFTEN = (
    "between a model call and its turn",
    "while a program runs",
    "before a program's result",
    "while a command runs",
    "an edit that has written",
    "while the grader runs",
)
TRAINER_OFTEN = ("after a turn was told", "before a command's result")
# Steps of the node, for the operation that holds the needle; file writes are whole in what the init is asked.
NODE_STEPS = {
    "before a program is started": ("before", "T1 "),
    "while a program runs": ("after", "T1 "),
    "with a program that has ended": ("ended", "T1 "),
    "before a command is given to the shell": ("before", "T2b "),
    "while a command runs": ("after", "T2b "),
    "with a command that has ended": ("ended", "T2b "),
    "before a file is written": ("before", "b'two"),
    "after a file was written": ("ended", "note"),
    "in the grading": ("after", SLOW_GRADER),
}
NODE_OFTEN = ("with a program that has ended",)


@pytest.fixture(scope="module")
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalNode]:
    """A node that holds the sandboxes of trainers that are killed, and is killed itself."""
    node = MortalNode(tmp_path_factory.mktemp("node"), images)
    node.start()
    yield node
    assert node.wait_empty(LEASE_GRACE_S) == []
    assert node.end() == []


def test_a_run_that_nobody_kills(node: MortalNode, tmp_path: Path) -> None:
    """The yardstick: where nothing is killed, the check finds no fault."""
    lives = Lives(tmp_path / "lives", node)
    assert lives.live() == 0, lives.output
    assert faults(lives, {}) == []


@pytest.mark.parametrize("name", list(STEPS) if WHOLE else OFTEN)
def test_a_killed_run_goes_on(node: MortalNode, tmp_path: Path, name: str) -> None:
    """`barchan rollout --resume` goes on where the process was killed: every rollout keeps its id and gets the verdict
    that it would have had, no command runs twice, no step is sampled twice.
    """
    lives = Lives(tmp_path / "lives", node)
    assert lives.live(STEPS[name]) == -signal.SIGKILL, f"the step was not reached: {lives.output}"
    before = lives.logs()
    assert lives.live() == 0, lives.output
    assert faults(lives, before, may_sample_again=lives.group) == [], lives.output


@pytest.mark.parametrize("name", list(STEPS) if WHOLE else TRAINER_OFTEN)
def test_a_killed_trainer_goes_on(node: MortalNode, tmp_path: Path, name: str) -> None:
    """So does a trainer with generation of its own, by `client.run(attach=True)`."""
    lives = Lives(tmp_path / "lives", node)
    assert lives.train(STEPS[name]) == -signal.SIGKILL, f"the step was not reached: {lives.output}"
    before = lives.logs()
    assert lives.train() == 0, lives.output
    assert faults(lives, before, may_sample_again=lives.group) == [], lives.output


async def test_a_trainer_that_was_only_stopped_is_fenced(node: MortalNode, tmp_path: Path) -> None:
    """A trainer that hung, and goes on after another has taken its run over, gets a conflict and changes nothing."""
    lives = Lives(tmp_path / "lives", node)
    first = lives.begin_to_train(STEPS["after a program's intent"]._replace(signal=signal.SIGSTOP))
    stat = Path("/proc") / str(first.pid) / "stat"
    await until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    before = lives.logs()
    assert await asyncio.to_thread(lives.train) == 0, lives.output
    whole = lives.logs()
    os.kill(first.pid or 0, signal.SIGCONT)
    assert await asyncio.to_thread(lives.end, first) == 1
    assert "Conflict" in lives.output
    assert lives.logs() == whole
    assert faults(lives, before, may_sample_again=lives.group) == [], lives.output


@pytest.mark.parametrize("name", list(NODE_STEPS) if WHOLE else NODE_OFTEN)
async def test_a_killed_node_is_gone_on_with(node: MortalNode, tmp_path: Path, name: str) -> None:
    """The trainer waits for the next node, and asks that for what it had asked the last one: nothing runs twice."""
    node.kill()
    node.start_to_end(*NODE_STEPS[name])
    lives = Lives(tmp_path / "lives", node)
    living = asyncio.create_task(asyncio.to_thread(lives.live))
    await node.ended()
    node.start()
    assert await living == 0, lives.output
    assert faults(lives, {}) == [], lives.output


async def test_an_init_that_is_killed_voids_or_is_restored(node: MortalNode, tmp_path: Path) -> None:
    """With the sandbox gone in the middle of a command, the rollout goes on in a restored one, or is void: a score is
    there only if it is the right one.
    """
    lives = Lives(tmp_path / "lives", node)
    living = asyncio.create_task(asyncio.to_thread(lives.live))
    program = await until(lambda: next(node.running(SLOW_SHELL), None))
    os.kill(init_of(program), signal.SIGKILL)
    assert await living == 0, lives.output
    assert faults(lives, {}, may_be_void=1) == [], lives.output


async def test_an_init_that_is_killed_while_no_trainer_lives(node: MortalNode, tmp_path: Path) -> None:
    """The same for a sandbox that is gone when the next trainer comes."""
    lives = Lives(tmp_path / "lives", node)
    step = STEPS["while a command runs"]
    living = asyncio.create_task(asyncio.to_thread(lives.live, step))
    program = await until(lambda: next(node.running(SLOW_SHELL), None))
    init = init_of(program)
    assert await living == -signal.SIGKILL
    before = lives.logs()
    os.kill(init, signal.SIGKILL)
    assert lives.live() == 0, lives.output
    assert faults(lives, before, may_sample_again=lives.group, may_be_void=1) == [], lives.output


async def test_a_restore_that_is_killed(node: MortalNode, tmp_path: Path) -> None:
    """A trainer that dies while it carries a lost sandbox's operations out again: the next begins in one of its own."""
    lives = Lives(tmp_path / "lives", node)
    living = asyncio.create_task(asyncio.to_thread(lives.live, Step("during", "intent", "restore", "", SLOW_PYTHON)))
    program = await until(lambda: next(node.running(SLOW_SHELL), None))
    os.kill(init_of(program), signal.SIGKILL)
    assert await living == -signal.SIGKILL, lives.output
    before = lives.logs()
    assert lives.live() == 0, lives.output
    assert faults(lives, before, may_sample_again=lives.group, may_be_void=1) == [], lives.output


KILLS = st.lists(
    st.tuples(st.sampled_from(("before", "torn", "after")), st.integers(min_value=1, max_value=90)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60 if WHOLE else 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=KILLS)
def test_any_sequence_of_kills(node: MortalNode, tmp_path_factory: pytest.TempPathFactory, kills: Any) -> None:
    """Wherever a run is killed, and however often: at any line of its logs and results, counted over all rollouts."""
    lives = Lives(tmp_path_factory.mktemp("lives"), node)
    befores = []
    for when, number in kills:
        code = lives.live(Step(when, "intent|result|entry|row", number=number))
        befores.append(lives.logs())
        if code == 0:
            break
        assert code == -signal.SIGKILL, lives.output
    assert lives.live() == 0, lives.output
    for before in befores:
        assert faults(lives, before, may_sample_again=len(kills) * lives.group) == [], lives.output
