"""Signal scopes, orphans, cgroups and backstops."""

import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guest.init.driver import ALL, GROUP, HOLD, MAIN, OTHERS, THAW, Connection, GuestReplyError
from tests.guest.init.guest import Guest, Leaf

pytestmark = [pytest.mark.requires("root", "static-libc", "cgroup1"), pytest.mark.timeout(60)]

# A main process with a child in its group, a child in a session of its own, and a daemon that has cut every tie.
FAMILY = (
    "sleep 1000 & setsid sleep 1001 & (setsid sh -c 'sleep 1002 & exec sleep 1003' &) ; "
    "sleep 0.2; echo ready; while :; do sleep 1; done"
)


def sleepers(guest: Guest) -> set[str]:
    found = set()
    for pid in guest.processes():
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0]
        except OSError:
            continue
        if argv[0] == b"sleep" and len(argv[1]) == 4 and state != "Z":
            found.add(argv[1].decode())
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


Contained = tuple[Connection, Leaf, Guest]


def start_family(contained: Contained) -> int:
    connection, _, guest = contained
    handle, _, _ = connection.start("family", ["sh", "-c", FAMILY])
    connection.wait_until(handle, b"ready")
    assert sleepers(guest) == {"1000", "1001", "1002", "1003"}
    return handle


def test_group_scope(contained: Contained) -> None:
    """Scope 0 reaches the process group alone."""
    connection, _, guest = contained
    handle = start_family(contained)
    assert connection.signal(handle, signal.SIGKILL, GROUP) == 1
    assert connection.wait_exit(handle).code == -signal.SIGKILL
    wait_for(lambda: sleepers(guest) == {"1001", "1002", "1003"}, "the group should be gone and nothing else")


def test_group_scope_after_the_end(contained: Contained) -> None:
    """The group of an ended process is still reached, by its members' cgroup."""
    connection, _, guest = contained
    handle, _, _ = connection.start("g", ["sh", "-c", "sleep 1000 & setsid sleep 1001 & sleep 0.1; exit 0"])
    connection.wait_exit(handle)
    assert sleepers(guest) == {"1000", "1001"}
    assert connection.signal(handle, signal.SIGTERM, GROUP) == 1
    wait_for(lambda: sleepers(guest) == {"1001"}, "the member of the group should be gone")


def test_main_scope(contained: Contained) -> None:
    """Scope 1 reaches the main process alone; once it is gone, nothing."""
    connection, _, guest = contained
    handle = start_family(contained)
    assert connection.signal(handle, signal.SIGKILL, MAIN) == 1
    connection.wait_exit(handle)
    assert connection.signal(handle, signal.SIGKILL, MAIN) == 0
    assert sleepers(guest) == {"1000", "1001", "1002", "1003"}


def test_others_scope(contained: Contained) -> None:
    """Scope 3 spares the main process."""
    connection, _, guest = contained
    handle = start_family(contained)
    assert connection.signal(handle, signal.SIGKILL, OTHERS) >= 4
    wait_for(lambda: sleepers(guest) == set(), "everything but the main process should be gone")
    assert connection.ping()["running"] == 1
    assert connection.signal(handle, signal.SIGTERM, MAIN) == 1
    assert connection.wait_exit(handle).code == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_scope(contained: Contained, number: signal.Signals) -> None:
    """Scope 2 reaches every process of the start, a daemon that double-forked into another session too."""
    connection, _, guest = contained
    handle = start_family(contained)
    assert connection.signal(handle, number, ALL) >= 5
    assert connection.wait_exit(handle).code == -number
    wait_for(lambda: sleepers(guest) == set(), "nothing of the start should be left")


def test_all_scope_after_the_end(contained: Contained) -> None:
    """It also reaches what a start left behind, and nothing of another start."""
    connection, _, guest = contained
    other, _, _ = connection.start("other", ["sleep", "2000"])
    handle, _, _ = connection.start("d", ["sh", "-c", "(setsid sleep 1002 &); sleep 0.1"])
    connection.wait_exit(handle)
    assert sleepers(guest) == {"1002", "2000"}
    assert connection.signal(handle, signal.SIGKILL, ALL) == 1
    wait_for(lambda: sleepers(guest) == {"2000"}, "the daemon should be gone, and only it")
    assert connection.signal(other, 0, ALL) == 1


def test_all_scope_right_after_start(contained: Contained) -> None:
    """A SIGKILL that overtakes the fork leaves nothing alive either."""
    connection, _, guest = contained
    for i in range(50):
        handle, _, _ = connection.start(f"r{i}", ["sh", "-c", "sleep 1000 & sleep 1000 & wait"], flags=0)
        connection.signal(handle, signal.SIGKILL, ALL)
        connection.follow(handle)
        connection.wait_exit(handle)
    wait_for(lambda: sleepers(guest) == set(), "survivors")


def test_fork_bomb_dies_at_once(contained: Contained) -> None:
    """Scope 2 with SIGKILL ends what forks faster than anyone can scan."""
    connection, leaf, guest = contained
    (leaf.v1("pids") / "pids.max").write_text("200")
    handle, _, _ = connection.start("bomb", ["sh", "-c", "f() { f | f & f; }; echo ready; f"], flags=16 | 32)
    time.sleep(0.5)
    connection.signal(handle, signal.SIGKILL, ALL)
    wait_for(lambda: guest.processes() == [], "the bomb should be gone")


def test_scopes_without_a_cgroup(connection: Connection, guest: Guest) -> None:
    """Without a v2 leaf scope 2 reaches session, group and descendants."""
    script = "sleep 1000 & sh -c 'sleep 1001 & setsid sleep 1002; :' & sleep 0.2; echo ready; wait"
    handle, _, _ = connection.start("f", ["sh", "-c", script])
    connection.wait_until(handle, b"ready")
    assert sleepers(guest) == {"1000", "1001", "1002"}
    assert connection.signal(handle, signal.SIGKILL, ALL) >= 5
    connection.wait_exit(handle)
    wait_for(lambda: sleepers(guest) == set(), "nothing of the start should be left")


def test_bad_signals_are_refused(connection: Connection) -> None:
    """A number beyond 64, a scope beyond 3 and an unknown handle are errors; a signal to the dead is not."""
    handle, _, _ = connection.start("s", ["true"])
    connection.wait_exit(handle)
    for arguments, errno in (((handle, 65, 0), 22), ((handle, 9, 4), 22), ((99, 9, 0), 2)):
        with pytest.raises(GuestReplyError) as caught:
            connection.signal(*arguments)
        assert caught.value.errno == errno
    assert [connection.signal(handle, 9, scope) for scope in range(4)] == [0, 0, 0, 0]


def test_programs_run_in_their_leaf(contained: Contained) -> None:
    """Every hierarchy has the program in the guest leaf, in version 2 below it; a helper stays beside the init."""
    connection, leaf, _ = contained
    rows = connection.run(["cat", "/proc/self/cgroup"]).out.decode().splitlines()
    places = dict(row.split(":", 2)[1:] for row in rows)
    assert [places[name] for name in ("memory", "pids", "cpu")] == [f"/{leaf.name}"] * 3
    assert places[""] == f"/{leaf.name}/guest/p1"
    rows = connection.applet("read", "/proc/self/cgroup", "0", "-1").out.decode().splitlines()
    places = dict(row.split(":", 2)[1:] for row in rows)
    assert places[""] == f"/{leaf.name}" and places["pids"] != f"/{leaf.name}"


def test_cgroups_are_removed(contained: Contained) -> None:
    """The cgroup of a start goes with it; one that background children hold goes after the last of them."""
    connection, leaf, _ = contained
    for i in range(20):
        connection.run(["true"], process_id=f"t{i}")
    keeper, _, _ = connection.start("keeper", ["sh", "-c", "sleep 1000 & exit"])
    connection.wait_exit(keeper)
    assert [path.name for path in leaf.guest.iterdir() if path.is_dir()] == [f"p{keeper}"]
    connection.signal(keeper, signal.SIGKILL, ALL)
    wait_for(lambda: not [path for path in leaf.guest.iterdir() if path.is_dir()], "the last cgroup should go")


def test_start_works_at_the_pids_limit(contained: Contained) -> None:
    """With the guest's processes exhausted an exec of one program still works, and so do helpers, ping and kill."""
    connection, leaf, guest = contained
    hog, _, _ = connection.start("hog", ["sh", "-c", "sleep 1000 & sleep 1001 & echo ready; wait"])
    connection.wait_until(hog, b"ready")
    (leaf.v1("pids") / "pids.max").write_text("3")
    assert connection.run(["echo", "hi"]).out == b"hi\n"
    assert connection.sh("true | true").code != 0
    assert connection.applet("read", "/etc/hostname", "0", "-1").code == 0
    assert connection.signal(hog, signal.SIGKILL, ALL) == 3
    wait_for(lambda: guest.processes() == [], "the hog should be gone")


def test_memory_exhaustion_is_a_value(contained: Contained) -> None:
    """A program beyond the guest's memory is killed; the init and its helpers go on."""
    connection, leaf, _ = contained
    (leaf.v1("memory") / "memory.limit_in_bytes").write_text(str(32 << 20))
    output = connection.run(["/usr/bin/python3", "-SIc", "a = bytearray(256 << 20)"])
    assert output.code == -signal.SIGKILL
    assert "oom_kill 1" in (leaf.v1("memory") / "memory.oom_control").read_text()
    assert connection.applet("read", "/etc/passwd", "0", "-1").code == 0
    assert connection.run(["true"]).code == 0


def test_a_lost_leaf_fails_closed(make_guest: Callable[..., Guest]) -> None:
    """A program that can't join its leaf does not run at all."""
    connection = make_guest().connect()
    read_only = os.open("/dev/null", os.O_RDONLY)
    connection.hello([(0, [read_only], None)])
    os.close(read_only)
    output = connection.run(["echo", "outside"])
    assert (output.code, output.out) == (126, b"") and b"cgroup" in output.err


def test_platform_leaf(make_guest: Callable[..., Guest], leaf: Leaf) -> None:
    """A platform start runs in the second leaf, given later by another HELLO; guest starts stay in the first."""
    guest = make_guest(cgroup=leaf.base)
    platform = leaf.base / "platform"
    platform.mkdir()
    for path in (platform, platform / "cgroup.procs"):
        os.chown(path, 65535, 65535)
    connection = guest.connect()
    directory = os.open(platform, os.O_RDONLY)
    with leaf.descriptors() as (procs, guest_directory):
        connection.hello([(0, procs, guest_directory)])
        connection.hello([(1, [], directory), (0, procs, guest_directory)])
    os.close(directory)
    row = connection.run(["grep", "^0::", "/proc/self/cgroup"], flags=16 | 8).out.decode().strip()
    assert row == f"0::/{leaf.name}/platform/p1"
    row = connection.run(["grep", "^0::", "/proc/self/cgroup"]).out.decode().strip()
    assert row == f"0::/{leaf.name}/guest/p2"
    guest.close()
    platform.rmdir()


def test_detach_gives_descriptors_back(contained: Contained) -> None:
    """DETACH ends the connection and closes every leaf; what runs goes on, and the next HELLO finds it."""
    connection, leaf, guest = contained
    handle, _, _ = connection.start("d", ["sh", "-c", "sleep 0.3; echo after"], flags=0)
    assert sum(leaf.name in path for path in guest.descriptors()) == 4
    connection.request(14)
    assert connection.socket.recv(1) == b""
    assert not [path for path in guest.descriptors() if leaf.name in path]
    again = guest.connect()
    with leaf.descriptors() as (procs, directory):
        assert again.hello([(0, procs, directory)]) == (1, 1)
    again.follow(handle)
    assert again.wait_exit(handle).out == b"after\n"
    assert again.run(["true"]).code == 0
    wait_for(lambda: not [path for path in leaf.guest.iterdir() if path.is_dir()], "cgroups should go")


def test_a_thousand_orphans(connection: Connection, guest: Guest) -> None:
    """Orphans are reaped as they end: none is left, and each is counted."""
    script = "i=0; while [ $i -lt 1000 ]; do (sh -c ':' &); i=$((i+1)); done; echo done"
    output = connection.sh(script)
    assert output.out == b"done\n"
    wait_for(lambda: guest.processes() == [], "orphans are left")
    wait_for(lambda: connection.ping()["orphans_reaped"] >= 1000, "orphans are not counted")


def test_backstop(contained: Contained) -> None:
    """Past its backstop every process of a start is killed, and no other."""
    connection, _, guest = contained
    other, _, _ = connection.start("other", ["sleep", "2000"])
    started = time.monotonic()
    handle, _, _ = connection.start("late", ["sh", "-c", "setsid sleep 1000 & sleep 1001"], backstop_ms=300)
    assert connection.wait_exit(handle).code == -signal.SIGKILL
    assert time.monotonic() - started > 0.25
    wait_for(lambda: sleepers(guest) == {"2000"}, "only the other start should be left")
    assert connection.signal(other, 0, MAIN) == 1


def test_hold_stops_backstops_until_the_thaw(connection: Connection) -> None:
    """A backstop that would be due while they are held fires after it, by what was left of it."""
    handle, _, _ = connection.start("held", ["sleep", "1000"], backstop_ms=300)
    connection.request(HOLD)
    connection.request(HOLD)
    time.sleep(0.6)
    assert connection.ping()["running"] == 1
    connection.request(THAW, struct.pack("<Q", 600_000_000))
    output = connection.wait_exit(handle)
    assert output.code == -signal.SIGKILL
    assert 0.85e9 < output.exit["ended_ns"] - output.exit["started_ns"] < 5e9


def test_thaw_moves_backstops(connection: Connection) -> None:
    """Time in which the sandbox was frozen does not count against a backstop."""
    handle, _, _ = connection.start("late", ["sleep", "1000"], backstop_ms=300)
    connection.request(THAW, struct.pack("<Q", 700_000_000))
    time.sleep(0.6)
    assert connection.ping()["running"] == 1
    output = connection.wait_exit(handle)
    assert output.code == -signal.SIGKILL
    assert 0.95e9 < output.exit["ended_ns"] - output.exit["started_ns"] < 5e9
