"""Whole machines: a boot of minutes at worst, so that they have a target of their own, `make test-vm`."""

import asyncio
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient, AsyncSandbox, BarchanError, InvalidSpec, SandboxLost
from barchan.errors import NotFound
from barchan.image.store import ImageStore
from tests.nodes import NodeProcess

DISK = "debian-disk"
WAIT_S = 60.0
BOOT_S = 300.0

pytestmark = [pytest.mark.requires("root", "cgroup", "qemu", "mmdebstrap"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def disks(images: Path) -> None:
    """The ready disk, built if the machine's store has none."""
    try:
        ImageStore(images).resolve(DISK)
    except NotFound:
        subprocess.run([sys.executable, "-m", "barchan.cli", "image", "disk", "debian"], check=True)


@pytest.fixture(scope="module")
def node(make_node: Callable[[], NodeProcess], disks: None) -> Iterator[NodeProcess]:
    node = make_node()
    node.start()
    yield node
    assert node.end() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


@pytest.fixture
async def machine(client: AsyncClient) -> AsyncIterator[AsyncSandbox]:
    """One machine: the module's first boots, each later one is a copy of it."""
    async with await client.create(DISK, backend="vm", memory_mib=512) as sandbox:
        yield sandbox


def pixels(png: bytes) -> tuple[int, int, bytes]:
    """Width, height and the unpacked rows of a PNG, as another reader sees it."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    at, packed = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        packed += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += length + 12
    return width, height, zlib.decompress(packed)


async def until(check: Callable[[], "asyncio.Future[bool] | object"], what: str) -> None:
    """Wait until an asynchronous check holds."""
    deadline = time.monotonic() + WAIT_S
    while not await check():  # type: ignore[misc]
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.2)


async def test_only_a_disk_makes_a_machine(client: AsyncClient) -> None:
    """A root file system is refused as a machine, a disk as a container, and both say what would do."""
    with pytest.raises(InvalidSpec, match="image disk debian"):
        await client.create("debian", backend="vm")
    with pytest.raises(InvalidSpec, match='backend="vm"'):
        await client.create(DISK)
    with pytest.raises(InvalidSpec, match="too little"):
        await client.create(DISK, backend="vm", memory_mib=32)


async def test_a_container_has_no_screen(client: AsyncClient) -> None:
    """Each call of a screen is refused where the backend has none."""
    async with await client.create("debian") as sandbox:
        for call in (
            sandbox.screen.png(),
            sandbox.screen.type("x"),
            sandbox.screen.key("enter"),
            sandbox.screen.move(1, 1),
        ):
            with pytest.raises(InvalidSpec, match="no screen"):
                await call


async def test_a_machine_is_used_as_any_sandbox(machine: AsyncSandbox) -> None:
    """Programs, exit codes, users, input, files, signals and terminals mean the same in a machine."""
    assert (await machine.exec("id -un; pwd; cat /proc/1/comm")).text == "agent\n/home/agent\nsystemd\n"
    assert (await machine.exec("id -u", user="root")).text == "0\n"
    failed = await machine.exec("cat; echo no >&2; exit 7", stdin="yes\n")
    assert (failed.exit_code, failed.text, failed.error_text) == (7, "yes\n", "no\n")
    assert (await machine.exec("sleep 60", timeout_s=1.0)).timed_out
    await machine.files.write("/home/agent/a/b", b"\0data" * 10_000, parents=True)
    assert await machine.files.read("/home/agent/a/b") == b"\0data" * 10_000
    assert (await machine.exec("stat -c %U a/b")).text == "agent\n"
    async with await machine.terminal() as terminal:
        await terminal.send("tty; echo $((6 * 7))\n")
        assert any("42" in row for row in await terminal.screen(settle_s=1.0, timeout_s=20))
    assert (await machine.exec("cat /etc/hostname; hostname")).ok


async def test_what_is_typed_reaches_the_screen_and_the_guest(machine: AsyncSandbox) -> None:
    """Keys act as a person's would: a command typed on the console runs there, and the picture shows it."""
    before = pixels(await machine.screen.png())
    await machine.screen.type("echo 'Typed: {a|B} ~' > /tmp/typed; cat /tmp/typed\n")

    async def is_typed() -> bool:
        return (await machine.exec("cat /tmp/typed")).text == "Typed: {a|B} ~\n"

    await until(is_typed, "what was typed did not run")
    await machine.screen.type("sleep 1000")
    await machine.screen.key("enter")

    async def sleeps() -> bool:
        return (await machine.exec("pgrep -x sleep")).ok

    await until(sleeps, "the enter key did nothing")
    await machine.screen.key("ctrl-c")

    async def is_awake() -> bool:
        return not (await machine.exec("pgrep -x sleep")).ok

    await until(is_awake, "ctrl-c did nothing")
    after = pixels(await machine.screen.png())
    assert await machine.screen.size() == after[:2] == before[:2]
    assert after[2] != before[2]
    with pytest.raises(InvalidSpec, match="not on the screen"):
        await machine.screen.click(after[0], 0)


async def test_the_mouse_reaches_the_guest(machine: AsyncSandbox) -> None:
    """A move gives the pointer's device the place that was meant, a click its button, the wheel its notch."""
    reader = (
        "import glob,struct,sys\n"
        "names={open(p+'/device/name').read().strip():p for p in glob.glob('/sys/class/input/event*')}\n"
        "path='/dev/input/'+names['QEMU QEMU USB Tablet'].rsplit('/',1)[1]\n"
        "with open(path,'rb') as f:\n"
        " print('ready',flush=True)\n"
        " while True:\n"
        "  _,_,kind,code,value=struct.unpack('llHHi',f.read(24))\n"
        "  if kind: print(kind,code,value,flush=True)\n"
    )
    process = await machine.start(["python3", "-c", reader], user="root")
    seen: list[str] = []

    async def read() -> None:
        async for _, _, data in process.output():
            seen.extend(data.decode().split("\n"))

    reading = asyncio.create_task(read())

    async def is_ready() -> bool:
        return "ready" in seen

    await until(is_ready, f"no tablet: {seen}")
    width, height = await machine.screen.size()
    await machine.screen.click(width // 4, height // 2, button="right")
    await machine.screen.scroll(1)

    async def is_seen() -> bool:
        return {"1 273 1", "1 273 0", "2 8 -1"} <= set(seen)

    await until(is_seen, f"clicks did not arrive: {seen}")
    places = dict(line.split()[1:] for line in seen if line.startswith("3 "))
    assert abs(int(places["0"]) * width // 32768 - width // 4) <= 1
    assert abs(int(places["1"]) * height // 32768 - height // 2) <= 1
    await process.kill()
    await reading


async def test_copies_are_told_apart(client: AsyncClient, machine: AsyncSandbox) -> None:
    """Two machines from the same memory draw other random numbers, have their own names and the right time."""
    async with await client.create(DISK, backend="vm", memory_mib=512, hostname="other") as other:
        script = "head -c 16 /dev/urandom | od -An -tx1; hostname"
        one, two = await asyncio.gather(machine.exec(script), other.exec(script))
        assert one.text.split("\n")[0] != two.text.split("\n")[0]
        assert two.text.split("\n")[1] == "other"
        told = float((await other.exec("date +%s.%N")).text)
        assert abs(told - time.time()) < 5


async def test_memory_goes_on_in_forks_and_after_disk(machine: AsyncSandbox) -> None:
    """A fork with memory and a hibernation keep programs, files and what is on the screen."""
    step = "i=$((i+1)); echo $i > /tmp/next; mv /tmp/next /tmp/count"
    process = await machine.start(f"i=0; while sleep 0.2; do {step}; done")
    await machine.files.write("/home/agent/kept", b"before")

    async def counts() -> bool:
        return (await machine.exec("cat /tmp/count")).ok

    await until(counts, "the counter did not start")
    (child,) = await machine.fork(kind="memory")
    assert isinstance(child, AsyncSandbox), child
    async with child:
        await child.files.write("/home/agent/kept", b"child")
        one, two = [int((await child.exec("cat /tmp/count; sleep 1")).text) for _ in range(2)]
        assert two > one
        assert await machine.files.read("/home/agent/kept") == b"before"
    await machine.pause()
    assert (await machine.info()).phase == "paused"
    await machine.exec("true")
    await machine.hibernate()
    assert (await machine.info()).tier == "hibernated"
    assert await machine.files.read("/home/agent/kept") == b"before"
    one, two = [int((await machine.exec("cat /tmp/count; sleep 1")).text) for _ in range(2)]
    assert two > one
    assert (await process.info()).running


async def test_a_snapshot_of_files_boots(client: AsyncClient, machine: AsyncSandbox, node: NodeProcess) -> None:
    """What a machine wrote is in the image, which boots; there is the room that was asked for."""
    await machine.exec("echo here > /home/agent/note; sync")
    snapshot = await machine.snapshot()
    try:
        async with await client.create(snapshot.info.image.name, backend="vm", memory_mib=512) as again:
            assert (await again.exec("cat /home/agent/note")).text == "here\n"
            free_mib = int((await again.exec("df --output=avail -BM / | tail -1")).text.strip("M \n"))
            assert free_mib > 1024
    finally:
        await snapshot.remove()


async def test_a_killed_node_finds_its_machines(
    make_node: Callable[[], NodeProcess], disks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of the node: the next one goes on with the machine, its programs and its screen."""
    node = make_node()
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        machine = await client.create(DISK, backend="vm", memory_mib=512, detach=True, ttl_s=3600)
        process = await machine.start("sleep 1000")
        node.kill()
        node.start()
        assert (await process.info()).running
        assert (await machine.exec("echo still here")).text == "still here\n"
        assert (await machine.screen.png())[:4] == b"\x89PNG"
        await machine.kill()
    assert node.wait_empty(WAIT_S) == []


async def test_a_machine_that_shuts_down_is_lost_and_says_so(machine: AsyncSandbox) -> None:
    """Its own end is no end that was asked for."""
    await machine.start("systemctl poweroff --force --force", user="root")

    async def is_lost() -> bool:
        try:
            await machine.exec("true", timeout_s=5)
        except SandboxLost:
            return True
        except BarchanError:
            return False
        return False

    await until(is_lost, "it still runs")
