"""Clients that are stopped or killed: a minute of silence, in a make target of its own (`make test-slow`)."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import barchan
from barchan.model.node import LeaseInfo
from tests.nodes import FILES, NodeProcess

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns")]
CLIENT = """
import barchan, sys, time
client = barchan.connect("unix://" + sys.argv[1])
made = [client.create("debian", memory_mib=64) for _ in range(20)]
for sandbox in made:
    sandbox.start("sleep 1000 & sleep 1000")
print("up", flush=True)
time.sleep(1000)
"""


async def lease_of(node: NodeProcess, run: str) -> LeaseInfo:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        return next(lease for lease in await client.leases() if lease.labels.get("run") == run)


async def test_a_stopped_client_holds_nothing(node: NodeProcess) -> None:
    """Its kernel goes on taking what the node sends; a test's node takes 30 s without a beat for its end. When it goes
    on before its grace time is over, it holds its lease again.
    """
    program = (
        "import sys, time, barchan\n"
        "client = barchan.connect(sys.argv[1])\n"
        "with client.run('stopped', grace_s=300) as run:\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, f"unix://{node.socket}"], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and await asyncio.to_thread(child.stdout.readline) == b"held\n"
        child.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            while (await lease_of(node, "stopped")).phase != "abandoned":
                await asyncio.sleep(0.2)
        assert (await lease_of(node, "stopped")).silent == 1
        child.send_signal(signal.SIGCONT)
        async with asyncio.timeout(30):
            while (await lease_of(node, "stopped")).phase != "held":
                await asyncio.sleep(0.1)
    finally:
        child.kill()
        child.communicate()


@contextmanager
def _client(node: NodeProcess) -> Iterator[None]:
    """A client process with 20 busy sandboxes; killed on leaving."""
    with subprocess.Popen([sys.executable, "-c", CLIENT, str(node.socket)], stdout=subprocess.PIPE) as client:
        try:
            assert client.stdout is not None
            assert client.stdout.readline() == b"up\n"
            yield
        finally:
            client.kill()


def test_a_killed_client_takes_its_sandboxes_with_it(make_node: Callable[[], NodeProcess]) -> None:
    """The client's lease ends with its connection, after the grace time."""
    node = make_node()
    node.start()
    with _client(node):
        assert len(node.sandboxes()) == 20
    assert node.wait_empty(30) == []


def test_node_and_client_killed_leave_nothing(make_node: Callable[[], NodeProcess]) -> None:
    """With nobody coming back, the supervisor removes processes, cgroups, mounts and files after its grace of 30 s."""
    node = make_node()
    node.start()
    supervisor = node.watch.supervisor_pid()
    assert supervisor is not None
    with _client(node):
        assert len(node.sandboxes()) == 20
    node.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{supervisor}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert node.watch.settle(files=FILES | {"node.sock"}) == []
    (node.state_dir / "node.sock").unlink()
