"""How it all ends: the node gone, signals, kills, a second start; nothing may be left in any case."""

import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guest.supervisor.driver import Client, RefusedError, Sandbox, Supervisor

pytestmark = [pytest.mark.requires("root", "static-libc", "mkfs.btrfs", "cgroup"), pytest.mark.timeout(120)]


def gone(pidfd: int, timeout_s: float = 10) -> bool:
    """Whether the process of this pidfd ends in time."""
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def busy(client: Client, count: int = 5) -> list[int]:
    """Sandboxes with a program running in each; pidfds of their inits."""
    for number in range(count):
        sandbox = client.create(f"box{number}")
        sandbox.connection.start("sleeper", ["sleep", "600"], user="0:0", env={"PATH": "/bin"})
    return [os.dup(sandbox.pidfd) for sandbox in client.sandboxes]


def close(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        os.close(pidfd)


def test_a_new_node_finds_what_the_old_one_left(supervisor: Supervisor) -> None:
    """Sandboxes and their programs outlive the node; what ended meanwhile is told after hello."""
    old = supervisor.connect()
    keeper, ender = old.create("keeper"), old.create("ender")
    keeper.connection.start("job", ["sleep", "600"], user="0:0", env={"PATH": "/bin"})
    old.socket.close()
    os.kill(ender.pid, signal.SIGKILL)
    assert gone(ender.pidfd)
    new = supervisor.connect()
    event = new.event()
    assert (event["id"], event["wstatus"]) == ("ender", str(int(signal.SIGKILL)))
    assert sorted(new.listed()) == ["ender", "keeper"]
    assert new.attach("keeper").connection.lookup("job")[2] is True


def started(client: Client, sandbox_id: str) -> Sandbox:
    """One that is being started, once it is up."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return client.attach(sandbox_id)
        except RefusedError as error:
            assert error.errno == errno.EAGAIN and time.monotonic() < deadline


def test_a_newer_connection_replaces_the_older(supervisor: Supervisor) -> None:
    """The older connection is closed; its requests in flight are carried out, and the newer one sees the result."""
    old = supervisor.connect()
    old.send_create("one")
    new = supervisor.connect()
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        while True:
            old.receive()
    assert new.listed() == ["one"]
    assert started(new, "one").text("echo here") == "here"


def test_without_a_node_everything_goes_after_the_grace(make_supervisor: Callable[[], Supervisor]) -> None:
    """With sandboxes it waits the whole grace, and a node that comes in time stops that."""
    supervisor = make_supervisor()
    assert supervisor.start(grace_s=3) == "ready"
    client = supervisor.connect()
    pidfds = busy(client)
    client.socket.close()
    time.sleep(1.5)
    client = supervisor.connect()
    time.sleep(2.5)
    assert not any(gone(pidfd, 0) for pidfd in pidfds)
    client.socket.close()
    assert 2.5 < supervisor.wait_gone() < 10
    assert all(gone(pidfd, 0) for pidfd in pidfds)
    close(pidfds)


def test_without_node_and_sandbox_it_goes_soon(supervisor: Supervisor) -> None:
    """An idle supervisor doesn't wait for the grace."""
    supervisor.connect().socket.close()
    assert supervisor.wait_gone() < 10


def test_before_the_first_node_it_waits(make_supervisor: Callable[[], Supervisor]) -> None:
    """A node that takes longer than the short wait to connect still finds its supervisor."""
    supervisor = make_supervisor()
    assert supervisor.start(grace_s=60) == "ready"
    time.sleep(3)
    assert supervisor.connect().listed() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_everything(supervisor: Supervisor, number: int) -> None:
    """TERM, INT and HUP remove all sandboxes and what the supervisor made."""
    pidfds = busy(supervisor.connect())
    supervisor.kill(number)
    supervisor.wait_gone()
    assert all(gone(pidfd, 0) for pidfd in pidfds)
    close(pidfds)
    assert supervisor.settle() == []


def test_shutdown_is_answered_when_nothing_is_left(supervisor: Supervisor) -> None:
    """The reply comes after the last sandbox, cgroup and the pool are gone."""
    client = supervisor.connect()
    pidfds = busy(client)
    client.request("shutdown")
    assert all(gone(pidfd, 0) for pidfd in pidfds)
    close(pidfds)
    assert (supervisor.cgroups(), supervisor.loop_devices()) == ([], [])
    supervisor.wait_gone()


def test_shutdown_during_starts(supervisor: Supervisor) -> None:
    """Creates in flight are refused or undone."""
    client = supervisor.connect()
    tags = [client.send_create(f"box{number}") for number in range(30)]
    client.request("shutdown")
    for tag in tags:
        try:
            client.wait(tag).close()
        except RefusedError as refused:
            assert refused.stage == "destroyed"
    supervisor.wait_gone()
    assert supervisor.settle() == []


def test_killed_it_takes_the_inits_along(supervisor: Supervisor, make_supervisor: Callable[[], Supervisor]) -> None:
    """No guest outlives a killed supervisor; the pool is gone by itself, and the next start removes the cgroups."""
    client = supervisor.connect()
    pidfds = busy(client)
    tags = [client.send_create(f"starting{number}") for number in range(20)]
    assert len(tags) == 20
    supervisor.kill(signal.SIGKILL)
    assert all(gone(pidfd) for pidfd in pidfds)
    close(pidfds)
    deadline = time.monotonic() + 10
    while supervisor.loop_devices():
        assert time.monotonic() < deadline
    assert supervisor.start() == "ready"
    assert supervisor.cgroup_leaves() == set()
    assert supervisor.connect().create("one").text("echo again") == "again"


def test_what_a_killed_one_left_goes_with_the_next_of_any_name(
    supervisor: Supervisor, make_supervisor: Callable[[], Supervisor]
) -> None:
    """Nobody may ever start one of its name again. Those of one that lives stay."""
    pidfds = busy(supervisor.connect())
    living, other = make_supervisor(), make_supervisor()
    assert living.start() == "ready"
    sandbox = living.connect().create("one")
    supervisor.kill(signal.SIGKILL)
    assert all(gone(pidfd) for pidfd in pidfds)
    close(pidfds)
    supervisor.wait_gone()
    assert other.start() == "ready"
    other.connect()
    assert supervisor.cgroups() == []
    assert sandbox.text("echo on") == "on"
    supervisor.path.unlink()


LIBC = ctypes.CDLL(None, use_errno=True)
PTRACE_CONT, PTRACE_DETACH, PTRACE_GETEVENTMSG, PTRACE_SEIZE = 7, 17, 0x4201, 0x4206
TRACE_CLONES = 0x8  # those whose end no signal tells, which is how a user namespace is made, and nothing else
CLONED = signal.SIGTRAP | 3 << 8
WALL = 0x40000000


def ptrace(request: int, pid: int, data: object = 0) -> None:
    if LIBC.ptrace(request, pid, ctypes.c_void_p(0), data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x}")


def test_killed_while_it_makes_a_user_namespace(supervisor: Supervisor) -> None:
    """The process that a namespace is made with goes too, and with it what it holds open: the pool's device."""
    client = supervisor.connect()
    ptrace(PTRACE_SEIZE, supervisor.pid, ctypes.c_void_p(TRACE_CLONES))
    client.send_create("one")
    while (status := os.waitpid(supervisor.pid, WALL)[1]) >> 8 != CLONED:
        assert os.WIFSTOPPED(status)
        ptrace(PTRACE_CONT, supervisor.pid, ctypes.c_void_p(os.WSTOPSIG(status)))
    maker = ctypes.c_ulong()
    ptrace(PTRACE_GETEVENTMSG, supervisor.pid, ctypes.byref(maker))
    supervisor.kill(signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(supervisor.pid, WALL)[1])
    os.waitpid(maker.value, WALL)
    ptrace(PTRACE_DETACH, maker.value)
    deadline = time.monotonic() + 30
    while supervisor.processes() or supervisor.loop_devices():
        assert time.monotonic() < deadline, supervisor.remains()
        time.sleep(0.01)
    assert supervisor.start() == "ready"
    supervisor.connect()


def test_a_name_in_use_is_refused(supervisor: Supervisor, make_supervisor: Callable[[], Supervisor]) -> None:
    """A second supervisor doesn't take a living one's cgroups for left-overs."""
    sandbox = supervisor.connect().create("one")
    second = make_supervisor()
    second.name = supervisor.name
    assert second.start() == "error cgroup name in use: Address already in use"
    assert sandbox.text("echo alive") == "alive"


def test_a_start_that_fails_says_why(make_supervisor: Callable[[], Supervisor], tmp_path: Path) -> None:
    """An init that isn't there is named on stdout, and nothing is left."""
    supervisor = make_supervisor()
    assert supervisor.start(init=tmp_path / "none") == "error init: No such file or directory"
    assert supervisor.settle() == []


def test_a_pool_that_cant_be_made_says_so(make_supervisor: Callable[[], Supervisor]) -> None:
    """A pool path in a directory that isn't there fails the start; cgroups and socket made before are removed."""
    supervisor = make_supervisor()
    pool = os.fspath(supervisor.directory / "none" / "pool")
    assert supervisor.start("--pool", pool) == "error pool: No such file or directory"
    assert supervisor.settle() == []


# Makes the directory again as soon as it is gone, and ends.
LATE = """
import os, sys, time
print("up", flush=True)
sys.stdin.read()
end = time.monotonic() + 0.5
while time.monotonic() < end:
    try:
        os.mkdir(sys.argv[1])
        break
    except FileExistsError:
        pass
os._exit(0)
"""


def test_a_late_process_of_a_start_leaves_no_cgroup(supervisor: Supervisor, client: Client) -> None:
    """One that is about to end may still make a version 1 leaf: they go after the group that holds such processes."""
    if client.hello()["cgroup"] == "v2":
        pytest.skip("there are no version 1 leaves")
    client.create("one")
    paths = [path / "one" for path in supervisor.cgroups() if (path / "one").is_dir()]
    (group,) = (path for path in paths if (path / "cgroup.kill").exists())
    (leaf,) = (path for path in paths if (path / "memory.limit_in_bytes").exists())
    for number in range(500):  # what the removal is busy with while that process ends
        (group / "guest" / f"more{number}").mkdir()
    command = [sys.executable, "-SIc", LATE, str(leaf)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as late:
        assert late.stdin is not None and late.stdout is not None
        (group / "cgroup.procs").write_text(str(late.pid))
        assert late.stdout.readline() == b"up\n"
        late.stdin.close()
        tag = client.send("destroy", id="one")
    client.wait(tag)
    assert supervisor.cgroup_leaves() == set()
