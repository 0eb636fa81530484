"""Processes and memory of real sandboxes into a directory and back, by the container backend alone."""

import asyncio
import fcntl
import os
import re
import signal
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from barchan.backends.container.backend import ContainerHandle
from barchan.errors import BarchanError, BootFailed, CapacityError, InitDied, NotSnapshotable, SnapshotCorrupt
from barchan.node.open_network import OpenNetwork
from barchan.wire import guest as wire
from tests.integration.memory_lab import PROGRAM, Lab, Talker

AT_ONCE = 8
DUMPS_MAX = 20
pytestmark = pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs", "criu")
NS_GET_OWNER_UID = 0xB704
PTY = wire.StartFlag.PTY | wire.StartFlag.STDIN
STATUS = 'status("Seccomp", "NoNewPrivs", "CapBnd", "CapEff", "Uid")'


@pytest_asyncio.fixture
async def lab(images: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"), images)
    await lab.open()
    yield lab
    assert await lab.close() == []


async def _look(handle: ContainerHandle, program: Talker) -> list[object]:
    """What must be the same in a copy."""
    wishes = ["os.getpid()", "called()", "connected()", "read_unlinked()", "dialled()", "asked()", "denied()", STATUS]
    return [await program.ask(handle.guest, wish) for wish in wishes]


async def test_every_kind_of_state_lives_on_in_two_copies(lab: Lab) -> None:
    """Memory, thread, sockets, a TCP server and its open connection, unlinked files, a shell with a job and its
    terminal, unread output, files, clocks and protections: in two sandboxes that come from one directory at once.
    """
    handle = await lab.create()
    program = await lab.program(handle)
    shell = await lab.start(handle, "shell", ["/bin/bash", "--norc", "-i"], PTY)
    bulk = await lab.start(handle, "bulk", ["/bin/bash", "-c", "printf %300000s x; echo; sleep 1000"])
    await shell.say(handle.guest, "value=41; echo kept | tee /tmp/file > /dev/shm/file; sleep 900 & echo go$((1+1))\n")
    await shell.reader.until(b"go2")
    await bulk.reader.until(b"x\n")
    assert await program.ask(handle.guest, "count()") == 1
    seen = await _look(handle, program)
    assert seen[1] == (b"over tcp", b"early")
    seen[1] = (b"over tcp", b"late!")
    await program.ask(handle.guest, 'served.sendall(b"late!")')
    mounts, protection = _mounts(handle.pid), _protection(handle.pid)
    assert protection[:2] == (0, True)
    monotonic = await program.ask(handle.guest, "time.monotonic()")
    listed = await handle.guest.listed()
    memory = await lab.dump(handle, "first")
    assert memory[1].processes == 4
    began = time.monotonic()
    copies = await asyncio.gather(*(lab.restore(f"sb_{i}", memory, cut="first") for i in (1, 2)))
    assert copies[0].pid != copies[1].pid
    for copy in copies:
        assert await copy.guest.listed() == listed
        again = await lab.again(copy, "program", program.mark)
        assert await again.ask(copy.guest, "count()") == 2
        assert await _look(copy, again) == seen
        passed = await again.ask(copy.guest, "time.monotonic()") - monotonic
        assert 0 < passed < time.monotonic() - began + 60
        at_shell = await lab.again(copy, "shell", shell.mark)
        await at_shell.say(copy.guest, "echo again$((value+1)); jobs; tty; echo end$((1))\n")
        said = await at_shell.reader.until(b"end1")
        assert all(word in said for word in (b"again42", b"Running", b"/dev/pts/")), said
        spooled = await lab.again(copy, "bulk", (0, 0))
        assert (await spooled.reader.until(b"x\n")).strip() == b"x"
        assert await lab.run(copy, "cat /tmp/file /dev/shm/file; hostname; id -u", "fresh") == "kept\nkept\nbox\n1000\n"
        assert _mounts(copy.pid) == mounts
        assert 0 < copy.stats().memory_bytes < 200 << 20
        assert copy.stats().pids >= 4
        assert _protection(copy.pid) == protection
        await copy.guest.signal(again.process, signal.SIGKILL, wire.Scope.ALL)
        async with asyncio.timeout(10):
            assert os.WTERMSIG((await again.process.ended).wstatus) == signal.SIGKILL


def _mounts(pid: int) -> list[tuple[str, ...]]:
    """Point, options, type and the file system's own options of each mount that a process sees; ids as inside."""
    uid_base = int(Path(f"/proc/{pid}/uid_map").read_text().split()[1])
    found = []
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        kind, _, options = right.split(" ", 2)
        inside = re.sub(r"([ug]id)=(\d+)", lambda match: f"{match[1]}={int(match[2]) - uid_base}", options)
        if left.split()[4] == "/dev/shm":  # the host's at first, the sandbox's own root's when CRIU has made it
            inside = inside.removesuffix(",uid=0,gid=0")
        found.append((left.split()[4], left.split()[5], kind, "" if kind == "overlay" else inside))
    return sorted(found)


def _protection(pid: int) -> tuple[int, bool, list[str]]:
    """Of an init: who owns its files in /proc, whether an id of its sandbox owns its user namespace, its groups."""
    uid_base = int(Path(f"/proc/{pid}/uid_map").read_text().split()[1])
    owner = bytearray(4)
    with open(f"/proc/{pid}/ns/user") as namespace:
        fcntl.ioctl(namespace, NS_GET_OWNER_UID, owner)
    groups = [line.rpartition("/")[2] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    return (
        os.stat(f"/proc/{pid}/oom_score_adj").st_uid,
        struct.unpack("I", owner) == (uid_base,),
        [group for group in groups if not group.startswith("sb_")],
    )


async def test_ten_cycles_lose_nothing(lab: Lab) -> None:
    """A sandbox that is stored and restored ten times, each time from the last: no write and no process is lost."""
    handle = await lab.create()
    program = await lab.program(handle)
    for turn in range(10):
        assert await program.ask(handle.guest, "count()") == turn + 1
        await program.ask(handle.guest, f"open('/tmp/turns', 'a').write('{turn} ')")
        memory = await lab.dump(handle, f"cut{turn}")
        handle = await lab.restore(f"sb_{turn}", memory, cut=f"cut{turn}")
        program = await lab.again(handle, "program", program.mark)
    assert await lab.run(handle, "cat /tmp/turns", "turns") == "".join(f"{turn} " for turn in range(10))
    assert await program.ask(handle.guest, "connected()") == b"through"


async def test_a_kept_sandbox_goes_on(lab: Lab) -> None:
    """It stays stopped until it is let go, its connection is there again, and its copy is another one."""
    handle = await lab.create()
    program = await lab.program(handle)
    assert await program.ask(handle.guest, "count()") == 1
    memory, mark = await lab.dump(handle, "kept", keep=True), program.mark
    assert (await handle.guest.ping()) is not None
    await program.say(handle.guest, "count()\n")
    await asyncio.sleep(0.2)
    assert program.reader.text == b""
    await handle.thaw(0.2)
    assert await program.reader.line() == "2\n"
    copy = await lab.restore("sb_copy", memory, cut="kept")
    again = await lab.again(copy, "program", mark)
    assert await again.ask(copy.guest, "count()") == 2
    assert await program.ask(handle.guest, "count()") == 3


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exec 9</dev/tty; sleep 1000", "/dev/tty"),
        ("python3 -c 'import ctypes,time,os; l=ctypes.CDLL(None); l.inotify_add_watch(l.inotify_init(), b\"/tmp\", 2);"
         " print(1,flush=True); time.sleep(1000)'", "watches files"),
        ("python3 -c 'import ctypes,time; l=ctypes.CDLL(None); print(l.mq_open(b\"/q\", 66, 384, None), flush=True);"
         " time.sleep(1000)'", "message queue"),
    ],
)  # fmt: skip
async def test_what_cannot_be_stored_is_named_and_unharmed(lab: Lab, script: str, reason: str) -> None:
    """The error says what it is, nothing of the attempt is left, and every program goes on."""
    handle = await lab.create()
    holder = await lab.start(handle, "holder", ["/bin/bash", "-c", f"echo up; {script}"], PTY)
    await holder.reader.until(b"up")
    await asyncio.sleep(0.3)
    program = await lab.program(handle)
    assert await program.ask(handle.guest, "count()") == 1
    with pytest.raises(NotSnapshotable, match=reason):
        await lab.dump(handle, "refused")
    assert not (lab.state_dir / "memory-refused").exists()
    assert not [path for path in lab.cgroups() if path.name.endswith(".criu")]
    await handle.thaw(0.1)
    assert await program.ask(handle.guest, "count()") == 2
    assert "holder" in {item.process_id for item in await handle.guest.listed() if not item.exited}


async def test_a_full_disk_is_said_to_be_one(lab: Lab, tmp_path: Path) -> None:
    """It is no fault of what the guest holds: the same sandbox can be stored once there is room."""
    handle = await lab.create()
    program = await lab.program(handle)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "full", tmp_path], check=True)
    try:
        with pytest.raises(CapacityError, match="no room"):
            await handle.dump(tmp_path / "memory", keep=True)
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    await handle.thaw(0.1)
    assert await program.ask(handle.guest, "count()") == 1
    await lab.dump(handle, "roomy")


async def test_limits_hold_in_a_restored_sandbox(lab: Lab) -> None:
    """Memory, processes and disk are bounded as before, and an out-of-memory kill is counted."""
    handle = await lab.create(memory_mib=64, pids_max=32, disk_mib=64)
    program = await lab.program(handle)
    await program.ask(handle.guest, "count()")
    memory = await lab.dump(handle, "limits")
    copy = await lab.restore("sb_copy", memory, cut="limits", memory_mib=64, pids_max=32, disk_mib=64)
    again = await lab.again(copy, "program", program.mark)
    assert await lab.run(copy, "dd if=/dev/zero of=/tmp/big bs=1M count=60 2>&1 | tail -1", "disk") != ""
    assert "exceeded" in await lab.run(copy, "head -c 20M /dev/zero 2>&1 >/tmp/more; rm /tmp/big /tmp/more", "full")
    assert 20 < await again.ask(copy.guest, "fork_all()") < 32
    assert copy.oom_kills() == 0
    await again.say(copy.guest, "bytearray(200 << 20)\n")
    async with asyncio.timeout(20):
        assert os.WTERMSIG((await again.process.ended).wstatus) == signal.SIGKILL
    assert copy.oom_kills() >= 1
    assert (await copy.guest.ping()) is not None


async def test_what_copies_must_not_share_is_wiped(lab: Lab) -> None:
    """Memory that the kernel would wipe in a child is zeros in a restored copy, and is still wiped in its children."""
    handle = await lab.create()
    program = await lab.program(handle)
    await program.ask(handle.guest, "globals().__setitem__('area', wiped())")
    assert await program.ask(handle.guest, "bytes(area[:4])") == b"seed"
    memory = await lab.dump(handle, "wiped")
    copy = await lab.restore("sb_copy", memory, cut="wiped")
    again = await lab.again(copy, "program", program.mark)
    assert await again.ask(copy.guest, "bytes(area[:4])") == bytes(4)
    await again.ask(copy.guest, "area.__setitem__(slice(0, 4), b'next')")
    in_child = "(lambda pid: os._exit(any(area[:4])) if pid == 0 else os.waitpid(pid, 0)[1])(os.fork())"
    assert await again.ask(copy.guest, in_child) == 0
    assert await again.ask(copy.guest, "bytes(area[:4])") == b"next"


async def test_a_capable_root_is_no_more_and_no_less_so(lab: Lab) -> None:
    """The capabilities that a build's root has are there again, and no others, for it and for what it starts."""
    handle = await lab.create(root="capable")
    program = await lab.start(handle, "program", ["/usr/bin/python3", "-c", PROGRAM], user="root")
    seen = await program.ask(handle.guest, STATUS)
    assert int(seen[2], 16) != 0
    memory = await lab.dump(handle, "capable")
    copy = await lab.restore("sb_copy", memory, cut="capable", root="capable")
    again = await lab.again(copy, "program", program.mark)
    assert await again.ask(copy.guest, STATUS) == seen
    assert await again.ask(copy.guest, "os.chown('/tmp', 1000, 1000)") is None
    fresh = await lab.start(copy, "fresh", ["/bin/grep", "CapBnd", "/proc/self/status"], user="root")
    assert (await fresh.reader.line()).split()[1] == seen[2]


async def test_a_restore_that_fails_leaves_nothing(lab: Lab) -> None:
    """A damaged image, a missing one, and one that CRIU is killed over: no sandbox, group, mount or process remains."""
    handle = await lab.create()
    program = await lab.program(handle)
    await program.ask(handle.guest, "count()")
    target, record = await lab.dump(handle, "whole")
    image = next((target / "criu").glob("core-1.img"))
    content = image.read_bytes()
    image.write_bytes(content[:40])
    with pytest.raises(BootFailed):
        await lab.restore("sb_damaged", (target, record), cut="whole")
    image.write_bytes(content)
    with open(target / "criu" / "complete", "w") as pages:  # which CRIU waits for: it is not done before it is killed
        fcntl.flock(pages, fcntl.LOCK_EX)
        restoring = asyncio.create_task(lab.restore("sb_killed", (target, record), cut="whole"))
        await lab.kill_criu("sb_killed", b"--restore-detached")
        with pytest.raises(BootFailed):
            await restoring
    for path in (target / "criu").glob("userns-*.img"):
        path.rename(target / "userns")
    with pytest.raises(SnapshotCorrupt):
        await lab.restore("sb_missing", (target, record), cut="whole")
    assert lab.cgroups() == []
    assert await lab.backend.found() == []


async def test_a_dump_whose_criu_is_killed_ends_the_sandbox(lab: Lab) -> None:
    """What its processes are then nobody knows: it is lost, and says so, rather than going on."""
    handle = await lab.create()
    program = await lab.program(handle)
    assert await program.ask(handle.guest, "count()") == 1
    for number in range(DUMPS_MAX):
        dump = asyncio.create_task(lab.dump(handle, f"killed-{number}", keep=True))
        killing = asyncio.create_task(lab.kill_criu("sb_one.criu", b"--tree"))
        await asyncio.wait({dump, killing}, return_when=asyncio.FIRST_COMPLETED)
        try:
            await dump  # it may have been done before it was killed: then all goes on
        except InitDied:
            await killing
            break
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)
    async with asyncio.timeout(20):
        await handle.ended
    assert not (lab.state_dir / f"memory-killed-{number}").exists()


async def test_a_node_that_dies_over_a_dump_loses_nothing(lab: Lab) -> None:
    """What it had asked for comes to its end without it; the next one waits for that, and the sandbox goes on."""
    handle = await lab.create()
    program = await lab.program(handle)
    assert await program.ask(handle.guest, "count()") == 1
    dump = asyncio.create_task(lab.dump(handle, "orphan", keep=True))
    await lab.reached("sb_one.criu", b"--tree")
    await lab.restart()
    with pytest.raises(BarchanError):
        await dump
    assert await lab.backend.found() == ["sb_one"]
    adopted = await lab.adopt("sb_one")
    again = await lab.again(adopted, "program", program.mark)
    assert await again.ask(adopted.guest, "count()") == 2


@pytest.mark.requires("slirp4netns")
async def test_a_start_that_is_no_program_yet_is_waited_for(lab: Lab) -> None:
    """Stopped in between, it would keep the init's connection open, and nothing could be made of it."""
    handle = await lab.create()
    tree = Path(f"/sys/fs/cgroup/unified{Path(f'/proc/{handle.pid}/cgroup').read_text().split('0::')[1].strip()}")
    for number in range(12):
        names = [f"p{number}-{one}" for one in range(AT_ONCE)]
        await asyncio.gather(*(lab.start(handle, name, ["/bin/sleep", "100"], wire.StartFlag(0)) for name in names))
        await handle.freeze()
        stopped = [pid for group in (tree / "guest").rglob("cgroup.procs") for pid in group.read_text().split()]
        assert [Path(f"/proc/{pid}/comm").read_text() for pid in stopped] == ["sleep\n"] * AT_ONCE * (number + 1)
        await handle.thaw(0.0)


async def test_an_open_network_is_a_new_one(lab: Lab) -> None:
    """Its namespace is handed over as that of a new sandbox is, and it can be connected."""
    handle = await lab.create(network="open")
    program = await lab.program(handle)
    memory = await lab.dump(handle, "open")
    copy = await lab.restore("sb_copy", memory, cut="open", network="open")
    assert copy.netns is not None
    again = await lab.again(copy, "program", program.mark)
    async with OpenNetwork(copy.netns):
        assert "tap0" in await again.ask(copy.guest, "[name for _, name in socket.if_nameindex()]")
        assert await again.ask(copy.guest, "called()[0]") == b"over tcp"


async def test_a_proxy_is_there_again_and_an_open_connection_through_it_refuses(lab: Lab) -> None:
    """A copy has a listener of its own; a connection that leaves the sandbox is named."""
    handle = await lab.create(network="allow", allow_hosts=("example.org",))
    program = await lab.program(handle)
    assert handle.listener is not None
    await program.ask(handle.guest, "globals().__setitem__('out', socket.create_connection(('127.0.0.1', 3128)))")
    with pytest.raises(NotSnapshotable, match="the proxy"):
        await lab.dump(handle, "refused")
    await handle.thaw(0.0)
    await program.ask(handle.guest, "out.close()")
    handle.listener.setblocking(False)
    loop = asyncio.get_running_loop()
    (await loop.sock_accept(handle.listener))[0].close()
    memory = await lab.dump(handle, "proxied")
    copy = await lab.restore("sb_copy", memory, cut="proxied", network="allow", allow_hosts=("example.org",))
    assert copy.listener is not None
    copy.listener.setblocking(False)
    again = await lab.again(copy, "program", program.mark)
    await again.ask(copy.guest, "globals().__setitem__('out', socket.create_connection(('127.0.0.1', 3128)))")
    (await loop.sock_accept(copy.listener))[0].close()
