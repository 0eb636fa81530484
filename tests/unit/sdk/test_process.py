"""Background processes: output from any offset without a byte lost or doubled, stdin, waiting, signals."""

import asyncio

import pytest

from barchan.errors import Conflict, ReadTimeout
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.process import AsyncProcess
from barchan.sdk.aio.sandbox import AsyncSandbox
from tests.unit.sdk.fake_node import FakeNode

NUMBERS = b"".join(b"%d\n" % n for n in range(1, 5001))


async def collect(process: AsyncProcess, offset: int = 0) -> dict[str, bytes]:
    """All output; asserts that the pieces follow one another."""
    got = {"stdout": b"", "stderr": b""}
    async for stream, at, data in process.output(offset=offset):
        assert at == len(got[stream]) + (offset if stream == "stdout" else 0)
        got[stream] += data
    return got


async def test_output_is_whole_and_tells_of_the_end(sandbox: AsyncSandbox) -> None:
    """Both streams come to their last byte, and afterwards the handle knows the exit code."""
    process = await sandbox.start("seq 1 5000; echo bad >&2; exit 7")
    assert process.exit_code is None
    assert await collect(process) == {"stdout": NUMBERS, "stderr": b"bad\n"}
    assert process.exit_code == 7


async def test_output_goes_on_over_lost_connections(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """With the connection cut every 3,000 bytes, each byte comes exactly once."""
    node.output_cut_bytes = 3000
    process = await sandbox.start("seq 1 5000; echo bad >&2")
    assert await collect(process) == {"stdout": NUMBERS, "stderr": b"bad\n"}
    assert node.calls["output"] > len(NUMBERS) // 3000


async def test_another_handle_comes_back_at_an_offset(sandbox: AsyncSandbox, client: AsyncClient) -> None:
    """A process is re-attached by its id, and its output read from where somebody else stopped."""
    await (await sandbox.start("seq 1 5000", process_id="step-7")).wait()
    again = (await client.attach(sandbox.id)).process("step-7")
    assert (await collect(again, offset=20000))["stdout"] == NUMBERS[20000:]


async def test_output_without_following_stops_at_what_there_is(sandbox: AsyncSandbox) -> None:
    """follow=False returns although the process still runs."""
    process = await sandbox.start("echo one; sleep 300")
    got: list[tuple[str, int, bytes]] = []
    while not got:
        got = [item async for item in process.output(follow=False)]
    assert got == [("stdout", 0, b"one\n")]
    assert (await process.info()).running
    await process.kill()


async def test_silent_output_times_out(sandbox: AsyncSandbox) -> None:
    """A process that writes nothing for quiet_timeout_s ends the iteration with ReadTimeout, and goes on running."""
    process = await sandbox.start(["sleep", "300"])
    with pytest.raises(ReadTimeout):
        async for _ in process.output(quiet_timeout_s=0.2):
            pytest.fail("it writes nothing")
    assert (await process.info()).running
    await process.kill()


async def test_a_repeated_start_is_the_same_process(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """The same id gives the same process, also when the reply was lost; another program with it is Conflict."""
    node.drop_after["start"] = 1
    first = await sandbox.start("echo x >> ran; cat", process_id="p")
    second = await sandbox.start("echo x >> ran; cat", process_id="p")
    await second.close_stdin()
    assert (await first.wait()).exit_code == 0
    assert (node.folder / "ran").read_text() == "x\n"
    with pytest.raises(Conflict):
        await sandbox.start("echo other", process_id="p")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_stdin_arrives_once_over_lost_connections(node: FakeNode, sandbox: AsyncSandbox, when: str) -> None:
    """3 MiB in several writes by two handles, with connections lost on the way: every byte once, in order."""
    data = bytes(range(256)) * 12288
    process = await sandbox.start("sha256sum", process_id="sum")
    await process.write_stdin(data[:1_500_000])
    getattr(node, f"drop_{when}")["stdin"] = 2
    await sandbox.process("sum").write_stdin(data[1_500_000:], eof=True)
    import hashlib

    assert (await collect(process))["stdout"] == f"{hashlib.sha256(data).hexdigest()}  -\n".encode()


async def test_concurrent_writes_of_one_handle_do_not_mix(sandbox: AsyncSandbox) -> None:
    """Writes at the same time are put one after the other, whole."""
    process = await sandbox.start("cat")
    await asyncio.gather(*(process.write_stdin(f"{n}" * 10 + "\n") for n in range(10)))
    await process.close_stdin()
    lines = (await collect(process))["stdout"].decode().splitlines()
    assert sorted(lines) == [f"{n}" * 10 for n in range(10)]


async def test_wait_has_an_end(sandbox: AsyncSandbox) -> None:
    """wait() with a time-out raises ReadTimeout and leaves the process alone; after a signal it tells how it ended."""
    process = await sandbox.start(["sleep", "300"])
    with pytest.raises(ReadTimeout):
        await process.wait(0.2)
    assert await process.signal("INT") == 1
    ended = await process.wait()
    assert (ended.running, ended.exit_code, ended.signal) == (False, 130, 2)


async def test_a_signal_is_not_sent_twice(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """After a connection lost while signalling nothing is sent again: two interrupts are not one."""
    process = await sandbox.start(["sleep", "300"])
    node.drop_after["signal"] = 1
    from barchan.errors import ConnectionLost

    with pytest.raises(ConnectionLost):
        await process.signal("USR1")
    assert node.calls["signal"] == 1


async def test_cancelling_a_start_kills_it(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """A start whose await is cancelled leaves no process."""
    import threading

    gate = node.hold["start"] = threading.Event()
    call = asyncio.ensure_future(sandbox.start(["sleep", "300"], process_id="gone"))
    while not node.calls["start"]:
        await asyncio.sleep(0.01)
    call.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert node.processes[sandbox.id, "gone"].are_gone()


async def test_a_process_that_reads_nothing_is_named(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """The time-out of a write is laid on the process, not on the node."""
    process = await sandbox.start(["sleep", "60"])
    with pytest.raises(ReadTimeout, match=r"process \w+ took no more input for 0.3 s"):
        await process.write_stdin(bytes(4 << 20), timeout_s=0.3)
    await process.kill()


async def test_a_process_that_writes_nothing_is_named(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """The time-out of a silent output is laid on the process, not on the node."""
    process = await sandbox.start(["sleep", "60"])
    with pytest.raises(ReadTimeout, match=r"process \w+ wrote nothing for 0.2 s"):
        async for _ in process.output(quiet_timeout_s=0.2):
            pass
    await process.kill()
