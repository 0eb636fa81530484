"""The node dies; its sandboxes, their processes and every byte of their output do not."""

import asyncio
import os
import signal
import time
from collections.abc import Callable

import pytest

import barchan
from barchan.sdk.aio.process import AsyncProcess
from tests.nodes import NodeProcess

SANDBOXES = 200
LINES = 4000
# Numbered lines, some before the node dies and some while it is dead.
COUNTER = f"i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); [ $((i % 100)) -ne 0 ] || sleep 0.1; done"
EXPECTED = b"".join(b"line %d\n" % number for number in range(LINES))

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(300)]


async def _output(process: AsyncProcess) -> bytes:
    """Everything on stdout, checked to be without gap or repetition."""
    collected = bytearray()
    async for stream, offset, data in process.output():
        if stream == "stdout":
            assert len(collected) == offset
            collected += data
    return bytes(collected)


async def test_a_killed_node_finds_200_sandboxes_again_and_no_stream_loses_a_byte(
    make_node: Callable[[], NodeProcess],
) -> None:
    """kill -9 of the node amid 200 running sandboxes; the next one serves the same streams from their offsets."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        made = [item async for item in client.create_many("debian", n=SANDBOXES, memory_mib=64)]
        sandboxes = [item for item in made if isinstance(item, barchan.AsyncSandbox)]
        assert len(sandboxes) == SANDBOXES
        processes = [await sandbox.start(COUNTER) for sandbox in sandboxes]
        readers = [asyncio.create_task(_output(process)) for process in processes[:20]]
        running = asyncio.create_task(sandboxes[0].exec("sleep 8; echo still here", timeout_s=60))
        await asyncio.sleep(1)
        node.kill()
        await asyncio.sleep(1)
        node.start()
        assert {sandbox.id for sandbox in sandboxes} == set(node.sandboxes())
        assert await asyncio.gather(*readers) == [EXPECTED] * 20
        assert await asyncio.gather(*(_output(process) for process in processes[20:40])) == [EXPECTED] * 20
        ended = await asyncio.gather(*(process.wait(timeout_s=120) for process in processes))
        assert {0} == {info.exit_code for info in ended}
        assert (await running).stdout == b"still here\n"


async def test_a_supervisor_at_its_end_is_replaced(make_node: Callable[[], NodeProcess]) -> None:
    """One that ends while the next node greets it, as it does by itself a while after its last sandbox."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        await (await client.create("debian")).kill()
    supervisor = node.watch.supervisor_pid()
    assert supervisor is not None
    node.kill()
    os.kill(supervisor, signal.SIGSTOP)  # it takes the connection, and says nothing
    ends = asyncio.get_running_loop().call_later(1.0, os.kill, supervisor, signal.SIGKILL)
    await asyncio.get_running_loop().run_in_executor(None, node.start)
    assert ends.when() <= asyncio.get_running_loop().time()
    async with barchan.connect_async(f"unix://{node.socket}") as client, await client.create("debian") as sandbox:
        assert (await sandbox.exec("echo here")).text == "here\n"
    assert node.end() == []


async def test_an_exec_sent_again_to_the_next_node_ran_once(make_node: Callable[[], NodeProcess]) -> None:
    """The client sends its exec again after the node died; the process id makes it the same exec."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client, await client.create("debian") as sandbox:
        task = asyncio.create_task(sandbox.exec("echo ran >> /tmp/log; sleep 3; cat /tmp/log", timeout_s=30))
        await asyncio.sleep(0.7)
        node.kill()
        node.start()
        result = await task
        assert (result.exit_code, result.stdout) == (0, b"ran\n")


def test_a_node_that_ends_right_after_its_supervisor_died_leaves_nothing(make_node: Callable[[], NodeProcess]) -> None:
    """What that has left is the next one's to remove, which is started for it."""
    node = make_node()
    node.start()
    with barchan.connect(f"unix://{node.socket}") as client:
        client.create("debian")
        supervisor = node.watch.supervisor_pid()
        assert supervisor is not None
        os.kill(supervisor, signal.SIGKILL)
    assert node.end() == []


def test_a_killed_supervisor_takes_its_sandboxes_along_and_the_node_says_so(
    make_node: Callable[[], NodeProcess],
) -> None:
    """Nothing is left running unseen: the guests die with their parent, and are reported as lost by the platform."""
    node = make_node()
    node.start()
    with barchan.connect(f"unix://{node.socket}") as client:
        sandbox = client.create("debian")
        pid = sandbox.start("sleep 1000").info().pid
        assert pid > 0
        os.kill(node.watch.supervisor_pid(), signal.SIGKILL)
        with pytest.raises(barchan.SandboxLost):
            for _ in range(100):
                sandbox.exec("true")
                time.sleep(0.05)
        with client.create("debian") as again:
            assert again.exec("true").exit_code == 0
