"""What a dump takes, a restore brings back: what guests leave behind or make on purpose, and what is refused for it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

import barchan
from barchan.backends.container import inside
from barchan.backends.container.backend import ContainerHandle
from barchan.errors import BackendError, BootFailed, NotSnapshotable
from tests.integration.memory_lab import Lab, Talker
from tests.nodes import NodeProcess

pytestmark = pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs", "criu")
LEFT = """
cd /tmp
nohup sleep 1001 >/dev/null 2>&1 &
python3 -c "import socket, time
bound = socket.socket(socket.AF_UNIX)
bound.bind('/tmp/bound')
bound.listen()
time.sleep(1002)" >/tmp/log 2>&1 &
(sleep 1003 &)
until [ -S /tmp/bound ]; do sleep 0.05; done
"""
COUNTED = "ps -eo sid,args | grep -c 'slee[p]'"
LEADERS = "ps -eo pid,sid,args | awk '/slee[p] 100/ {print $1 == $2}' | sort -u"
PROGRAM = (
    "import ctypes, os, sys, threading, time\nlibc = ctypes.CDLL(None)\n"
    + """
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""
)
HELD = (
    "os.open('/proc/self', 0)",
    "os.chdir('/proc/1')",
    "os.open('/proc/self/fdinfo/0', 0)",
    "os.open('/proc/self/fd/0', os.O_PATH | os.O_NOFOLLOW)",
    "os.open(f'/proc/self/task/{threading.enumerate()[1].native_id}/stat', 0)",
)
KEPT = "[os.open('/proc/' + name, 0) for name in ('', 'meminfo', 'self/fd', 'self/status', 'self/net/tcp', '1/stat')]"


@pytest_asyncio.fixture
async def lab(images: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"), images)
    await lab.open()
    yield lab
    assert await lab.close() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[barchan.AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def test_what_commands_leave_running_comes_back(client: barchan.AsyncClient) -> None:
    """Programs whose session's leader has ended, one with a bound socket: in forks and from disk, in their session."""
    sandbox = await client.create("debian", memory_mib=256)
    assert (await sandbox.exec(LEFT)).exit_code == 0
    assert (await sandbox.exec(COUNTED)).text == "3\n"
    (child,) = await sandbox.fork(1, kind="memory")
    assert (await child.exec(COUNTED)).text == "3\n"
    for _ in range(2):
        await sandbox.hibernate()
        assert (await sandbox.exec(COUNTED)).text == "3\n"
    assert (await sandbox.exec(LEADERS)).text == "0\n"


async def test_a_wake_that_fails_can_be_tried_again(node: NodeProcess, client: barchan.AsyncClient) -> None:
    """The sandbox stays on disk, the failure is the platform's and says why, and the next request wakes it."""
    sandbox = await client.create("debian", memory_mib=64)
    await sandbox.exec("echo kept > /dev/shm/file")
    await sandbox.hibernate()
    waking = asyncio.create_task(sandbox.exec("true"))
    await _kill_criu(node, sandbox.id)
    with pytest.raises(BackendError, match="on disk as it was") as caught:
        await waking
    assert caught.value.fault == "platform"
    assert (await sandbox.info()).phase == "hibernated"
    assert (await sandbox.exec("cat /dev/shm/file")).text == "kept\n"


async def _kill_criu(node: NodeProcess, sandbox_id: str) -> None:
    """The one that restores that sandbox."""
    root = Path("/sys/fs/cgroup")
    root = root / "unified" if (root / "unified").exists() else root
    path = root / "barchan" / node.watch.cgroup / sandbox_id / "cgroup.procs"
    async with asyncio.timeout(20):
        while True:
            await asyncio.sleep(0)
            with suppress(FileNotFoundError, ProcessLookupError):
                for pid in path.read_text().split():
                    if b"--restore-detached" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(int(pid), signal.SIGKILL)
                        return


async def _program(lab: Lab, handle: ContainerHandle, process_id: str, user: str = "1000") -> Talker:
    return await lab.start(handle, process_id, ["/usr/bin/python3", "-c", PROGRAM], user=user)


async def test_a_programs_name_is_not_believed(lab: Lab) -> None:
    """It may look like another line of what the kernel says of it, or be no text."""
    handle = await lab.create()
    for number, name in enumerate((b"\x1eNSpid:\t7777", b"\xff\xfe\x85\nNSpid:\t7")):
        program = await _program(lab, handle, f"program{number}")
        await program.ask(handle.guest, f"libc.prctl(15, {name!r}, 0, 0, 0)")
    memory = await lab.dump(handle, "named")
    copy = await lab.restore("sb_copy", memory, cut="named")
    assert await lab.run(copy, "echo on", "fresh") == "on\n"


async def test_what_cannot_be_opened_again_is_refused(lab: Lab) -> None:
    """Directories of processes and the like in /proc are named, and other files there live on."""
    handle = await lab.create()
    program = await _program(lab, handle, "program")
    for number, wish in enumerate(HELD):
        await program.ask(handle.guest, f"globals().__setitem__('held', {wish})")
        with pytest.raises(NotSnapshotable, match=r"has /proc/\d+"):
            await lab.dump(handle, f"refused{number}")
        await handle.thaw(0.0)
        await program.ask(handle.guest, "os.chdir('/tmp') if held is None else os.close(held)")
    assert len(await program.ask(handle.guest, f"globals().__setitem__('kept', {KEPT}) or kept")) == 6
    memory, mark = await lab.dump(handle, "kept"), program.mark
    copy = await lab.restore("sb_copy", memory, cut="kept")
    again = await lab.again(copy, "program", mark)
    assert (await again.ask(copy.guest, "os.read(kept[5], 3)")) == b"1 ("


async def test_more_than_can_be_restored_is_refused(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many groups, too many processes: at the dump; and a list that is too long is never cut at a restore."""
    handle = await lab.create(root="capable")
    program = await _program(lab, handle, "program", user="root")
    await program.ask(handle.guest, "os.setgroups(range(10000, 10700))")
    with pytest.raises(NotSnapshotable, match="groups"):
        await lab.dump(handle, "groups")
    await handle.thaw(0.0)
    await program.ask(handle.guest, "os.setgroups(range(10000, 10300))")
    monkeypatch.setattr(inside, "PLACES_BYTES_MAX", 4)
    with pytest.raises(NotSnapshotable, match="processes are more"):
        await lab.dump(handle, "processes")
    monkeypatch.undo()
    await handle.thaw(0.0)
    memory, record = await lab.dump(handle, "whole")
    many = replace(record, places={**record.places, **dict.fromkeys(range(10000, 21000), "x" * 100)})
    with pytest.raises(BootFailed, match="too long"):
        await lab.restore("sb_many", (memory, many), cut="whole", root="capable")
    copy = await lab.restore("sb_copy", (memory, record), cut="whole", root="capable")
    again = await lab.again(copy, "program", program.mark)
    assert await again.ask(copy.guest, "len(os.getgroups())") == 300
