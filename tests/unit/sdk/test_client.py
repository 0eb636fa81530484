"""Creating, finding and ending sandboxes: leases, cancellation, many at once, addresses and tokens."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path

import pytest

from barchan.errors import (
    BackendError,
    BarchanError,
    CapacityError,
    ConnectionLost,
    Denied,
    InvalidSpec,
    LocalProtocolError,
    ReadTimeout,
)
from barchan.model.sandbox import SandboxSpec
from barchan.sdk.aio.client import AsyncClient, connect_async
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.options import sandbox_spec
from tests.unit.sdk.fake_node import FakeNode


async def test_a_sandbox_as_context_is_killed_at_the_end(node: FakeNode, client: AsyncClient) -> None:
    """Leaving the context ends it; ending it again says that there was nothing to end."""
    async with await client.create("debian", labels={"job": "x"}) as sandbox:
        assert [info.sandbox_id for info in await client.list(labels={"job": "x"})] == [sandbox.id]
        assert await client.list(labels={"job": "y"}) == []
    assert node.killed == [sandbox.id]
    assert await sandbox.kill() is False


async def test_closing_a_client_ends_its_lease(node: FakeNode) -> None:
    """Sandboxes belong to one lease, opened by the first create; detached ones to none. Closing ends the lease."""
    async with connect_async(node.url) as client:
        assert node.leases == {}
        first, second = await client.create("debian"), await client.create("debian")
        apart = await client.create("debian", detach=True)
        specs = [node.sandboxes[s.id].spec for s in (first, second, apart)]
        assert [spec.lease_id for spec in specs] == ["lease_0", "lease_0", None]
    assert node.leases_ended == ["lease_0"]
    assert sorted(node.killed) == sorted([first.id, second.id])
    with pytest.raises(LocalProtocolError):
        await client.node_info()


async def test_a_dropped_lease_connection_is_opened_again(node: FakeNode, client: AsyncClient) -> None:
    """After the connection is lost the same lease is held again, without anybody calling."""
    await client.create("debian")
    node.drop_leases()
    deadline = time.monotonic() + 5
    while node.leases["lease_0"] < 2 and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert node.leases == {"lease_0": 2}


async def test_a_stalled_loop_does_not_lose_the_lease(node: FakeNode, client: AsyncClient) -> None:
    """The lease is read on the SDK's own thread: it is opened again while the caller's loop is blocked."""
    await client.create("debian")
    node.drop_leases()
    time.sleep(1.0)  # noqa: ASYNC251 - the stall is what is tested
    assert node.leases["lease_0"] == 2


async def test_a_lease_that_the_node_ended_is_replaced(node: FakeNode, client: AsyncClient) -> None:
    """When the node ends the response as it should, the next create opens another lease."""
    await client.create("debian")
    node.leases_ended.append("lease_0")
    while client._lease._id is not None:
        await asyncio.sleep(0.01)
    sandbox = await client.create("debian")
    assert node.sandboxes[sandbox.id].spec.lease_id == "lease_1"


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_create_is_safe_to_send_again(node: FakeNode, client: AsyncClient, when: str) -> None:
    """A connection lost around a create makes one sandbox, since it carries a create_id."""
    getattr(node, f"drop_{when}")["create"] = 1
    sandbox = await client.create("debian")
    assert list(node.sandboxes) == [sandbox.id]


async def test_create_id_gives_the_same_sandbox(client: AsyncClient) -> None:
    """Repeating a create with its id returns the sandbox that exists."""
    first, second = await client.create("debian", create_id="c"), await client.create("debian", create_id="c")
    assert first.id == second.id


async def test_cancelling_a_create_frees_the_half_made_sandbox(node: FakeNode, client: AsyncClient) -> None:
    """Also one that the node makes only after the cancel: when the cancellation is seen, nothing is left."""
    gate = node.hold["create"] = threading.Event()
    call = asyncio.ensure_future(client.create("debian"))
    while not node.calls["create"]:
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.sleep(0.1)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert node.sandboxes == {}


async def test_no_room_is_raised_as_it_is(node: FakeNode, client: AsyncClient) -> None:
    """CapacityError comes through with its retry time, and is not retried here."""
    node.errors["create"] = CapacityError("full", retry_after_ms=250)
    with pytest.raises(CapacityError) as caught:
        await client.create("debian")
    assert (caught.value.details["retry_after_ms"], node.calls["create"]) == (250, 1)


async def test_create_many_gives_each_as_ready(node: FakeNode, client: AsyncClient) -> None:
    """n sandboxes of one spec, each with an id of its own."""
    spec = SandboxSpec(template="debian", memory_mib=64, create_id="many")
    made = [item async for item in client.create_many(spec, n=16)]
    assert sorted(item.id for item in made if isinstance(item, AsyncSandbox)) == sorted(node.sandboxes)
    assert {info.spec.create_id for info in node.sandboxes.values()} == {f"many-{n}" for n in range(16)}


async def test_a_create_takes_as_long_as_its_backend_may(
    node: FakeNode, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node says how long that is; `auto` may become any of them. Afterwards what was half made is ended."""
    monkeypatch.setattr("barchan.sdk.aio.client.CREATE_TIMEOUT_S", 0.05)
    node.start_s_max = {"vm": 60.0, "container": 0.1}
    gate = node.hold["create"] = threading.Event()
    for backend in ("vm", "auto"):
        making = asyncio.create_task(client.create("debian", backend=backend))
        await asyncio.sleep(0.3)
        assert not making.done()
        gate.set()
        await making
        gate.clear()
    with pytest.raises(ReadTimeout, match="container should be there"):
        making = asyncio.create_task(client.create("debian", backend="container"))
        asyncio.get_running_loop().call_later(1.0, gate.set)
        await making
    assert [info.spec.backend for info in node.sandboxes.values()] == ["vm", "auto"]


async def test_a_create_is_over_when_the_node_does_not_say_how_long_it_takes(
    node: FakeNode, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it any more: what comes of it is ended."""
    monkeypatch.setattr("barchan.sdk.aio.client.CREATE_TIMEOUT_S", 0.05)
    node.errors["node_info"] = BackendError("broken")
    gate = node.hold["create"] = threading.Event()
    asyncio.get_running_loop().call_later(0.5, gate.set)
    with pytest.raises(BackendError, match="broken"):
        await client.create("debian")
    assert node.sandboxes == {}


async def test_create_many_gives_errors_as_items(node: FakeNode, client: AsyncClient) -> None:
    """A start that fails is an item like any other."""
    node.errors["create"] = CapacityError("full", retry_after_ms=1)
    made = [item async for item in client.create_many("debian", n=3)]
    assert [type(item) for item in made] == [CapacityError] * 3


async def test_leaving_create_many_early_frees_the_rest(node: FakeNode, client: AsyncClient) -> None:
    """What was not given yet is ended, also what is still starting; what was given lives."""
    async with contextlib.aclosing(client.create_many("debian", n=8)) as items:
        kept = await anext(items)
        node.hold["create"] = threading.Event()
        node.hold["create"].set()
    assert isinstance(kept, AsyncSandbox)
    assert list(node.sandboxes) == [kept.id]


async def test_kill_by_label(node: FakeNode, client: AsyncClient) -> None:
    """Ends those that have all the labels, and says how many."""
    for job in ("a", "a", "b"):
        await client.create("debian", labels={"job": job, "kind": "t"})
    assert await client.kill(labels={"job": "a", "kind": "t"}) == 2
    assert [info.spec.labels["job"] for info in node.sandboxes.values()] == ["b"]


async def test_the_token_is_sent_and_checked_at_connect(tmp_path: Path) -> None:
    """A wrong token fails in connect already; the right one works and is in no repr."""
    node = FakeNode(tmp_path, token="secret-1")
    node.start()
    try:
        with pytest.raises(Denied):
            await connect_async(node.url)
        async with connect_async(node.url, token="secret-1") as client:
            assert (await client.node_info()).node_id == "fake"
            assert "secret" not in repr(client) + repr(client._transport) + repr(client.endpoint)
    finally:
        node.stop()


async def test_connecting_asks_again_where_a_call_was_taken(node: FakeNode) -> None:
    """Somebody listens there, so the address is right: a node that is being started anew, say."""
    node.drop_before["node_info"] = 2
    async with connect_async(node.url) as client:
        assert client.endpoint is not None
    assert node.calls["node_info"] == 3


async def test_connecting_to_nothing_fails_at_once(tmp_path: Path) -> None:
    """An address where nobody listens is told at once, not after the patience that a known node gets."""
    started = time.monotonic()
    with pytest.raises(ConnectionLost):
        await connect_async(f"unix://{tmp_path}/none.sock")
    with pytest.raises(ConnectionLost):
        await connect_async("http://127.0.0.1:9")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://x",
        "http://",
        "http://h:99999",
        "http://u:p@h",
        "http://h/path",
        "http://h?q",
        "unix://rel",
        "unix:/x?y",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """Each malformed address is InvalidSpec."""
    with pytest.raises(InvalidSpec):
        connect_async(url)


@pytest.mark.parametrize("token", ["", "a b", "a\r\nX: y", "grün"])
def test_a_token_that_is_no_header_is_refused(token: str) -> None:
    """A token can't smuggle a header, and is not quoted in the refusal."""
    with pytest.raises(InvalidSpec) as caught:
        connect_async("http://127.0.0.1:1", token=token)
    assert not token or token not in str(caught.value)


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """The kernel's bound on unix socket paths is told before anything is tried."""
    with pytest.raises(InvalidSpec, match="too long"):
        connect_async(state_dir=tmp_path / ("x" * 120))


def test_allow_is_short_for_the_network_with_hosts() -> None:
    """allow=[...] sets both fields; with another network, or as a bare string, it is refused."""
    spec = sandbox_spec("debian", {"allow": ["a.example", "*.b.example"]})
    assert (spec.network, spec.allow_hosts) == ("allow", ("a.example", "*.b.example"))
    for wrong in ({"allow": ["a"], "network": "open"}, {"allow": "a.example"}):
        with pytest.raises(InvalidSpec):
            sandbox_spec("debian", wrong)  # type: ignore[arg-type]


async def test_errors_of_the_server_that_are_not_ours_are_backend_errors(node: FakeNode, client: AsyncClient) -> None:
    """A body that no node sends becomes a BarchanError that quotes it."""
    with pytest.raises(BarchanError, match="unexpected"):
        await client.images()
