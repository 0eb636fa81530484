"""Hibernation, with real sandboxes and CRIU: processes go to disk with their memory, and come back as they were."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import barchan
from barchan.cli.main import main
from barchan.image.store import ImageStore
from barchan.image.template import TemplateConfig
from barchan.model.tiers import TierChange
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "criu"), pytest.mark.timeout(180)]
PYTHON = """
import sys
state = {"heap": list(range(1000))}
for line in sys.stdin:
    print(eval(line, state), flush=True)
"""

WATCHES = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.inotify_add_watch(libc.inotify_init(), b"/tmp", 2)
print("on", flush=True)
time.sleep(600)
"""


class Quiet(BaseHTTPRequestHandler):
    """Answers every GET."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def http_server() -> Iterator[str]:
    """HOST:PORT of one on this host, where no sandbox looks by itself."""
    with ThreadingHTTPServer(("127.0.0.2", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.2:{server.server_port}"
        server.shutdown()


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[barchan.AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def ask(process: barchan.AsyncProcess, line: str, at: int) -> tuple[str, int]:
    """Feed a line to a program, and read its answer from offset `at` on; returns it and where the next one begins."""
    await process.write_stdin(line + "\n")
    said = b""
    async for stream, _, data in process.output(at):
        said += data if stream == "stdout" else b""
        if said.endswith(b"\n"):
            break
    return said.decode().strip(), at + len(said)


async def test_a_python_and_a_shell_come_back_as_they_were(client: barchan.AsyncClient) -> None:
    """Memory, files, a shell's variables, offsets of output, what was counted; again and again."""
    sandbox = await client.create("debian", memory_mib=256)
    eats = "x = [b'x' * (1 << 20) for _ in range(512)]"
    assert (await sandbox.exec(["python3", "-c", eats])).oom_killed
    used = await sandbox.stats()
    assert used.oom_kills >= 1 and used.memory_peak_bytes > 200 << 20
    python = await sandbox.start(["python3", "-u", "-c", PYTHON])
    shell = await sandbox.shell()
    assert (await shell.run("x=1; cd /tmp; echo $x")).text == "1\n"
    answer, at = await ask(python, "heap.append(7) or len(heap)", 0)
    assert answer == "1001"
    for turn in range(3):
        await sandbox.files.write(f"/tmp/file-{turn}", b"kept")
        if turn == 0:
            await sandbox.page_out()
        info = await sandbox.hibernate()
        assert (info.phase, info.tier, info.stays_paused) == ("hibernated", "hibernated", "")
        assert info.memory_freed_bytes > 1 << 20
        assert (await sandbox.info()).phase == "hibernated"
        answer, at = await ask(python, "heap.append(7) or len(heap)", at)
        assert answer == str(1002 + turn)
        assert (await shell.run("x=$((x + 1)); echo $x; pwd")).text == f"{2 + turn}\n/tmp\n"
        listed = {info.path for info in await sandbox.files.list("/tmp")}
        assert {f"/tmp/file-{number}" for number in range(turn + 1)} <= listed
        assert (await sandbox.info()).phase == "ready"
        stats = await sandbox.stats()
        assert stats.oom_kills == used.oom_kills
        assert stats.memory_peak_bytes >= used.memory_peak_bytes
        assert stats.cpu_s >= used.cpu_s
    assert await sandbox.kill()


async def test_one_that_is_killed_on_disk_leaves_nothing(client: barchan.AsyncClient) -> None:
    """No wake is needed for that."""
    sandbox = await client.create("debian", memory_mib=64)
    await sandbox.hibernate()
    assert await sandbox.kill()
    with pytest.raises(barchan.SandboxExpired):
        await sandbox.exec("true")
    assert not [image for image in await client.images() if sandbox.id in image.name]


async def test_an_exec_and_its_deadline_outlast_hibernation(client: barchan.AsyncClient) -> None:
    """Whoever waits for it waits on: its time goes on when the sandbox does."""
    sandbox = await client.create("debian", memory_mib=64)
    program = "i=0; while [ $i -lt 10 ]; do sleep 0.05; i=$((i+1)); done; echo done"
    running = asyncio.create_task(sandbox.exec(program, timeout_s=2))
    await asyncio.sleep(0.2)
    await sandbox.hibernate()
    await asyncio.sleep(2)
    assert not running.done()
    await sandbox.resume()
    result = await running
    assert (result.timed_out, result.text) == (False, "done\n")
    assert 0.5 <= result.usage.wall_s < 2


async def test_requests_at_once_share_the_way_back(client: barchan.AsyncClient) -> None:
    """Twenty execs of one that is on disk, sent together."""
    sandbox = await client.create("debian", memory_mib=64)
    await sandbox.hibernate()
    results = await asyncio.gather(*(sandbox.exec(["echo", str(number)]) for number in range(20)))
    assert [result.text for result in results] == [f"{number}\n" for number in range(20)]


async def test_one_that_waits_goes_to_disk_by_itself(client: barchan.AsyncClient) -> None:
    """As its run has asked, once all that runs in it waits for its client; listening to it does not wake it."""
    sandbox = await client.create("debian", memory_mib=128, waiting=barchan.Waiting(after_s=0.3))
    python = await sandbox.start(["python3", "-u", "-c", PYTHON])
    listening = asyncio.create_task(ask(python, "1 + 1", 0))
    assert (await listening)[0] == "2"
    shell = await sandbox.shell()
    async with asyncio.timeout(60):
        while (await sandbox.info()).phase != "hibernated":
            await asyncio.sleep(0.05)
    assert (await shell.run("echo on")).text == "on\n"
    assert (await ask(python, "2 + 2", 2))[0] == "4"


async def test_a_storm_to_disk_and_back(client: barchan.AsyncClient) -> None:
    """A few at a time, each told of; one that a client waits for need not wait for the others' way back."""
    made = [item async for item in client.create_many("debian", n=12, memory_mib=64, labels={"storm": "disk"})]
    sandboxes = [item for item in made if isinstance(item, barchan.AsyncSandbox)]
    changes = await client.hibernate_many(labels={"storm": "disk"})
    assert {(change.tier, change.refused) for change in changes} == {("hibernated", "")}
    assert len(changes) == len(sandboxes) == 12
    woken: list[str] = []

    def told(change: TierChange) -> None:
        woken.append(change.sandbox_id)

    resuming = asyncio.create_task(client.resume_many(labels={"storm": "disk"}, progress=told))
    while not woken:
        await asyncio.sleep(0.005)
    waiting = [sandbox for sandbox in sandboxes if sandbox.id not in woken]
    assert (await waiting[-1].exec("echo on")).text == "on\n"
    before = len(woken)
    assert [change.sandbox_id for change in await resuming] == woken
    assert len(woken) == 12
    assert before < 12
    assert await client.kill(labels={"storm": "disk"}) == 12


def test_commands(node: NodeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """`barchan pause`, `hibernate` and `resume`, by id and by label, say where each is and what that freed."""
    url = f"unix://{node.socket}"
    with barchan.connect(url) as client, client.create("debian", memory_mib=64, labels={"by": "hand"}) as sandbox:
        for words, said in (
            (["pause", sandbox.id], "paused"),
            (["hibernate", "--label", "by=hand"], "hibernated"),
            (["resume", sandbox.id], "running"),
            (["pause", sandbox.id, "--page-out"], "paused"),
            (["hibernate", sandbox.id], "hibernated"),
        ):
            code = main([*words, "--url", url])
            out = capsys.readouterr().out
            assert out.startswith(f"{sandbox.id}  ")
            assert said in out or "--page-out" in words
            assert code == (1 if "no swap" in out else 0)
        assert main(["hibernate", sandbox.id, "--push", "--url", url]) == 1
        assert "no blob store" in capsys.readouterr().out
        assert main(["resume", "--url", url]) == 2
        assert main(["resume", "--adopt", "--all", "--url", url]) == 2
        capsys.readouterr()
        assert main(["resume", "--label", "by=nobody", "--url", url]) == 0
        assert "no sandboxes" in capsys.readouterr().out
        assert main(["resume", sandbox.id, "--json", "--url", url]) == 0
        assert '"tier":"running"' in capsys.readouterr().out
        assert sandbox.exec("echo on").text == "on\n"


async def test_what_cannot_be_stored_stays_paused_and_says_why(client: barchan.AsyncClient) -> None:
    """A program that watches files through inotify, say."""
    sandbox = await client.create("debian", memory_mib=128)
    process = await sandbox.start(["python3", "-c", WATCHES])
    async for _ in process.output():
        break
    with pytest.raises(barchan.NotSnapshotable, match="stays paused"):
        await sandbox.hibernate()
    info = await sandbox.info()
    assert info.phase == "paused"
    assert info.stays_paused
    assert (await sandbox.exec("echo on")).text == "on\n"
    assert (await process.info()).running


async def test_they_outlive_the_node(make_node: Callable[[], NodeProcess]) -> None:
    """The next one has them, and what they run."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        sandbox = await client.create("debian", memory_mib=128, detach=True, ttl_s=600, labels={"kept": "yes"})
        python = await sandbox.start(["python3", "-u", "-c", PYTHON])
        answer, at = await ask(python, "heap.append(7) or len(heap)", 0)
        await sandbox.hibernate()
        node.kill()
        node.start()
        assert [info.phase for info in await client.list(labels={"kept": "yes"})] == ["hibernated"]
        answer, at = await ask(python, "len(heap)", at)
        assert answer == "1001"
        await sandbox.hibernate()
        await client.kill(labels={})


async def test_what_a_killed_node_stored_in_vain_goes(make_node: Callable[[], NodeProcess]) -> None:
    """An image of files that no sandbox came to use; the one in use stays, on disk and awake."""
    node = make_node()
    node.start()
    images = ImageStore(node.state_dir / "images")
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        sandbox = await client.create("debian", memory_mib=128, detach=True, ttl_s=600)
        for word in ("one", "two"):
            (await sandbox.exec(f"echo {word} >> words")).check()
            await sandbox.hibernate()
            (used,) = [image for image in images.templates() if sandbox.id in image.name]
            if word == "two":
                await sandbox.exec("true")
            images.commit(TemplateConfig(name=f"{used.name}0"), used.layers[1:])
            node.kill()
            node.start()
            assert [image.name for image in images.templates() if sandbox.id in image.name] == [used.name]
        assert (await sandbox.exec("cat words")).text == "one\ntwo\n"
        await client.kill(labels={})
    assert not [image for image in images.templates() if sandbox.id in image.name]


async def test_a_node_that_has_only_such_may_end(make_node: Callable[[], NodeProcess]) -> None:
    """With its supervisor; whoever wants the sandbox starts the next one, which has it."""
    node = make_node()
    node.start("--idle-exit-s", "1")
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        sandbox = await client.create("debian", memory_mib=64, detach=True, ttl_s=600)
        process = await sandbox.start(["cat"])
        await sandbox.hibernate()
    assert node.process is not None
    node.process.wait(60)
    node.process = None
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        sandbox = await client.attach(sandbox.id)
        assert (await sandbox.info()).phase == "hibernated"
        await sandbox.process(process.id).write_stdin("on\n", eof=True)
        assert [data async for _, _, data in sandbox.process(process.id).output()] == [b"on\n"]
        assert await sandbox.kill()


def test_stopping_a_node_keeps_what_is_on_disk(
    make_node: Callable[[], NodeProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """`barchan node stop` ends the rest, says so, and returns when the directory is nobody's; again is harmless."""
    node = make_node()
    node.start()
    with barchan.connect(f"unix://{node.socket}") as client:
        asleep, _, paused = (client.create("debian", memory_mib=64, detach=True, ttl_s=600) for _ in range(3))
        asleep.hibernate()
        paused.pause()
        assert main(["node", "stop", "--state-dir", str(node.state_dir)]) == 0
    out = capsys.readouterr().out
    assert "ended with it: 2; on its disk stay: 1 hibernated, 0 snapshots" in out
    assert node.process is not None
    assert node.process.wait(10) == 0
    node.process = None
    assert main(["node", "stop", "--state-dir", str(node.state_dir)]) == 0
    assert "no node runs in" in capsys.readouterr().out
    node.start()
    with barchan.connect(f"unix://{node.socket}") as client:
        assert [info.sandbox_id for info in client.list()] == [asleep.id]
        assert client.attach(asleep.id).exec("echo on").text == "on\n"
        assert client.attach(asleep.id).kill()


async def test_its_way_out_comes_back_with_it(client: barchan.AsyncClient, http_server: str) -> None:
    """Through the proxy of a sandbox with `allow`, from a program that knew it before."""
    sandbox = await client.create("debian", memory_mib=128, allow=[http_server])
    code = "import sys, urllib.request as r\nfor l in sys.stdin: print(r.urlopen(l.strip()).status, flush=True)"
    process = await sandbox.start(["python3", "-u", "-c", code])
    answer, at = await ask(process, f"http://{http_server}/", 0)
    assert answer == "200"
    await sandbox.hibernate()
    answer, _ = await ask(process, f"http://{http_server}/", at)
    assert answer == "200"


async def test_an_open_network_comes_back_with_it(client: barchan.AsyncClient) -> None:
    """Its interface, its resolver, and programs in it."""
    sandbox = await client.create("debian", memory_mib=64, network="open")
    shell = await sandbox.shell()
    look = "cat /etc/resolv.conf; cat /proc/net/route | wc -l"
    before = (await shell.run(look)).text
    await sandbox.hibernate()
    async with asyncio.timeout(30):
        while (await shell.run(look)).text != before:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("after_s", [0.02, 0.08])
async def test_a_node_killed_on_the_way_loses_nothing(make_node: Callable[[], NodeProcess], after_s: float) -> None:
    """Down and up, killed at one point or another: the next node has each sandbox, awake or not, as it was."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        made = [item async for item in client.create_many("debian", n=3, memory_mib=128, detach=True, ttl_s=600)]
        sandboxes = [item for item in made if isinstance(item, barchan.AsyncSandbox)]
        pythons = [await sandbox.start(["python3", "-u", "-c", PYTHON]) for sandbox in sandboxes]
        ends = [(await ask(python, "heap.append(7) or len(heap)", 0))[1] for python in pythons]
        for turn in range(2):
            await sandboxes[1].hibernate()
            moves = [asyncio.create_task(sandboxes[0].hibernate()), asyncio.create_task(sandboxes[1].resume())]
            await asyncio.sleep(after_s * (turn + 1))
            node.kill()
            for move in moves:
                move.cancel()
            await asyncio.gather(*moves, return_exceptions=True)
            node.start()
            assert sorted(node.sandboxes()) == sorted(sandbox.id for sandbox in sandboxes)
            for index, python in enumerate(pythons):
                answer, ends[index] = await ask(python, "len(heap)", ends[index])
                assert answer == "1001"
        assert await client.kill(labels={}) == 3
    assert node.end() == []
