"""Leases on a real node: labels, budgets and priorities as their holders see them, over a restart too."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import barchan
from barchan.errors import CapacityError, Conflict, QuotaExceeded, SandboxExpired
from barchan.model.node import Budget, LeaseInfo, LeaseRequest
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.lease import Lease
from barchan.sdk.options import CreateOptions
from barchan.sdk.transport import Transport
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns")]


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


@asynccontextmanager
async def held(client: AsyncClient, request: LeaseRequest) -> AsyncIterator[str]:
    """A lease of these terms, and connections of its own: what another process would hold."""
    transport = Transport(client.endpoint)
    lease = Lease(transport, request)
    try:
        yield await lease.ensure()
    finally:
        await lease.end()
        await transport.close()


def told(node: NodeProcess, lease_id: str) -> LeaseInfo:
    """The lease as the node lists it."""
    leases = msgspec.convert(node.request("GET", "/v1/leases"), list[LeaseInfo])
    return next(lease for lease in leases if lease.lease_id == lease_id)


async def test_sandboxes_carry_the_labels_of_their_lease(node: NodeProcess, client: AsyncClient) -> None:
    """A label of the create's own wins; asking again by the create id finds the same sandbox."""
    async with held(client, LeaseRequest(labels={"run": "a", "role": "agent"})) as lease_id:
        options: CreateOptions = {
            "memory_mib": 64,
            "lease_id": lease_id,
            "labels": {"role": "grader"},
            "create_id": "labelled",
        }
        sandbox = await client.create("debian", **options)
        assert (await sandbox.info()).spec.labels == {"run": "a", "role": "grader"}
        assert [info.sandbox_id for info in await client.list(labels={"run": "a"})] == [sandbox.id]
        assert (await client.create("debian", **options)).id == sandbox.id
        used = told(node, lease_id).used
        assert (used.sandboxes, used.memory_mib) == (1, 64)
    assert await client.list(labels={"run": "a"}) == []


async def test_room_in_a_budget_comes_back(node: NodeProcess, client: AsyncClient) -> None:
    """Beyond it a create is told so, and when to ask again; when a sandbox of the lease ends, the next may start."""
    async with held(client, LeaseRequest(budget=Budget(sandboxes_max=2, memory_mib_max=160))) as lease_id:
        first = await client.create("debian", memory_mib=64, lease_id=lease_id)
        await client.create("debian", memory_mib=64, lease_id=lease_id)
        with pytest.raises(CapacityError, match="2 sandboxes") as caught:
            await client.create("debian", memory_mib=64, lease_id=lease_id)
        assert int(caught.value.details["retry_after_ms"]) > 0
        await first.kill()
        with pytest.raises(CapacityError, match="160 MiB"):
            await client.create("debian", memory_mib=128, lease_id=lease_id)
        await client.create("debian", memory_mib=96, lease_id=lease_id)
        assert told(node, lease_id).used.memory_mib == 160
        with pytest.raises(QuotaExceeded, match="whole budget"):
            await client.create("debian", memory_mib=161, lease_id=lease_id)


async def test_used_up_seconds_end_the_sandboxes(node: NodeProcess, client: AsyncClient) -> None:
    """They end as expired, by the budget; no other starts. Other leases are not touched."""
    apart = await client.create("debian", memory_mib=64)
    async with held(client, LeaseRequest(budget=Budget(sandbox_s_max=2.0))) as lease_id:
        made = [await client.create("debian", memory_mib=64, lease_id=lease_id) for _ in range(2)]
        for sandbox in made:
            with pytest.raises(SandboxExpired) as caught:
                while True:
                    await sandbox.exec("true")
                    await asyncio.sleep(0.05)
            assert caught.value.details["cause"] == "budget"
        with pytest.raises(QuotaExceeded, match="2 sandbox-seconds"):
            await client.create("debian", memory_mib=64, lease_id=lease_id)
        assert told(node, lease_id).used.sandbox_s >= 2.0
    assert (await apart.exec("echo here")).stdout == b"here\n"


async def test_a_lease_is_held_on_the_terms_it_was_opened_on(node: NodeProcess, client: AsyncClient) -> None:
    """A second holder with the same ones keeps it alive for both; one with others is refused."""
    request = LeaseRequest(lease_id="le_shared", priority=3)
    async with held(client, request):
        second = Lease(client._transport, request)
        assert await second.ensure() == "le_shared"
        assert (told(node, "le_shared").holders, told(node, "le_shared").priority) == (2, 3)
        with pytest.raises(Conflict):
            await Lease(client._transport, LeaseRequest(lease_id="le_shared")).ensure()
        await second.let_go()
        async with asyncio.timeout(20):
            while told(node, "le_shared").holders != 1:
                await asyncio.sleep(0.02)


async def test_a_restarted_node_knows_its_leases(make_node: Callable[[], NodeProcess]) -> None:
    """Terms and use survive kill -9: the budget is neither forgotten nor begun anew."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        request = LeaseRequest(labels={"run": "r"}, priority=-4, budget=Budget(sandboxes_max=1, sandbox_s_max=1e6))
        async with held(client, request) as lease_id:
            sandbox = await client.create("debian", memory_mib=64, lease_id=lease_id)
            before = told(node, lease_id)
            node.kill()
            node.start()
            after = told(node, lease_id)
            assert (after.labels, after.priority, after.budget) == ({"run": "r"}, -4, request.budget)
            assert (after.used.sandboxes, after.used.sandbox_s > before.used.sandbox_s) == (1, True)
            with pytest.raises(CapacityError):
                await client.create("debian", memory_mib=64, lease_id=lease_id)
            await sandbox.kill()
            assert told(node, lease_id).used.sandbox_s > after.used.sandbox_s
            await client.create("debian", memory_mib=64, lease_id=lease_id)


async def test_a_node_that_is_told_to_end_waits_for_no_holder(make_node: Callable[[], NodeProcess]) -> None:
    """Nor ends what they hold: the next node has it."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client, held(client, LeaseRequest()) as lease_id:
        sandbox = await client.create("debian", memory_mib=64, lease_id=lease_id)
        assert node.process is not None
        node.process.terminate()
        assert await asyncio.to_thread(node.process.wait, 15) == 0
        node.process = None
        node.start()
        assert (await sandbox.info()).phase == "ready"


async def test_a_sandbox_goes_over_to_who_asks_again_for_it(node: NodeProcess, client: AsyncClient) -> None:
    """Its creator is gone, and was started again within the grace time: the new lease holds it from then on. As long as
    its creator is there, it stays with it.
    """
    gone = Transport(client.endpoint)
    labels = {"kind": "again"}
    old = Lease(gone, LeaseRequest(labels=labels, grace_s=3.0))
    options: dict[str, Any] = {"memory_mib": 64, "create_id": "mine again"}
    sandbox = await client.create("debian", lease_id=await old.ensure(), **options)
    async with held(client, LeaseRequest(labels=labels)) as new_id:
        assert (await client.create("debian", lease_id=new_id, **options)).id == sandbox.id
        assert (await sandbox.info()).spec.lease_id != new_id
        old_id = await old.ensure()
        await old.let_go()
        async with asyncio.timeout(20):
            while told(node, old_id).holders:
                await asyncio.sleep(0.02)
        assert (await client.create("debian", lease_id=new_id, **options)).id == sandbox.id
        assert (await sandbox.info()).spec.lease_id == new_id
        assert (told(node, old_id).used.sandboxes, told(node, new_id).used.sandboxes) == (0, 1)
        async with asyncio.timeout(20):
            while old_id in {lease["lease_id"] for lease in node.request("GET", "/v1/leases")}:
                await asyncio.sleep(0.05)
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
    await gone.close()


async def test_a_sandbox_of_a_run_goes_over_within_the_run(client: AsyncClient) -> None:
    """To whoever of the same run asks for it, though the one who made it lives; to nobody else."""
    options: dict[str, Any] = {"memory_mib": 64, "create_id": "of a run"}
    mine, other = {"run": "one"}, {"run": "other"}
    async with held(client, LeaseRequest(labels=mine)) as first_id:
        sandbox = await client.create("debian", lease_id=first_id, **options)
        async with held(client, LeaseRequest(labels=mine)) as second_id:
            again = await client.create("debian", lease_id=second_id, **options)
            assert again.id == sandbox.id
            assert (await sandbox.info()).spec.lease_id == second_id
            await again.files.write("kept", b"new")
            for late in (
                sandbox.files.write("kept", b"old"),
                sandbox.files.as_user("root").mkdir("made"),
                sandbox.files.remove("kept"),
                sandbox.files.write_tar(".", b""),
            ):
                with pytest.raises(Conflict, match="another lease"):
                    await late
            assert await sandbox.files.read("kept") == b"new"
            first, second = again.files.fenced(1), again.files.fenced(2)
            await first.write("kept", b"1")
            await second.write("kept", b"2")
            for late in (first.write("kept", b"1"), first.as_user("root").mkdir("made"), first.write_tar(".", b"")):
                with pytest.raises(Conflict, match="epoch 2"):
                    await late
            assert await first.read("kept") == b"2"
            await again.files.write("kept", b"new")  # by whoever says nothing of epochs
            async with held(client, LeaseRequest(labels=other)) as third_id:
                guest = await client.create("debian", lease_id=third_id, **options)
                assert guest.id == sandbox.id
                await guest.files.write("kept", b"by a guest")
                assert (await sandbox.info()).spec.lease_id == second_id
