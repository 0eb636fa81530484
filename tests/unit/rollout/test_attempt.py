"""The five methods that drive a rollout: limits, conversation, and one verdict whatever happens."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import (
    BootFailed,
    Conflict,
    ConnectionLost,
    InvalidSpec,
    ModelError,
    NotFound,
)
from barchan.rollout.agent import CALLS_PER_TURN_MAX
from barchan.rollout.attempt import Job, Rollout
from barchan.rollout.calls import call_to
from barchan.rollout.graders.base import Artifact
from barchan.rollout.limits import Left, Limits
from barchan.rollout.policies import OraclePolicy, ScriptPolicy, read_scripts
from barchan.rollout.ports import Log
from barchan.rollout.prompts import NO_CALL
from barchan.rollout.runner import play
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Environment, Task
from barchan.sdk.aio.shell import ShellResult
from tests.unit.rollout.fakes import FakeClient, result, submit, task

pytestmark = pytest.mark.timeout(30)

SETTINGS = RunSettings(run_id="run", template="t")
GOOD = "def f():\n    return 0\n"


def rollout_of(
    client: FakeClient, of: Task | None = None, open_log: Callable[[Job], Awaitable[Log]] | None = None
) -> Rollout:
    return Rollout(client, SETTINGS, Job("run-000000", of or task(), 0), policy_name="p", open_log=open_log)


async def opened(client: FakeClient, **limits: Any) -> Rollout:
    rollout = rollout_of(client, task(limits=Limits(**limits)))
    await rollout.open()
    return rollout


async def test_a_rollout_by_hand() -> None:
    """Observe, record, act twice, finish: graded as the agent left it, in a sandbox of its own."""
    client = FakeClient()
    rollout = await opened(client, turns_max=5, tokens_max=100)
    observation = await rollout.observe()
    assert (len(observation.messages), observation.turn, observation.over) == (1, 0, None)
    assert observation.left == Left(turns=5, tokens=100, agent_s=1800.0)
    await rollout.record(text="I write it.", completion_ids=[1, 2, 3], logprobs=[-1.0, -2.0, -3.0], policy_version=7)
    observation = await rollout.act([call_to("edit", command="create", path="solution.py", file_text=GOOD)])
    assert [item.status for item in observation.results] == ["ok"]
    assert (observation.left.turns, observation.left.tokens) == (4, 97)
    said, told = observation.messages[1:]
    assert (said["role"], said["content"], said["tool_calls"][0]["function"]["name"]) == (
        "assistant",
        "I write it.",
        "edit",
    )
    assert (told["role"], told["tool_call_id"]) == ("tool", said["tool_calls"][0]["id"])
    observation = await rollout.act([call_to("submit")])
    assert observation.over == "completed"
    verdict = await rollout.finish()
    assert (verdict.status, verdict.reward, verdict.truncated) == ("scored", 1.0, False)
    assert (client.live, client.live_max) == (set(), 1)
    row = rollout.row()
    assert (row.turns, row.tool_calls, row.completion_tokens) == (2, {"edit": 1, "submit": 1}, 3)
    assert (row.completions[0].policy_version, row.completions[0].completion_ids) == (7, (1, 2, 3))
    assert row.artifact == GOOD


async def test_the_turn_limit_is_graded_and_truncated() -> None:
    """After the last turn nothing can be done but finish; what is there is graded."""
    client = FakeClient()
    rollout = await opened(client, turns_max=1)
    observation = await rollout.act([call_to("edit", command="create", path="solution.py", file_text=GOOD)])
    assert (observation.over, observation.left.turns) == ("turn_limit", 0)
    with pytest.raises(Conflict, match="turn_limit"):
        await rollout.act([call_to("submit")])
    verdict = await rollout.finish()
    assert (verdict.reward, verdict.cause, verdict.truncated) == (1.0, "turn_limit", True)
    assert ("limits", "turns", 1) in [(item.source, item.fact, item.value) for item in verdict.evidence]


async def test_the_token_limit_is_graded_and_truncated() -> None:
    """The calls of the message that reached it are still carried out; it counts given tokens, else ids."""
    client = FakeClient()
    rollout = await opened(client, tokens_max=10)
    await rollout.record(completion_ids=[1, 2, 3, 4])
    observation = await rollout.act([call_to("edit", command="create", path="solution.py", file_text=GOOD)])
    assert (observation.over, observation.left.tokens) == (None, 6)
    await rollout.record(completion_tokens=6)
    observation = await rollout.act([call_to("bash", command="ls")])
    assert (observation.over, [item.status for item in observation.results]) == ("context_limit", ["ok"])
    verdict = await rollout.finish()
    assert (verdict.reward, verdict.cause, verdict.truncated) == (1.0, "context_limit", True)


async def test_handing_in_with_the_last_token_is_complete() -> None:
    """A limit that is reached by submitting cuts nothing short."""
    client = FakeClient()
    rollout = await opened(client, tokens_max=5, turns_max=1)
    await rollout.record(completion_tokens=5)
    assert (await rollout.act([call_to("submit", solution=GOOD)])).over == "completed"
    verdict = await rollout.finish()
    assert (verdict.reward, verdict.cause, verdict.truncated) == (1.0, "completed", False)


async def test_only_the_agents_own_time_counts() -> None:
    """Waiting for the model takes no agent time; a shell's does, and its end is an agent's time-out."""
    client = FakeClient()
    rollout = await opened(client, agent_s_max=0.2)
    await asyncio.sleep(0.3)
    assert (await rollout.observe()).left.agent_s == 0.2
    client.exec_s = 0.15
    observation = await rollout.act([call_to("bash", command="a")])
    assert observation.over is None
    assert 0 < observation.left.agent_s <= 0.05
    observation = await rollout.act([call_to("bash", command="b"), call_to("bash", command="c")])
    assert observation.over == "agent_timeout"
    assert [item.status for item in observation.results] == ["ok", "not_run"]
    verdict = await rollout.finish()
    assert (verdict.status, verdict.reward, verdict.cause, verdict.truncated) == ("scored", 0.0, "agent_timeout", True)


async def test_a_call_that_ends_with_the_agents_time_is_its_time_out() -> None:
    """A program killed because the agent's time was over ends the attempt, though the guest counted a little less."""
    client = FakeClient()
    client.python_result = result(137, timed_out=True)
    rollout = await opened(client, agent_s_max=3.0, call_s_max=5.0)
    assert (await rollout.act([call_to("python", code="1")])).over == "agent_timeout"
    rollout_2 = await opened(client, agent_s_max=9.0, call_s_max=5.0)
    assert (await rollout_2.act([call_to("python", code="1")])).over is None


async def test_a_time_for_the_calls_of_one_turn() -> None:
    """`timeout_s` shortens a call; none at all is refused."""
    client = FakeClient()
    client.shell_result = ShellResult(exit_code=137, stdout=b"", stderr=b"", timed_out=True)
    rollout = await opened(client)
    observation = await rollout.act([call_to("bash", command="sleep 9")], timeout_s=2.0)
    assert "timed out after 2 s" in observation.results[0].content
    assert observation.over is None
    with pytest.raises(InvalidSpec):
        await rollout.act([], timeout_s=0)


async def test_malformed_calls_are_turns_and_no_errors() -> None:
    """Told to the policy, counted in the row; the rollout goes on."""
    client = FakeClient()
    rollout = await opened(client)
    calls = [{"function": {"name": "fly", "arguments": "{}"}}, {"function": {"name": "bash", "arguments": "{"}}, {}]
    observation = await rollout.act(calls)
    assert [item.status for item in observation.results] == ["malformed"] * 3
    assert len({item.call_id for item in observation.results}) == 3
    await rollout.act([call_to("submit", solution=GOOD)])
    assert (await rollout.finish()).reward == 1.0
    row = rollout.row()
    assert (row.malformed_calls, row.tool_calls) == (3, {"(unknown)": 2, "bash": 1, "submit": 1})


async def test_a_turn_without_calls_is_answered() -> None:
    """It takes a turn, and the policy is told how to go on."""
    rollout = await opened(FakeClient())
    await rollout.record(text="Hm.")
    observation = await rollout.act([])
    assert [message["content"] for message in observation.messages[1:]] == ["Hm.", NO_CALL]
    assert observation.turn == 1


async def test_calls_of_one_turn_are_bounded_and_end_with_a_submit() -> None:
    """What comes after a submit, or beyond the bound, is not carried out, and each call has its answer."""
    client = FakeClient()
    rollout = await opened(client)
    calls = [call_to("bash", command=str(number)) for number in range(CALLS_PER_TURN_MAX + 1)]
    observation = await rollout.act(calls)
    assert [item.status for item in observation.results].count("not_run") == 1
    observation = await rollout.act([call_to("submit", solution=GOOD), call_to("bash", command="rm solution.py")])
    assert [item.status for item in observation.results] == ["ok", "not_run"]
    assert len(client.sandboxes[0].shells[0].commands) == CALLS_PER_TURN_MAX


@pytest.mark.parametrize("content", [None, b"", b" \n"])
async def test_nothing_handed_in_is_zero_with_evidence(content: bytes | None) -> None:
    """A missing or empty artifact is scored without a grader."""
    client = FakeClient()
    rollout = await opened(client)
    if content is not None:
        client.sandboxes[0].files.content["solution.py"] = content
    verdict = await rollout.finish()
    assert (verdict.status, verdict.reward) == ("scored", 0.0)
    assert verdict.evidence[0].source.startswith("artifact")
    assert rollout.row().grader_sandbox_ids == ()


async def test_an_artifact_that_the_platform_can_not_read_is_void() -> None:
    """A node that is gone when the artifact is taken is no missing artifact."""
    for error in (ConnectionLost("gone"), NotFound("no sandbox", sandbox_id="sb_1")):
        client = FakeClient()
        rollout = await opened(client)
        client.sandboxes[0].files.error = error
        verdict = await rollout.finish()
        assert (verdict.status, verdict.fault) == ("void", "platform")


async def test_a_sandbox_lost_in_a_turn_is_void() -> None:
    """`act` says that the rollout is over, further turns change nothing, `finish` gives the verdict."""
    client = FakeClient()
    rollout = await opened(client)
    client.exec_error = ConnectionLost("gone")
    observation = await rollout.act([call_to("python", code="1")])
    assert observation.over == "transport"
    assert (await rollout.act([call_to("python", code="1")])).over == "transport"
    verdict = await rollout.finish()
    assert (verdict.status, verdict.fault, verdict.cause) == ("void", "platform", "transport")
    assert client.live == set()


async def test_a_sandbox_that_never_was_is_void() -> None:
    """A create that fails leaves a rollout that is over from the start."""
    client = FakeClient()
    client.create_errors = [BootFailed("no")]
    rollout = await opened(client)
    assert (await rollout.observe()).over == "boot_failure"
    assert (await rollout.finish()).cause == "boot_failure"


async def test_the_drivers_failure_is_its_own() -> None:
    """`fail` voids: the model's fault for a model's error, else the caller's; the sandbox is ended."""
    for error, fault in ((ModelError("down", cause="model_timeout"), "model"), (OSError("no weights"), "caller")):
        client = FakeClient()
        rollout = await opened(client)
        verdict = await rollout.fail(error)
        assert (verdict.status, verdict.fault) == ("void", fault)
        assert client.live == set()


async def test_the_first_verdict_stands() -> None:
    """Ending a rollout twice, in whatever way, gives the first verdict."""
    rollout = await opened(FakeClient())
    verdict = await rollout.cancel("stale")
    assert (verdict.status, verdict.cause) == ("cancelled", "cancelled_stale")
    assert verdict == await rollout.finish() == await rollout.cancel() == await rollout.fail(OSError())
    with pytest.raises(Conflict):
        await rollout.act([])
    with pytest.raises(Conflict):
        await rollout.record()


async def test_a_finish_that_is_cancelled_can_be_given_up() -> None:
    """Cancelled while grading: no sandbox is left, and the rollout counts as cancelled."""
    client = FakeClient()
    rollout = await opened(client)
    await rollout.act([call_to("submit", solution=GOOD)])
    client.exec_s = 3600
    finishing = asyncio.create_task(rollout.finish())
    await asyncio.sleep(0.05)
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    assert (await rollout.cancel()).status == "cancelled"
    assert client.live == set()


async def test_unequal_ids_and_log_probs_are_refused() -> None:
    """A model call whose parts don't fit is the caller's mistake, said at once."""
    rollout = await opened(FakeClient())
    with pytest.raises(InvalidSpec, match="2 completion ids and 1 log-probs"):
        await rollout.record(completion_ids=[1, 2], logprobs=[-1.0])


@pytest.mark.parametrize(
    "call",
    [
        {"completion_ids": [1], "logprobs": [float("-inf")]},
        {"completion_ids": [1], "logprobs": [float("nan")]},
        {"completion_ids": ["a"]},
        {"completion_ids": [1.5]},
        {"text": 3},
        {"text": "\ud800"},
        {"policy_version": 1.5},
        {"wait_ms": "x"},
    ],
)
async def test_a_model_call_that_no_reader_could_take_is_refused(call: dict[str, Any]) -> None:
    """Said to whoever records it, and nothing of it is kept: one such line would make a run's results unreadable."""
    rollout = await opened(FakeClient())
    with pytest.raises(InvalidSpec):
        await rollout.record(**call)
    with pytest.raises(InvalidSpec, match="none of ours"):
        await rollout.finish("bogus")  # type: ignore[arg-type]
    for calls in ("submit", call_to("submit")):
        with pytest.raises(InvalidSpec, match="a list of calls"):
            await rollout.act(calls)  # type: ignore[arg-type]
    assert (await rollout.finish()).status == "scored"
    assert rollout.row().completions == ()


async def test_handing_in_frees_the_sandbox_before_anything_is_graded() -> None:
    """The artifact has left, the agent's sandbox has ended, no grader has begun; no further turn can be taken."""
    client = FakeClient()
    rollout = await opened(client)
    await rollout.act([call_to("edit", command="create", path="solution.py", file_text=GOOD)])
    await rollout.hand_in("refusal")
    assert (client.live, len(client.create_ids), rollout.verdict) == (set(), 1, None)
    assert rollout.artifact == Artifact(kind="file", data=GOOD.encode())
    with pytest.raises(Conflict):
        await rollout.act([call_to("bash", command="ls")])
    await rollout.hand_in()
    verdict = await rollout.finish()
    assert (verdict.reward, verdict.cause) == (1.0, "refusal")
    timings = rollout.row().timings
    assert None not in (timings.setup_ms, timings.grade_queue_ms, timings.grade_ms)


async def test_handing_in_nothing_ends_the_rollout() -> None:
    """There is nothing to grade: it has its verdict at once, and no artifact."""
    rollout = await opened(FakeClient())
    await rollout.hand_in()
    assert rollout.verdict is not None
    assert (rollout.verdict.reward, rollout.artifact, rollout.row().artifact_kind) == (0.0, None, None)


async def test_the_environment_makes_the_sandbox() -> None:
    """What a task says of its environment is asked of the node, with the run's lease; what it leaves open is the run's.
    A grader's sandbox is made alike, without network.
    """
    environment = Environment(
        user="root",
        workdir="/app",
        env={"A": "b"},
        network="allow",
        allow_hosts=("a.example",),
        memory_mib=700,
        cpus=2.0,
    )
    client = FakeClient()
    settings = RunSettings(run_id="run", template="t", lease_id="ls_1", pids_max=99)
    job = Job("run-000000", task(environment=environment), 3, 2, attempt=1, create_prefix="g-2-3")
    rollout = Rollout(client, settings, job, policy_name="p")
    await rollout.open()
    await rollout.act([call_to("submit", solution=GOOD)])
    await rollout.finish()
    agent, grader = client.options
    asked = {name: agent[name] for name in ("user", "workdir", "env", "network", "allow", "memory_mib", "cpus")}
    assert asked == {
        "user": "root",
        "workdir": "/app",
        "env": {"A": "b"},
        "network": "allow",
        "allow": ("a.example",),
        "memory_mib": 700,
        "cpus": 2.0,
    }
    assert (agent["lease_id"], agent["pids_max"], agent["create_id"]) == ("ls_1", 99, "g-2-3-agent-0")
    assert (grader["network"], grader["env"], grader["create_id"]) == ("none", {"A": "b"}, "g-2-3-grader-0")
    row = rollout.row()
    assert (row.group_index, row.sample_index, row.attempt) == (2, 3, 1)


async def test_a_script_is_played_call_by_call(tmp_path: Path) -> None:
    """One call a turn; a script that does not submit ends after its last call, and its work is graded."""
    path = tmp_path / "s.json"
    path.write_text(
        '{"Fake/0": [{"name": "bash", "arguments": {"command": "ls"}},'
        '{"name": "edit", "arguments": {"command": "create", "path": "solution.py", "file_text": "return"}}]}'
    )
    client = FakeClient()
    rollout = await opened(client)
    await play(rollout, ScriptPolicy(read_scripts(path)))
    row = rollout.row()
    assert (row.verdict.reward, row.turns, row.tool_calls) == (1.0, 2, {"bash": 1, "edit": 1})


async def test_an_oracle_plays_the_tasks_script() -> None:
    """A task with a known-good attempt of its own has it played, turn by turn."""
    script = (call_to("bash", command="ls"), *submit(GOOD).tool_calls)
    client = FakeClient()
    rollout = rollout_of(client, task(oracle=script))
    await rollout.open()
    await play(rollout, OraclePolicy())
    assert (rollout.row().verdict.reward, rollout.row().turns) == (1.0, 2)


@pytest.mark.parametrize("text", ["[", "3", '[{"arguments": {}}]', '[{"name": "a", "extra": 1}]', "\ud800"])
def test_a_script_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """The message names the file."""
    path = tmp_path / "s.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidSpec, match=r"s\.json"):
        read_scripts(path)
