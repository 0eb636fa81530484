"""Runs that are put aside on a real node, in the middle of what they do, and gone on with by whoever comes."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing

import pytest

import barchan
from barchan.errors import NotFound, Preempted, SandboxExpired
from barchan.model.node import Budget, LeaseInfo, LeaseRequest
from barchan.model.tiers import TierChange
from barchan.rollout.run import AsyncRun
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.lease import Lease
from barchan.sdk.transport import Transport
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns")]

# Says that it has begun, and ends a while later, of its own time. Run twice, it would have said so twice.
COMMAND = (
    "echo begun >> /tmp/log; i=0; while [ $i -lt 30 ]; do sleep 0.05; i=$((i+1)); done; "
    "echo ended >> /tmp/log; cat /tmp/log"
)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


@asynccontextmanager
async def entered(client: AsyncClient, name: str, *, budget: Budget | None = None) -> AsyncIterator[AsyncRun]:
    async with client.run(name, memory_mib=128, grace_s=4.0, budget=budget) as run:
        yield run


async def lease_of(client: AsyncClient, run: str, *, ended: bool = False) -> LeaseInfo:
    """The run's last lease."""
    return next(lease for lease in reversed(await client.leases(ended=ended)) if lease.labels.get("run") == run)


async def preempted(client: AsyncClient, run: str) -> list[TierChange]:
    """All that is told of it."""
    told: list[TierChange] = []
    found = await client.preempt(run, by="a test", keep_s=600, progress=told.append)
    assert {change.sandbox_id: change for change in told} == {change.sandbox_id: change for change in found}
    return told


async def begun(client: AsyncClient, sandbox: barchan.AsyncSandbox) -> None:
    async with asyncio.timeout(30):
        while (await sandbox.exec("cat /tmp/log")).stdout != b"begun\n":
            await asyncio.sleep(0.05)


async def test_a_command_goes_on_where_it_was(make_node: Callable[[], NodeProcess]) -> None:
    """Its client is told at once; asked again by its id, under the run's next lease, it ends as if nothing had been,
    and has run once. A node that is killed in between changes nothing.
    """
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        async with entered(client, "r") as run:
            sandbox = await run.client.create("debian", memory_mib=128, create_id="one")
            asked = asyncio.create_task(sandbox.exec(COMMAND, process_id="step", timeout_s=60))
            await begun(client, sandbox)
            changes = await preempted(client, "r")
            assert [change.sandbox_id for change in changes] == [sandbox.id] * 2
            assert [change.tier for change in changes] == [
                "paused",
                "hibernated" if not changes[1].refused else "paused",
            ]
            with pytest.raises(Preempted, match="by a test"):
                await asked
            for refused in (
                lambda: sandbox.exec("true"),
                lambda: sandbox.files.read("/tmp/log"),
                lambda: sandbox.resume(),
                lambda: run.client.create("debian", memory_mib=128),
            ):
                with pytest.raises(Preempted):
                    await refused()
            lease = await lease_of(client, "r")
            assert (lease.phase, lease.holders, lease.used.sandboxes) == ("preempted", 0, 1)
            assert await preempted(client, "r")
            used_s = (await lease_of(client, "r")).used.sandbox_s
        assert (await sandbox.info()).phase in ("paused", "hibernated"), "leaving the run ends nothing"
        node.kill()
        node.start()
        assert (await lease_of(client, "r")).used.sandbox_s == pytest.approx(used_s, abs=0.5)
        async with entered(client, "r") as again:
            found = await again.client.create("debian", memory_mib=128, create_id="one")
            assert found.id == sandbox.id
            result = await found.exec(COMMAND, process_id="step", timeout_s=60)
            assert (result.exit_code, result.stdout) == (0, b"begun\nended\n")
            now = await lease_of(client, "r")
            assert (now.phase, now.used.sandboxes) == ("held", 1)
            over = (await client.leases(ended=True))[0]
            assert over.end is not None and over.end.cause == "resumed"
        with pytest.raises(NotFound, match="is over, and nothing of it is left to put aside: "):
            await preempted(client, "r")


async def test_what_is_being_made_is_put_aside_too(client: AsyncClient) -> None:
    """In the middle of a burst of creates: whatever came to be stands still, nothing else comes, and all of it goes
    over to whoever asks again.
    """
    n = 8

    async def made(run: AsyncRun, create_id: str) -> str:
        return (await run.client.create("debian", memory_mib=64, create_id=create_id)).id

    async with entered(client, "burst") as run:
        first = await made(run, "burst-first")
        making = [asyncio.create_task(made(run, f"burst-{number}")) for number in range(n)]
        await asyncio.wait(making, return_when=asyncio.FIRST_COMPLETED)
        changes = await preempted(client, "burst")
        told = await asyncio.gather(*making, return_exceptions=True)
        assert {type(one) for one in told} <= {str, Preempted}
        assert {change.tier for change in changes} <= {"paused", "hibernated"}
        infos = await client.list(labels={"run": "burst"})
        assert {info.phase for info in infos} <= {"paused", "hibernated"}
        assert {one for one in told if isinstance(one, str)} <= {info.sandbox_id for info in infos}
        assert (await lease_of(client, "burst")).used.sandboxes == len(infos)
    async with entered(client, "burst") as again:
        found = await asyncio.gather(*(made(again, f"burst-{number}") for number in range(n)))
        assert {one for one in told if isinstance(one, str)} <= set(found)
        assert await made(again, "burst-first") == first
        for sandbox_id in found[:3]:
            assert (await (await client.attach(sandbox_id)).exec("echo here")).stdout == b"here\n"


async def test_used_up_tokens_end_the_sandboxes(client: AsyncClient) -> None:
    """Soon after the model call that took them."""
    async with entered(client, "t", budget=Budget(tokens_max=100)) as run:
        sandbox = await run.client.create("debian", memory_mib=128)
        run._part.lease.use_tokens(60)
        assert (await sandbox.exec("true")).ok
        run._part.lease.use_tokens(60)
        with pytest.raises(SandboxExpired) as caught:
            async with asyncio.timeout(30):
                while True:
                    await sandbox.exec("true")
                    await asyncio.sleep(0.05)
        assert caught.value.details["cause"] == "budget"
        assert (await lease_of(client, "t")).used.tokens == 120


async def test_an_orphan_says_how_it_ended(client: AsyncClient, node: NodeProcess) -> None:
    """Its client went without a word: after the grace time its sandboxes are collected, and whoever looks is told."""
    transport = Transport(client.endpoint)
    lease = Lease(transport, LeaseRequest(grace_s=0.5, labels={"run": "orphan"}))
    sandbox = await client.create("debian", memory_mib=64, lease_id=await lease.ensure())
    await lease.let_go()
    await transport.close()
    async with asyncio.timeout(30):
        while (found := await lease_of(client, "orphan", ended=True)).end is None:
            await asyncio.sleep(0.05)
    assert (found.phase, found.end.cause, found.end.sandboxes) == ("ended", "abandoned", 1)
    with pytest.raises(SandboxExpired, match=r"lease_ended, for its client .* longer than the grace time"):
        await sandbox.exec("true")
    told = await asyncio.to_thread(
        subprocess.run,
        [
            sys.executable,
            "-m",
            "barchan.cli",
            "ps",
            "--runs",
            "--label",
            "run=orphan",
            "--url",
            f"unix://{node.socket}",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "its client was gone for longer than its grace time" in told.stdout
    assert "with sandboxes that it had (1)" in told.stdout


@pytest.mark.parametrize("lease", ["kept long enough", "unknown"])
async def test_the_next_node_ends_what_has_no_lease_any_more(make_node: Callable[[], NodeProcess], lease: str) -> None:
    """It was over while no node ran, or the node before had ended it and was killed before its sandboxes were gone."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        async with entered(client, "r") as run:
            sandbox = await run.client.create("debian", memory_mib=64)
            keep_s = 600.0 if lease == "unknown" else 0.1
            assert await client.preempt("r", keep_s=keep_s) or keep_s < 1
        node.kill()
        if lease == "unknown":
            with closing(sqlite3.connect(node.state_dir / "journal.sqlite")) as journal, journal:
                journal.execute("DELETE FROM lease")
        node.start()
        async with asyncio.timeout(30):
            while (info := await sandbox.info()).phase != "stopped":
                assert info.phase != "lost", info.end_cause
                await asyncio.sleep(0.05)
        assert info.end_cause == "lease_ended"
