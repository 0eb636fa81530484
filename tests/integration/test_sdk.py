"""The SDK against a real node: the shape that users are promised, and what cancelling and losing the node leave."""

import asyncio
import contextlib
import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan.errors import InvalidSpec, NotFound, QuotaExceeded, SandboxExpired
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.sandbox import AsyncSandbox
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(120), pytest.mark.requires("root", "cgroup", "userns")]

MIB = 1 << 20


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


@pytest.fixture
async def sandbox(client: AsyncClient) -> AsyncIterator[AsyncSandbox]:
    async with await client.create("debian", memory_mib=256) as sandbox:
        yield sandbox


@pytest.fixture
def blocking(node: NodeProcess) -> Iterator[barchan.Sandbox]:
    with barchan.connect(state_dir=node.state_dir) as client, client.create("debian", memory_mib=256) as sandbox:
        yield sandbox


def test_the_promised_shape(node: NodeProcess) -> None:
    """Every call of the program that users are shown, in its order."""
    with barchan.connect(state_dir=node.state_dir) as client:
        with client.create(
            "debian", memory_mib=512, cpus=1, ttl_s=600, env={"A": "1"}, labels={"job": "shape"}
        ) as sandbox:
            result = sandbox.exec(["python3", "-c", "print(6*7)"], timeout_s=10)
            assert (result.exit_code, result.signal, result.timed_out, result.text) == (0, None, False, "42\n")
            assert (result.stderr, result.truncated, result.usage.wall_s > 0) == (b"", False, True)
            assert result.check() is result
            process = sandbox.start("echo out; read x; echo got $x $A", process_id="step-7")
            process.write_stdin(b"it\n")
            got = b"".join(data for stream, offset, data in process.output(offset=0) if stream == "stdout")
            assert got == b"out\ngot it 1\n"
            assert process.wait().exit_code == 0
            sleeper = sandbox.start(["sleep", "300"])
            assert sleeper.signal("INT") == 1
            assert sleeper.wait().exit_code == 130
            sandbox.files.write("notes/a.txt", b"hello")
            assert sandbox.files.read_text("notes/a.txt") == "hello"
            with sandbox.shell() as shell:
                shell.run("cd notes; f() { cat a.txt; }")
                assert shell.run("f").text == "hello"
            with sandbox.terminal() as terminal:
                terminal.send("echo $((6*7))\n")
                assert any(row == "42" for row in terminal.screen(settle_s=0.5))
            assert [info.sandbox_id for info in client.list(labels={"job": "shape"})] == [sandbox.id]
            assert {info.process_id for info in sandbox.processes()} >= {"step-7", sleeper.id}
            assert sandbox.info().spec.memory_mib == 512
            assert sandbox.stats().memory_bytes > 0
        with pytest.raises((NotFound, SandboxExpired)):
            sandbox.exec("true")
        spec = barchan.SandboxSpec(template="debian", memory_mib=64)
        made = list(client.create_many(spec, n=4))
        assert all(isinstance(item, barchan.Sandbox) for item in made)
        assert "debian" in {image.name for image in client.images()}
        assert client.node_info().sandboxes_running >= 4


async def test_bytes_of_every_kind_go_in_and_out(sandbox: AsyncSandbox) -> None:
    """50 MiB of stdin, of a file, of output through a stream; bytes that are no text."""
    data = os.urandom(MIB) * 50
    digest = hashlib.sha256(data).hexdigest()
    assert (await sandbox.exec("sha256sum", stdin=data)).text.split()[0] == digest
    await sandbox.files.write("big", data)
    assert hashlib.sha256(await sandbox.files.read("big")).hexdigest() == digest
    assert await sandbox.files.read("big", 49 * MIB, 10) == data[49 * MIB : 49 * MIB + 10]
    process = await sandbox.start("cat big", overflow="block")
    streamed = hashlib.sha256()
    async for _, _, piece in process.output():
        streamed.update(piece)
    assert streamed.hexdigest() == digest
    fed = await sandbox.start("sha256sum")
    await fed.write_stdin(data[: 3 * MIB], eof=True)
    told = [piece async for _, _, piece in fed.output()]
    assert b"".join(told).split()[0].decode() == hashlib.sha256(data[: 3 * MIB]).hexdigest()


async def test_long_arguments(sandbox: AsyncSandbox) -> None:
    """About 1 MiB of argv in all, and a shell text longer than one argument can be."""
    result = await sandbox.exec(["python3", "-c", "import sys; print(sum(map(len, sys.argv)))", *["x" * 100_000] * 10])
    assert int(result.text) >= 1_000_000
    assert (await sandbox.exec("x='" + "y" * 500_000 + "'; echo ${#x}")).text == "500000\n"


async def test_failing_programs_are_results(sandbox: AsyncSandbox) -> None:
    """Missing, not executable, out of time with partial output, too much output: all in the result."""
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    assert (await sandbox.exec(["/etc/passwd"])).exit_code == 126
    late = await sandbox.exec("echo early; sleep 300", timeout_s=0.5)
    assert (late.timed_out, late.text) == (True, "early\n")
    long = await sandbox.exec("seq 1 1000000", max_output_bytes=1000)
    assert (long.truncated, len(long.stdout), long.stdout_bytes) == (True, 1000, 6888896)
    assert long.stdout.startswith(b"1\n2\n") and long.stdout.endswith(b"999999\n1000000\n")
    started = time.monotonic()
    assert (await sandbox.exec("sleep 300 & echo done")).text == "done\n"
    assert time.monotonic() - started < 10


async def sleeping(sandbox: AsyncSandbox) -> int:
    """How many `sleep` run in it."""
    return int((await sandbox.exec("ps -eo stat=,comm= | grep -v ^Z | grep -cw sleep", platform=True)).text)


async def test_cancelling_leaves_no_process(sandbox: AsyncSandbox) -> None:
    """When the cancellation of an exec, of a start or of a shell command is seen, nothing of it runs any more."""
    call = asyncio.ensure_future(sandbox.exec("sleep 4242 & setsid sleep 4242 & sleep 4242"))
    async with asyncio.timeout(20):
        while await sleeping(sandbox) < 3:
            await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await sleeping(sandbox) == 0
    for delay_s in (0, 0.001, 0.003, 0.01):
        for start in (sandbox.exec, sandbox.start):
            call = asyncio.ensure_future(start(["sleep", "4242"]))  # type: ignore[arg-type]
            await asyncio.sleep(delay_s)
            if call.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await call
            else:
                await call.result().kill()  # type: ignore[attr-defined]
    assert await sleeping(sandbox) == 0


async def test_cancelling_a_create_leaves_no_sandbox(client: AsyncClient) -> None:
    """At whatever moment a create is cancelled, its sandbox is gone when that is seen."""
    for delay_s in (0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02):
        call = asyncio.ensure_future(client.create("debian", memory_mib=64, labels={"job": "cancelled"}))
        await asyncio.sleep(delay_s)
        if call.cancel():
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            await call.result().kill()
        assert await client.list(labels={"job": "cancelled"}) == []


async def test_leaving_create_many_early_frees_the_rest(client: AsyncClient) -> None:
    """The first one is kept, the other fifteen are gone."""
    items = client.create_many("debian", n=16, memory_mib=64, labels={"job": "many"})
    async with contextlib.aclosing(items):
        kept = await anext(items)
    assert isinstance(kept, AsyncSandbox)
    assert [info.sandbox_id for info in await client.list(labels={"job": "many"})] == [kept.id]
    assert await client.kill(labels={"job": "many"}) == 1


async def test_files(sandbox: AsyncSandbox) -> None:
    """Write, stat, list, move, remove, mkdir and their refusals, as the sandbox's user and as another."""
    files = sandbox.files
    await files.write("a/b/c.txt", "text", mode=0o600)
    info = await files.stat("a/b/c.txt")
    assert (info.kind, info.size, info.mode) == ("file", 4, 0o600)
    assert [entry.kind for entry in await files.list("a")] == ["directory"]
    await files.write("stream", io.BytesIO(b"x" * (3 * MIB)))
    assert (await files.stat("stream")).size == 3 * MIB
    await files.move("a/b/c.txt", "a/d.txt")
    assert (await files.exists("a/b/c.txt"), await files.exists("a/d.txt")) == (False, True)
    await files.mkdir("deep/er")
    await files.remove("deep", recursive=True)
    assert not await files.exists("deep")
    with pytest.raises(NotFound):
        await files.read("none")
    with pytest.raises(barchan.Denied):
        await files.write("/etc/shadow", b"x")
    await files.as_user("root").write("/etc/note", b"x")
    assert (await files.stat("/etc/note")).uid == 0


async def test_trees_go_in_and_out(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    """A tree comes back as it went; a single file too; bounds hold."""
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "deep/er/grün").write_bytes(os.urandom(100_000))
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    (source / "deep/up").symlink_to("../run")
    await sandbox.files.upload(source, "tree")
    assert (await sandbox.exec("tree/deep/up")).text == "ran\n"
    await sandbox.files.download("tree", tmp_path / "back")
    compared = subprocess.run(["diff", "-r", "--no-dereference", source, tmp_path / "back"], capture_output=True)
    assert (compared.returncode, compared.stdout) == (0, b"")
    assert os.access(tmp_path / "back/run", os.X_OK)
    await sandbox.files.upload(source / "run", "alone")
    await sandbox.files.download("alone", tmp_path)
    assert (tmp_path / "alone").read_text() == (source / "run").read_text()
    with pytest.raises(QuotaExceeded):
        await sandbox.files.download("tree", tmp_path / "small", max_bytes=1000)
    await sandbox.exec("mkdir evil; ln -s /etc/passwd evil/link")
    with pytest.raises(barchan.RemoteProtocolError, match="link"):
        await sandbox.files.download("evil", tmp_path / "evil")
    assert list((tmp_path / "evil").iterdir()) == []


async def test_watching_sees_what_happens_after_the_call(sandbox: AsyncSandbox) -> None:
    """Changes made at once after watch() returned are seen, below new directories too."""
    await sandbox.files.mkdir("watched")
    async with await sandbox.files.watch("watched") as changes:
        await sandbox.exec("echo x > watched/a; mv watched/a watched/b; rm watched/b")
        seen = []
        async with asyncio.timeout(10):
            async for change in changes:
                seen.append((change.kind, change.path))
                if change.kind == "removed":
                    break
    assert ("created", "a") in seen and ("removed", "b") in seen


async def test_the_shell_survives_timeouts(sandbox: AsyncSandbox) -> None:
    """A command out of time is killed with what it started; the shell keeps its state."""
    async with await sandbox.shell() as shell:
        await shell.run("cd /tmp; x=kept; f() { echo f $x; }")
        late = await shell.run("echo part; setsid sleep 4242 & sleep 4242", timeout_s=0.5)
        assert (late.timed_out, late.text, late.restarted) == (True, "part\n", False)
        assert await sleeping(sandbox) == 0
        assert (await shell.run("pwd; f; false")).text == "/tmp\nf kept\n"
        assert (await shell.run("echo $?")).text == "1\n"
        gone = await shell.run("while :; do :; done", timeout_s=0.3)
        assert (gone.timed_out, gone.restarted) == (True, True)
        ended = await shell.run("sleep 4242 & exit 7")
        assert (ended.exit_code, ended.restarted) == (7, True)


async def test_a_terminal_program(sandbox: AsyncSandbox) -> None:
    """A program on a terminal sees its size, its changes, and control keys."""
    async with await sandbox.terminal(30, 100) as terminal:
        await terminal.send("stty size\n")
        assert "30 100" in await terminal.screen(settle_s=0.5)
        await terminal.resize(10, 50)
        await terminal.send("clear; stty size\n")
        assert "10 50" in await terminal.screen(settle_s=0.5)
        await terminal.send("sleep 4242\n")
        await terminal.screen(settle_s=0.3)
        await terminal.send("\x03")
        await terminal.screen(settle_s=0.3)
        assert await sleeping(sandbox) == 0


def test_pickled_handles_work_in_another_process(blocking: barchan.Sandbox) -> None:
    """A sandbox and a process sent to another interpreter are the same ones there."""
    process = blocking.start("cat", process_id="there")
    code = f"""
import pickle
sandbox, process = pickle.loads({pickle.dumps((blocking, process))!r})
process.write_stdin("hello", eof=True)
print(b"".join(data for _, _, data in process.output()).decode(), sandbox.exec("echo $0 here").text.split()[-1])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("hello here\n", "")


async def test_a_killed_node_loses_no_byte_and_no_exec(make_node: Callable[[], NodeProcess]) -> None:
    """The node is killed and started again: an exec ends once, a stream goes on, a shell and the lease are kept."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        sandbox = await client.create("debian")
        shell = await sandbox.shell()
        await shell.run("x=kept")
        call = asyncio.ensure_future(sandbox.exec("echo run >> runs; sleep 3; cat runs"))
        process = await sandbox.start("for i in $(seq 1 300); do echo $i; sleep 0.01; done")
        got = b""
        async for _, offset, data in process.output():
            assert offset == len(got)
            got += data
            if node.process is not None and len(got) > 200:
                node.kill()
                node.start()
        assert got == b"".join(b"%d\n" % n for n in range(1, 301))
        assert (await call).text == "run\n"
        assert (await shell.run("echo $x")).text == "kept\n"
        assert [info.sandbox_id for info in await client.list()] == [sandbox.id]
    assert node.sandboxes() == []


def test_processes_share_a_node_that_connect_starts(make_node: Callable[[], NodeProcess]) -> None:
    """connect() starts a node and others join it; when it is gone, the next call of an open client starts another."""
    node = make_node()
    connect = f"barchan.connect(state_dir={str(node.state_dir)!r})"
    code = f"""
import barchan
with {connect} as client, client.create("debian") as sandbox:
    print(sandbox.exec("echo hi").text.strip(), client.node_info().pid)
"""
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(8)]
    said = {process.communicate(timeout=100)[0] for process in running}
    assert len(said) == 1 and next(iter(said)).startswith("hi ")
    with barchan.connect(state_dir=node.state_dir) as client:
        first = client.node_info().pid
        os.kill(first, signal.SIGKILL)
        with client.create("debian") as sandbox:
            assert sandbox.exec("echo again").text == "again\n"
        assert client.node_info().pid != first
    node.request("POST", "/v1/node/shutdown")
    assert node.end() == []


async def test_a_shell_at_a_place_that_is_not_there(sandbox: AsyncSandbox) -> None:
    """The error says what the sandbox said of the directory or the user."""
    for options, said in (
        ({"cwd": "/nope"}, "cannot enter /nope"),
        ({"user": "nope"}, "user nope: not in the sandbox's /etc/passwd"),
    ):
        with pytest.raises(InvalidSpec, match=said):
            async with await sandbox.shell(**options) as shell:  # type: ignore[arg-type]
                await shell.run("true")


async def test_a_directory_behind_a_link_is_downloaded(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    """A link on the way to the tree is followed; links in the tree stay what they are."""
    made = await sandbox.exec(
        "mkdir -p /tmp/a/real && echo x >/tmp/a/real/f && ln -s a/real /tmp/link && ln -s f /tmp/a/real/l"
    )
    made.check()
    await sandbox.files.download("/tmp/link", tmp_path / "got")
    assert (tmp_path / "got/f").read_text() == "x\n"
    assert os.readlink(tmp_path / "got/l") == "f"
