"""Tools: what a call does, and that nothing a policy writes into one is an error of ours."""

import asyncio
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from barchan.errors import (
    BackendError,
    CallerError,
    Conflict,
    ConnectionLost,
    Denied,
    InvalidSpec,
    NotFound,
    QuotaExceeded,
    ReadTimeout,
    SandboxExpired,
    SandboxLost,
    SnapshotIncompatible,
    TaskError,
)
from barchan.rollout.calls import ToolCall, call_to, parse_calls
from barchan.rollout.task import TOOLS
from barchan.rollout.tools import Toolbox, ToolOutput, Workspace, toolbox
from barchan.rollout.tools.base import CAPTURE_BYTES_MAX
from barchan.rollout.tools.edit import FILE_BYTES_MAX
from barchan.rollout.tools.text import joined, shown
from barchan.rollout.tools.toolbox import Called
from barchan.sdk.aio.shell import ShellResult
from tests.unit.rollout.fakes import FakeClient, FakeSandbox, result, task

pytestmark = pytest.mark.timeout(30)

BOX = Toolbox(task())


def place(client: FakeClient | None = None, chars_max: int = 1000) -> tuple[FakeSandbox, Workspace]:
    sandbox = FakeSandbox(client or FakeClient(), 1)
    return sandbox, Workspace(sandbox, chars_max)


async def use(workspace: Workspace, name: str, /, **arguments: Any) -> tuple[str, str]:
    """Status and content of a call."""
    called = await BOX.call(workspace, call_to(name, **arguments), 5.0)
    return called.result.status, called.result.content


def test_schemas_are_openai_functions() -> None:
    """Each tool has a name, a description, and an object of parameters that are described and closed."""
    assert [schema["function"]["name"] for schema in BOX.schemas] == ["bash", "python", "edit", "submit"]
    for schema in BOX.schemas:
        assert (schema["type"], set(schema["function"])) == ("function", {"name", "description", "parameters"})
        parameters = schema["function"]["parameters"]
        assert (parameters["type"], parameters["additionalProperties"]) == ("object", False)
        assert all("description" in field for field in parameters["properties"].values())
    bash, _, edit, submit = (schema["function"]["parameters"]["required"] for schema in BOX.schemas)
    assert (bash, edit, submit) == (["command"], ["command", "path"], [])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (ToolCall(name="fly"), "there is no tool 'fly'; there are: bash, python, edit, submit"),
        (ToolCall(name=""), "there is no tool ''"),
        (ToolCall(name="bash", arguments="ls"), "JSON is malformed"),
        (ToolCall(name="bash", arguments='{"command": "ls'), "truncated"),
        (ToolCall(name="bash", arguments="{}"), "missing required field `command`"),
        (ToolCall(name="bash", arguments=""), "missing required field `command`"),
        (ToolCall(name="bash", arguments='{"command": 3}'), "Expected `str`, got `int` - at `$.command`"),
        (ToolCall(name="bash", arguments='{"command": "ls", "sudo": true}'), "unknown field `sudo`"),
        (ToolCall(name="bash", arguments='["ls"]'), "Expected `object`, got `array`"),
        (ToolCall(name="bash", arguments='{"command": "\ud800"}'), "arguments of bash are not right"),
        (ToolCall(name="edit", arguments='{"command": "burn", "path": "x"}'), "Invalid enum value 'burn'"),
        (ToolCall(name="edit", arguments="[" * 100_000), "arguments of edit are not right"),
    ],
)
async def test_a_malformed_call_is_told(call: ToolCall, words: str) -> None:
    """The policy reads what was wrong; nothing ran and nothing is raised."""
    sandbox, workspace = place()
    called = await BOX.call(workspace, call, 5.0)
    assert (called.result.status, called.submits, called.agent_s) == ("malformed", False, 0.0)
    assert words in called.result.content
    assert (workspace.calls, sandbox.shells) == (0, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.sampled_from([*TOOLS, "other"]), JSON)
def test_whatever_a_server_sends_is_a_call(whole: Any, name: str, arguments: Any) -> None:
    """Any JSON in place of a call, or of its arguments, is told as malformed or carried out; never an exception."""

    async def carry_out() -> list[Called]:
        _, workspace = place()
        calls = parse_calls([whole, {"function": {"name": name, "arguments": arguments}}], 3)
        assert [call.id for call in calls if call.id.startswith("call_")]
        return [await BOX.call(workspace, call, 5.0) for call in calls]

    first, _ = asyncio.run(carry_out())
    if not isinstance(whole, dict):
        assert first.result.status == "malformed"


def test_arguments_that_are_an_object_already_are_read() -> None:
    """Servers that don't write arguments as text mean the same."""
    (call,) = parse_calls([{"id": "a", "function": {"name": "bash", "arguments": {"command": "ls"}}}], 0)
    assert (call.id, call.name, msgspec.json.decode(call.arguments)) == ("a", "bash", {"command": "ls"})


async def test_bash_keeps_one_shell_and_tells_how_it_went() -> None:
    """Commands go to one shell; output, errors and exit code are told apart."""
    client = FakeClient()
    sandbox, workspace = place(client)
    client.shell_result = ShellResult(exit_code=3, stdout=b"out\n", stderr=b"err\xff\n")
    assert await use(workspace, "bash", command="a") == ("failed", "out\n[stderr]\nerr\ufffd\n[exit code 3]")
    client.shell_result = ShellResult(exit_code=0, stdout=b"", stderr=b"")
    assert await use(workspace, "bash", command="b") == ("ok", "[no output]")
    (shell,) = sandbox.shells
    assert shell.commands == ["a", "b"]
    await workspace.close()
    assert shell.closed


async def test_bash_tells_a_time_out_and_a_lost_shell() -> None:
    """A command that was killed for its time, and a shell that ended, are told in words."""
    client = FakeClient()
    _, workspace = place(client)
    client.shell_result = ShellResult(exit_code=137, stdout=b"so far", stderr=b"", timed_out=True, restarted=True)
    status, content = await use(workspace, "bash", command="sleep 99")
    assert status == "timed_out"
    assert content.startswith("so far\n[timed out after 5 s") and "the shell has ended" in content
    assert (await use(workspace, "bash", command="a\0b"))[1] == "error: a command holds no NUL character"


async def test_python_tells_what_the_kernel_saw() -> None:
    """Exit code, time-out and memory limit of the program; its time is the guest's."""
    client = FakeClient()
    _, workspace = place(client)
    for ended, status, words in (
        (result(0, b"6\n"), "ok", "6"),
        (result(1, b"Traceback\n"), "failed", "Traceback\n[exit code 1]"),
        (result(137, signal=9, timed_out=True), "timed_out", "[timed out after 5 s and was killed]"),
        (result(137, signal=9, oom_killed=True), "failed", "[killed: the sandbox's memory is used up]"),
    ):
        client.python_result = ended
        called = await BOX.call(workspace, call_to("python", code="print(6)"), 5.0)
        assert (called.result.status, called.result.content) == (status, words)
        assert called.agent_s <= 0.001


async def test_edit_creates_views_and_changes() -> None:
    """The four commands, with what the policy reads of them."""
    sandbox, workspace = place()
    content = sandbox.files.content
    assert await use(workspace, "edit", command="create", path="a.py", file_text="one\ntwo\nthree") == (
        "ok",
        "[wrote a.py, 3 lines]",
    )
    assert (await use(workspace, "edit", command="view", path="a.py"))[1].splitlines()[1] == "     2\ttwo"
    _, shown_part = await use(workspace, "edit", command="view", path="a.py", view_range=[2, -1])
    assert shown_part == "     2\ttwo\n     3\tthree"
    _, changed = await use(workspace, "edit", command="str_replace", path="a.py", old_str="two", new_str="2\n2b")
    assert changed.startswith("[changed a.py]\n     1\tone\n     2\t2\n     3\t2b")
    await use(workspace, "edit", command="insert", path="a.py", insert_line=4, new_str="four")
    await use(workspace, "edit", command="insert", path="a.py", insert_line=0, new_str="zero")
    assert content["a.py"] == b"zero\none\n2\n2b\nthree\nfour"
    await use(workspace, "edit", command="create", path="d/b.txt", file_text="")
    assert await use(workspace, "edit", command="view", path="d/b.txt") == ("ok", "[an empty file]")
    assert await use(workspace, "edit", command="view", path="d") == ("ok", "b.txt (0 bytes)")


async def test_edit_keeps_what_it_does_not_change() -> None:
    """Bytes that are not UTF-8, the file's mode, and the link that leads to it stay."""
    sandbox, workspace = place()
    files = sandbox.files
    files.content["bin/tool"], files.modes["bin/tool"] = b"\xff\xfe old", 0o755
    files.links["link"] = "bin/tool"
    files.content["link"] = files.content["bin/tool"]
    status, _ = await use(workspace, "edit", command="str_replace", path="link", old_str="old", new_str="new")
    assert (status, files.content["bin/tool"], files.modes["bin/tool"]) == ("ok", b"\xff\xfe new", 0o755)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"command": "view", "path": "gone"}, "no gone"),
        ({"command": "view", "path": ""}, "path is empty"),
        ({"command": "view", "path": "a\0b"}, "NUL"),
        ({"command": "view", "path": "f", "view_range": [2, 9]}, "f has 2 lines"),
        ({"command": "view", "path": "big"}, "larger than"),
        ({"command": "create", "path": "x"}, "needs file_text"),
        ({"command": "create", "path": "x", "file_text": "x" * (FILE_BYTES_MAX + 1)}, "would be larger"),
        ({"command": "str_replace", "path": "f", "old_str": "nowhere"}, "occurs 0 times"),
        ({"command": "str_replace", "path": "f", "old_str": "a"}, "occurs 2 times"),
        ({"command": "str_replace", "path": "f", "old_str": ""}, "must not be empty"),
        ({"command": "insert", "path": "f", "insert_line": 5, "new_str": "x"}, "f has 2 lines"),
        ({"command": "insert", "path": "f", "new_str": "x"}, "needs insert_line"),
    ],
)
async def test_an_edit_that_does_not_fit_changes_nothing(arguments: dict[str, Any], words: str) -> None:
    """The policy reads why, and every file is as before."""
    sandbox, workspace = place()
    before = sandbox.files.content = {"f": b"a\na\n", "big": b"x" * (FILE_BYTES_MAX + 1)}
    status, content = await use(workspace, "edit", **arguments)
    assert (status, words in content) == ("failed", True)
    assert sandbox.files.content == before


async def test_submit_ends_the_attempt() -> None:
    """With a solution it is written first; without, the file counts as it is."""
    sandbox, workspace = place()
    called = await BOX.call(workspace, call_to("submit", solution="x = 1"), 5.0)
    assert (called.submits, sandbox.files.content) == (True, {"solution.py": b"x = 1"})
    called = await BOX.call(workspace, call_to("submit"), 5.0)
    assert called.submits


async def test_a_solution_that_cannot_be_written_is_not_handed_in() -> None:
    """In a fresh sandbox that is the platform's fault; later the policy is told."""
    client = FakeClient()
    client.write_result = result(2, b"sh: can't create solution.py\n")
    _, workspace = place(client)
    with pytest.raises(BackendError, match="exit code 2"):
        await BOX.call(workspace, call_to("submit", solution="x"), 5.0)
    called = await BOX.call(workspace, call_to("submit", solution="x"), 5.0)
    assert (called.submits, called.result.status) == (False, "failed")
    assert "nothing is submitted" in called.result.content


GUESTS = (
    NotFound("no file", errno=2),
    Denied("not yours", errno=13),
    QuotaExceeded("full", errno=28),
    CallerError("no room for another process", process_id="p"),
    InvalidSpec("not a path"),
)
OTHERS = (
    NotFound("no sandbox", sandbox_id="sb_1"),
    SandboxExpired("its ttl", sandbox_id="sb_1"),
    SandboxLost("gone", sandbox_id="sb_1"),
    Denied("this node wants its token"),
    ConnectionLost("gone"),
    ReadTimeout("slow"),
    NotFound("no memory file of it here", snapshot="hib_1"),
    NotFound("the supervisor knows no such sandbox"),
    Conflict("it stays awake: a request came for it"),
    SnapshotIncompatible("another kernel"),
    BackendError("the applet gave up", wstatus=1 << 8),
    BackendError("the applet was killed", wstatus=9),
)


@pytest.mark.parametrize("error", GUESTS, ids=repr)
async def test_what_the_guest_can_cause_is_told(error: Exception) -> None:
    """Failures of an operation in the guest are results of the call."""
    client = FakeClient()
    client.exec_error = error
    _, workspace = place(client)
    assert await use(workspace, "python", code="1") == ("failed", f"error: {error}")


@pytest.mark.parametrize("error", OTHERS, ids=repr)
async def test_what_only_the_platform_can_cause_is_raised(error: Exception) -> None:
    """A sandbox that is gone, a node that does not answer: no result of the policy's."""
    client = FakeClient()
    client.exec_error = error
    _, workspace = place(client)
    with pytest.raises(type(error)):
        await use(workspace, "python", code="1")


class SlowArguments(Struct, frozen=True, forbid_unknown_fields=True):
    how: Annotated[str, Meta(description="What to do.")]


class SlowTool:
    """A task's own tool."""

    name = "slow"
    description = "Waits or breaks."
    arguments = SlowArguments
    keeps_time = False

    async def call(self, workspace: Workspace, arguments: SlowArguments, /, *, timeout_s: float) -> ToolOutput:
        if arguments.how == "wait":
            await asyncio.sleep(3600)
        if arguments.how == "break":
            raise ZeroDivisionError("oops")
        return ToolOutput(content=arguments.how)


OWN = Toolbox(task(tools=("bash", f"{__name__}:SlowTool")))


async def test_a_task_adds_tools() -> None:
    """A class named by the task is offered and called like ours; what it does not offer is not there."""
    _, workspace = place()
    assert [schema["function"]["name"] for schema in OWN.schemas] == ["bash", "slow"]
    called = await OWN.call(workspace, call_to("slow", how="hello"), 5.0)
    assert called.result.content == "hello"
    assert (await OWN.call(workspace, call_to("submit"), 5.0)).result.status == "malformed"


async def test_a_tool_that_does_not_end_is_cancelled() -> None:
    """A tool that keeps no time of its own is cut at its time, which the policy reads."""
    _, workspace = place()
    called = await OWN.call(workspace, call_to("slow", how="wait"), 0.05)
    assert (called.result.status, called.result.content) == ("timed_out", "[timed out after 0.05 s]")


async def test_a_tool_that_breaks_is_the_tasks_fault() -> None:
    """An exception of a task's own tool is no result of the policy's."""
    _, workspace = place()
    with pytest.raises(TaskError, match="tool slow: ZeroDivisionError: oops"):
        await OWN.call(workspace, call_to("slow", how="break"), 5.0)


async def test_ours_that_does_not_end_is_the_platforms_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is not back long after its own time has a platform that stalls."""
    client = FakeClient()
    client.exec_s = 3600
    monkeypatch.setattr(toolbox, "PLATFORM_SLACK_S", 0.0)
    _, workspace = place(client)
    with pytest.raises(ReadTimeout):
        await BOX.call(workspace, call_to("python", code="1"), 0.05)


@pytest.mark.parametrize("name", ["fly", "no.such.module:Tool", "barchan.rollout.task:Nothing", ":x"])
def test_a_tool_that_is_not_there_is_named(name: str) -> None:
    """A task that asks for it is refused, saying which."""
    with pytest.raises(InvalidSpec, match=name.split(":")[-1]):
        Toolbox(task(tools=(name,)))


@given(st.binary(max_size=200), st.integers(2, 50))
def test_an_output_keeps_head_and_tail(data: bytes, chars_max: int) -> None:
    """Nothing is lost without being said, and what is said is what is missing."""
    text = data.decode("utf-8", "replace")
    out = shown(data, chars_max)
    if len(text) <= chars_max:
        assert (out.text, out.truncated) == (text, False)
        return
    half = chars_max // 2
    assert out.truncated
    assert out.text.startswith(text[:half]) and out.text.endswith(text[-half:])
    assert f"[... {len(text) - chars_max} characters left out here ...]" in out.text


def test_what_was_lost_before_is_counted_too() -> None:
    """Bytes that never came here are part of what is said to be missing, where their number is known."""
    kept = b"h" * 500 + b"t" * 500
    out = shown(kept, 100, bytes_total=5000, is_cut=True)
    assert out.text == "h" * 50 + "\n[... 4900 bytes left out here ...]\n" + "t" * 50
    assert "more than 900 bytes" in shown(kept, 100, is_cut=True).text
    assert CAPTURE_BYTES_MAX > 4 * 16384  # so that the seam lies within what is left out


def test_parts_are_joined_by_lines() -> None:
    """Empty parts leave no empty lines."""
    assert joined("a\n", "", "b") == "a\nb"
