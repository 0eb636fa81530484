"""What a node owes its clients beyond running programs: ends, identities, bounds, networks."""

import asyncio
import gc
import http.server
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient
from barchan.model.sandbox import SandboxSpec, StartRequest
from barchan.node.admission import default_limits
from barchan.node.live import Live
from barchan.node.sandboxes import Sandboxes
from tests.nodes import NodeProcess

pytestmark = pytest.mark.requires("root", "cgroup")


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def _ends(sandbox: barchan.AsyncSandbox, within_s: float) -> barchan.BarchanError:
    """The error that says why the sandbox is no more."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            await sandbox.info()
            await sandbox.processes()
        except barchan.BarchanError as error:
            return error
        await asyncio.sleep(0.1)
    raise AssertionError(f"{sandbox.id} lives on")


async def test_a_sandbox_ends_by_its_ttl(client: AsyncClient) -> None:
    """Even while a program runs in it; the cause is told afterwards."""
    sandbox = await client.create("debian", ttl_s=1.5)
    await sandbox.start("sleep 100")
    error = await _ends(sandbox, 10)
    assert isinstance(error, barchan.SandboxExpired)
    assert error.details["cause"] == "ttl"
    assert (await sandbox.info()).end_cause == "ttl"


async def test_a_sandbox_ends_when_idle_but_not_while_a_program_runs(client: AsyncClient) -> None:
    """Idle means neither requests nor programs."""
    busy = await client.create("debian", idle_timeout_s=1.5)
    idle = await client.create("debian", idle_timeout_s=1.5)
    await busy.start("sleep 100")
    await asyncio.sleep(5)
    assert (await idle.info()).end_cause == "idle_timeout"
    assert (await busy.info()).phase == "ready"
    await busy.kill()


async def test_a_program_that_nobody_waits_for_is_seen_to_end(client: AsyncClient) -> None:
    """Its deadline passes without harm, it counts as running no more, and the sandbox can become idle."""
    sandbox = await client.create("debian", idle_timeout_s=1.5)
    process = await sandbox.start("exit 3", timeout_s=1)
    await asyncio.sleep(0.5)
    assert (await sandbox.info()).processes_running == 0
    await asyncio.sleep(0.8)
    ended = await process.info()
    assert (ended.exit_code, ended.timed_out) == (3, False)
    await asyncio.sleep(4)
    assert (await sandbox.info()).end_cause == "idle_timeout"


async def test_a_guest_can_not_make_its_own_acts_the_platforms_fault(client: AsyncClient) -> None:
    """A broken user table and a name that is not text are told as what they are."""
    async with await client.create("debian") as sandbox:
        await sandbox.exec(["python3", "-c", r"open(b'/tmp/\xff', 'w')"])
        assert [entry.path for entry in await sandbox.files.list("/tmp")] == ["/tmp/\N{REPLACEMENT CHARACTER}"]
        await sandbox.exec("rm /etc/passwd", user="root")
        with pytest.raises(barchan.GuestWrecked) as caught:
            await sandbox.files.read("/etc/hostname")
        assert caught.value.fault == "policy"


async def test_what_can_never_fit_is_refused(client: AsyncClient) -> None:
    """No waiting helps against more memory or processors than the machine has."""
    for options in ({"memory_mib": 1 << 20}, {"cpus": 1000}):
        with pytest.raises(barchan.InvalidSpec, match="never fit"):
            await client.create("debian", **options)


async def test_a_long_path_is_a_path(client: AsyncClient) -> None:
    """Up to the kernel's own bound, whatever its characters take on the wire."""
    async with await client.create("debian") as sandbox:
        path = "/tmp/" + "/".join(["\N{CJK UNIFIED IDEOGRAPH-6F22}" * 60] * 18)
        await sandbox.files.write(path, b"deep")
        assert await sandbox.files.read(path) == b"deep"


async def test_a_create_id_names_one_sandbox(client: AsyncClient) -> None:
    """Asked twice, at once or later, it is the same one."""
    first, second = await asyncio.gather(*(client.create("debian", create_id="once") for _ in range(2)))
    third = await client.create("debian", create_id="once")
    assert first.id == second.id == third.id
    with pytest.raises(barchan.Conflict):
        await client.create("debian", create_id="once", memory_mib=64)
    await first.kill()
    with pytest.raises(barchan.SandboxExpired):
        await client.create("debian", create_id="once")


async def test_labels_choose(client: AsyncClient) -> None:
    """list and kill take those that have all the labels asked for."""
    made = [await client.create("debian", labels={"job": "x", "turn": str(turn)}) for turn in range(3)]
    assert {info.sandbox_id for info in await client.list(labels={"job": "x"})} == {item.id for item in made}
    assert await client.kill(labels={"job": "x", "turn": "1"}) == 1
    assert {info.sandbox_id for info in await client.list(labels={"job": "x"})} == {made[0].id, made[2].id}
    assert await client.kill(labels={"job": "x"}) == 2


async def test_a_process_id_is_one_program(client: AsyncClient) -> None:
    """Repeating it gives the same result and runs nothing; using it for something else is a Conflict."""
    async with await client.create("debian") as sandbox:
        command = "echo ran >> /tmp/log; cat /tmp/log"
        first = await sandbox.exec(command, process_id="step-7")
        again = await sandbox.exec(command, process_id="step-7")
        assert (first.stdout, again.stdout) == (b"ran\n", b"ran\n")
        with pytest.raises(barchan.Conflict):
            await sandbox.exec("true", process_id="step-7")


async def test_a_full_node_refuses_with_a_retry_time(make_node: Callable[[], NodeProcess]) -> None:
    """The bound of running sandboxes holds under a burst, and a freed place can be had."""
    node = make_node()
    node.start("--running-max", "5")
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        made = [item async for item in client.create_many("debian", n=12, memory_mib=64)]
        refused = [item for item in made if isinstance(item, barchan.BarchanError)]
        running = [item for item in made if isinstance(item, barchan.AsyncSandbox)]
        assert (len(running), {type(error) for error in refused}) == (5, {barchan.CapacityError})
        assert all(int(error.details["retry_after_ms"]) > 0 for error in refused)
        await running[0].kill()
        async with await client.create("debian", memory_mib=64) as another:
            assert (await another.exec("true")).exit_code == 0
    assert node.end() == []


async def test_a_failed_create_leaves_nothing_and_names_the_stage(client: AsyncClient, node: NodeProcess) -> None:
    """An image that is not there, and a name that no host can have."""
    with pytest.raises(barchan.NotFound, match="no image"):
        await client.create("no-such-image")
    with pytest.raises(barchan.InvalidSpec):
        await client.create("debian", hostname="Not_A_Host")
    assert node.sandboxes() == []


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on the test's output."""


@pytest.fixture
def web() -> Iterator[str]:
    """A web server on the host's loopback; its address as HOST:PORT."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


PROXY_FOR_ALL = {"no_proxy": "", "NO_PROXY": ""}  # the server under test is on an address that is usually not proxied
FETCH = """
import sys, urllib.request
print(urllib.request.build_opener(urllib.request.ProxyHandler()).open(sys.argv[1], timeout=10).read().decode())
"""


async def test_allow_reaches_what_it_names_and_nothing_else(client: AsyncClient, web: str) -> None:
    """Through the egress proxy, by name; without it there is no way out, and by default no proxy."""
    async with await client.create("debian", allow=[web]) as sandbox:
        allowed = await sandbox.exec(["python3", "-c", FETCH, f"http://{web}/"], env=PROXY_FOR_ALL)
        assert (allowed.exit_code, allowed.text) == (0, "hello\n")
        other = await sandbox.exec(["python3", "-c", FETCH, "http://127.0.0.1:9/"], env=PROXY_FOR_ALL)
        assert "403" in other.error_text
        assert (await sandbox.exec(["python3", "-c", FETCH, f"http://{web}/"])).exit_code != 0
    async with await client.create("debian") as sandbox:
        assert (await sandbox.exec(["python3", "-c", FETCH, f"http://{web}/"])).exit_code != 0


@pytest.mark.requires("slirp4netns")
async def test_open_has_an_interface_and_a_resolver(client: AsyncClient) -> None:
    """There is no outside on a test machine; that packets would have somewhere to go can be seen."""
    async with await client.create("debian", network="open") as sandbox:
        routes = (await sandbox.exec("cat /proc/net/route")).text
        assert "tap0\t00000000" in routes
        assert "nameserver 10.0.2.3" in (await sandbox.exec("cat /etc/resolv.conf")).text


async def test_kernel_counters_of_a_sandbox(client: AsyncClient) -> None:
    """Memory, processes and CPU time as the kernel counts them; a kill by the memory limit is evidence."""
    async with await client.create("debian", memory_mib=64) as sandbox:
        eater = await sandbox.exec(["python3", "-c", "x = bytearray(200 << 20)"])
        assert (eater.oom_killed, eater.exit_code, eater.signal) == (True, 137, 9)
        stats = await sandbox.stats()
        assert stats.oom_kills >= 1
        assert stats.cpu_s > 0
        assert stats.memory_peak_bytes <= 64 << 20
        assert (await sandbox.exec("kill -9 $$")).oom_killed is False


async def test_a_sandbox_that_ended_is_let_go(images: Path, tmp_path: Path) -> None:
    """However long it might have lived, nothing of it stays in the node's memory."""
    (tmp_path / "images").symlink_to(images)
    sandboxes = Sandboxes(tmp_path, default_limits(), "0")
    await sandboxes.start()
    try:
        for _ in range(5):
            info = await sandboxes.create(SandboxSpec(template="debian", detach=True, ttl_s=86_400.0, memory_mib=64))
            live = sandboxes.live[info.sandbox_id]
            await live.processes.start(StartRequest(argv=("sleep", "60"), timeout_s=86_400.0))
            await sandboxes.end(live, "test")
            del live
        gc.collect()
        assert [item for item in gc.get_objects() if isinstance(item, Live)] == []
    finally:
        await sandboxes.shutdown()
        await sandboxes.close()
