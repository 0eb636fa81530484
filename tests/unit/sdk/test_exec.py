"""Running programs: results, retries after a lost connection, and what a cancelled call leaves behind."""

import asyncio
import threading
from typing import Any

import pytest

from barchan.errors import ConnectionLost, InvalidSpec, NotFound, ReadTimeout
from barchan.sdk.aio.client import connect_async
from barchan.sdk.aio.sandbox import INFO, AsyncSandbox
from barchan.wire.api import STDIN_INLINE_BYTES_MAX
from tests.unit.sdk.fake_node import FakeNode


async def test_a_sequence_is_a_program_and_a_string_is_for_the_shell(sandbox: AsyncSandbox) -> None:
    """argv is passed as it is; a string is expanded by a shell; both give exit code and output as bytes."""
    plain = await sandbox.exec(["printf", "%s", "$HOME x"])
    shell = await sandbox.exec("echo $((6*7)); echo bad >&2; exit 3", env={"A": "1"})
    assert (plain.exit_code, plain.stdout) == (0, b"$HOME x")
    assert (shell.exit_code, shell.stdout, shell.stderr) == (3, b"42\n", b"bad\n")


async def test_stdin_text_is_sent_as_utf8(sandbox: AsyncSandbox) -> None:
    """stdin takes text and bytes; the program sees the bytes and then the end."""
    assert (await sandbox.exec(["cat"], stdin="grün")).stdout == "grün".encode()
    assert (await sandbox.exec(["cat"], stdin=b"\xff\x00")).stdout == b"\xff\x00"


async def test_too_much_stdin_is_refused_here(sandbox: AsyncSandbox) -> None:
    """More stdin than a request carries is refused with the way that works, before anything is sent."""
    with pytest.raises(InvalidSpec, match="write_stdin"):
        await sandbox.exec(["cat"], stdin=bytes(STDIN_INLINE_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("command", "why"), [([], "is empty"), (5, "not int"), (b"ls", "not bytes"), (["ls", 5], "5 is int")]
)
async def test_what_is_no_command_is_refused(sandbox: AsyncSandbox, command: Any, why: str) -> None:
    """No program to run is the caller's mistake; an empty string runs in the shell and does nothing."""
    assert (await sandbox.exec("")).exit_code == 0
    with pytest.raises(InvalidSpec, match=f"a command is a string for the shell, or a list of strings.*{why}"):
        await sandbox.exec(command)


async def test_what_does_not_fit_the_wire_is_refused(sandbox: AsyncSandbox) -> None:
    """An argument of a type that can't be sent is `InvalidSpec`, not a crash of the encoder."""
    with pytest.raises(InvalidSpec):
        await sandbox.exec(["echo", object()])  # type: ignore[list-item]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_lost_connection_never_runs_it_twice(node: FakeNode, sandbox: AsyncSandbox, when: str) -> None:
    """A connection lost before or after the node acted is retried with the same id: one result, one run."""
    getattr(node, f"drop_{when}")["exec"] = 2
    result = await sandbox.exec("echo x >> ran; echo done")
    assert result.stdout == b"done\n"
    assert (node.folder / "ran").read_text() == "x\n"
    assert node.calls["exec"] == 3


async def test_a_node_that_stays_away_is_a_lost_connection(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """When patience is over the error says what happened; sending again is bounded."""
    node.drop_before["info"] = 1000
    with pytest.raises(ConnectionLost):
        await sandbox._transport.value(INFO, INFO.target(sandbox_id=sandbox.id), patience_s=0.3)
    assert 2 <= node.calls["info"] <= 6


async def test_a_restarted_node_is_waited_for(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """While the node is away, calls wait for it to come back instead of failing."""
    node.stop()
    call = asyncio.ensure_future(sandbox.exec(["echo", "back"]))
    await asyncio.sleep(0.3)
    assert not call.done()
    node.start()
    assert (await call).stdout == b"back\n"


async def test_no_answer_in_time_is_a_read_timeout(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """A node that accepts and never answers ends as `ReadTimeout`."""
    node.hold["info"] = threading.Event()
    with pytest.raises(ReadTimeout):
        await sandbox._transport.value(INFO, INFO.target(sandbox_id=sandbox.id), timeout_s=0.2)
    node.hold["info"].set()


async def test_cancelling_kills_what_the_exec_started(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """When the cancellation is seen, the program and its background children are dead."""
    call = asyncio.ensure_future(sandbox.exec("sleep 300 & echo $! > child; sleep 300", process_id="p"))
    while (sandbox.id, "p") not in node.processes or len(node.processes[sandbox.id, "p"].pids()) < 3:
        await asyncio.sleep(0.01)
    assert len(node.processes[sandbox.id, "p"].pids()) == 3
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert node.processes[sandbox.id, "p"].are_gone()


async def test_cancelling_before_the_node_saw_it_kills_it_too(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """A request that the node takes up only after the cancel is killed all the same."""
    gate = node.hold["exec"] = threading.Event()
    call = asyncio.ensure_future(sandbox.exec(["sleep", "300"], process_id="late"))
    while not node.calls["exec"]:
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.sleep(0.1)
    assert not call.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert node.processes[sandbox.id, "late"].are_gone()


async def test_errors_of_the_node_keep_their_class(node: FakeNode) -> None:
    """An error on the wire is raised as the class its code names, with its message."""
    async with connect_async(node.url) as client:
        with pytest.raises(NotFound, match="no sandbox sb_none"):
            await client.attach("sb_none")
