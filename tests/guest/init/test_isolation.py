"""What guest programs can't do to the init."""

import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guest.init.driver import RESEED, SETCLOCK, Connection, GuestReplyError
from tests.guest.init.guest import Guest

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(60)]

ATTACK = """
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, call):
    ctypes.set_errno(0)
    try:
        result = call()
        error = ctypes.get_errno() if result == -1 else None
    except OSError as failure:
        error = failure.errno
    print(name, "worked" if error is None else error)
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT):
    attempt(f"kill {int(number)}", lambda: os.kill(1, number))
attempt("ptrace", lambda: libc.ptrace(16, 1, 0, 0))
attempt("seize", lambda: libc.ptrace(0x4206, 1, 0, 0))
attempt("limits", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)))
attempt("read limits", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE))
attempt("affinity", lambda: os.sched_setaffinity(1, {0}))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
attempt("memory", lambda: os.close(os.open("/proc/1/mem", os.O_RDWR)))
attempt("environ", lambda: os.close(os.open("/proc/1/environ", os.O_RDONLY)))
attempt("descriptors", lambda: len(os.listdir("/proc/1/fd")))
attempt("open descriptor", lambda: os.close(os.open("/proc/1/fd/3", os.O_RDWR)))
attempt("root", lambda: len(os.listdir("/proc/1/root/")))
attempt("oom score", lambda: os.close(os.open("/proc/1/oom_score_adj", os.O_WRONLY)))
attempt("pidfd", lambda: os.close(libc.syscall(438, os.pidfd_open(1), 3, 0)))
vector = (ctypes.c_uint64 * 2)(ctypes.addressof(ctypes.create_string_buffer(8)), 8)
attempt("process_vm_readv", lambda: libc.process_vm_readv(1, vector, 1, vector, 1, 0))
"""


@pytest.mark.parametrize("user", ["", "65534:65534"], ids=["guest root", "another user"])
def test_a_guest_can_not_touch_the_init(make_guest: Callable[..., Guest], user: str) -> None:
    """Neither guest root nor anybody else can signal, trace, limit, read or write process 1."""
    guest = make_guest(first_uid=1_000_000)
    connection = guest.connect()
    connection.hello()
    output = connection.run(["/usr/bin/python3", "-SIc", ATTACK], user=user)
    assert output.err == b""
    results = dict(line.rsplit(" ", 1) for line in output.out.decode().splitlines())
    assert len(results) == 19 and {name: r for name, r in results.items() if r not in {"1", "13", "3", "9"}} == {}
    assert connection.ping()["total"] == 1


def test_a_guest_can_not_speak_to_the_init(connection: Connection, guest: Guest) -> None:
    """A connection from inside the pid namespace is closed unanswered, even when the socket can be reached."""
    for path in (guest.directory / "private", Path(guest.path)):
        path.chmod(0o777)
    speak = (
        "import socket, struct, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect(sys.argv[1])\n"
        "try:\n s.send(struct.pack('<IBBHI', 0, 2, 0, 0, 7)); print(s.recv(100))\n"
        "except (BrokenPipeError, ConnectionResetError): print(b'')"
    )
    for user in ("", "65534:65534"):
        output = connection.run(["/usr/bin/python3", "-SIc", speak, guest.path], user=user)
        assert (output.out, output.err) == (b"b''\n", b"")
    assert connection.run(["true"]).code == 0


def test_a_helper_can_not_be_read(connection: Connection, guest: Guest) -> None:
    """A helper holds a copy of the init's memory: its own user can't open it."""
    os.mkfifo(guest.work / "in")
    handle, pid, _ = connection.start("w", ["write", str(guest.work / "x"), "644", "0"], kind=1, flags=2)
    time.sleep(0.2)
    names = ("mem", "maps", "environ", "fd/0", "exe")
    script = "; ".join(f"if exec 9< /proc/{pid}/{name}; then echo {name} is open; fi" for name in names)
    output = connection.run(["bash", "-c", script])
    assert output.out == b"" and output.err.count(b"denied") == len(names)
    assert connection.stdin(handle, 0, b"", eof=True) == 0
    connection.follow(handle)
    assert connection.wait_exit(handle).code == 0


def test_a_helper_has_no_power(connection: Connection) -> None:
    """A helper uses files as the user and is nobody whom a guest's program may touch; it has no capability."""
    status = connection.applet("read", "/proc/self/status", "0", "-1", user="").out.decode()
    rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {rows[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (rows["Uid"], rows["Gid"], rows["Groups"].strip()) == ("65533\t65533\t65533\t0", "0\t0\t0\t0", "")
    listing = connection.applet("list", "/proc/self/fd", user="")
    assert listing.code == 0 and listing.out.count(b"pipe:") == 2


def test_the_init_keeps_little_power(connection: Connection, guest: Guest) -> None:
    """The init itself has an empty bounding and ambient set, and only what it uses to place and signal programs."""
    status = Path(f"/proc/{guest.pid}/status").read_text()
    rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert [int(rows[f"Cap{name}"], 16) for name in ("Bnd", "Amb", "Inh")] == [0, 0, 0]
    assert int(rows["CapEff"], 16) == (1 << 0) | (1 << 5) | (1 << 6) | (1 << 7)


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["program", "operation", "source"])
@pytest.mark.parametrize(
    "user",
    ["65536", "1048576:0", "0:65536", "far", "near:many", "ann", "root"],
    ids=lambda user: user.replace(":", "+"),
)
def test_nobody_has_an_id_beyond_a_sandbox_s(
    make_guest: Callable[..., Guest], accounts: dict[str, Path], user: str, kind: int
) -> None:
    """Neither by number nor by account files, as user, as group or as one beside it, where the kernel would let it."""
    accounts["/etc/passwd"].write_text(
        "root:x:1048576:1048576::/:/bin/sh\nfar:x:70000:5::/:/bin/sh\n"
        "near:x:65534:5::/:/bin/sh\nann:x:2001:2002::/:/bin/sh\n"
    )
    with accounts["/etc/group"].open("a") as groups:
        groups.write("many:x:70001:\nfar:x:4294967294:ann\n")
    connection = make_guest(binds=accounts).connect()
    connection.hello()
    output = connection.run(["stat", "/"], user=user, kind=kind)
    assert (output.code, output.out) == (126, b"")
    assert b"has an id above 65535" in output.err
    assert connection.run(["id", "-u"], user="near").out == b"65534\n"


CAPABLE = (0, 1, 3, 7, 18)  # CHOWN DAC_OVERRIDE FOWNER SETUID SYS_CHROOT


def caps(status: str) -> dict[str, int]:
    rows = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return {name: int(rows[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")}


def test_a_capable_root_has_what_the_init_was_told(make_guest: Callable[..., Guest]) -> None:
    """Its programs have those capabilities and can't take the platform's ids; other users have none; the init itself
    uses no more than before."""
    guest = make_guest(root_caps=CAPABLE)
    connection = guest.connect()
    connection.hello()
    given = sum(1 << cap for cap in CAPABLE)
    of_root = caps(connection.sh("cat /proc/self/status", user="").out.decode())
    assert of_root == {"Inh": 0, "Prm": given, "Eff": given, "Bnd": given, "Amb": 0}
    of_user = caps(connection.sh("cat /proc/self/status", user="65534").out.decode())
    assert of_user == {"Inh": 0, "Prm": 0, "Eff": 0, "Bnd": given, "Amb": 0}
    of_init = caps(Path(f"/proc/{guest.pid}/status").read_text())
    used = (1 << 0) | (1 << 5) | (1 << 6) | (1 << 7)
    assert of_init == {"Inh": 0, "Prm": used | given, "Eff": used, "Bnd": given, "Amb": 0}
    become = "import os\ntry: os.setuid(%d)\nexcept OSError as e: print(e.errno)\nprint(os.getuid())"
    for uid, told in ((65535, b"1\n0\n"), (65533, b"1\n0\n"), (65532, b"65532\n")):
        assert connection.run(["/usr/bin/python3", "-SIc", become % uid], user="").out == told


def test_a_helper_of_a_capable_root_reaches_every_file(make_guest: Callable[..., Guest]) -> None:
    """And nothing more: it is still nobody's process; one for another user has no capability."""
    guest = make_guest(root_caps=CAPABLE)
    connection = guest.connect()
    connection.hello()
    closed = guest.work / "closed"
    closed.mkdir(mode=0o700)
    os.chown(closed, 2001, 2001)
    assert connection.applet("write", str(closed / "x"), "600", "0", user="", stdin=b"root").code == 0
    assert connection.applet("list", str(closed), user="65534").code == 1
    status = connection.applet("read", "/proc/self/status", "0", "-1", user="").out.decode()
    expected = (1 << 1) | (1 << 3)
    assert caps(status) == {
        "Inh": 0,
        "Prm": expected,
        "Eff": expected,
        "Bnd": sum(1 << cap for cap in CAPABLE),
        "Amb": 0,
    }
    assert "Uid:\t65533\t65533\t65533\t0" in status


def test_the_init_dies_with_its_parent(make_guest: Callable[..., Guest]) -> None:
    """When the starter is gone the init and everything in the sandbox end."""
    guest = make_guest()
    connection = guest.connect()
    connection.hello()
    connection.start("s", ["sleep", "1000"])
    pids = [guest.pid, *guest.processes()]
    assert len(pids) == 2
    os.kill(guest.watcher, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    guest.expect_killed()


def test_descriptors_of_the_starter_do_not_leak(connection: Connection, guest: Guest) -> None:
    """The init holds what it was given and opened itself, nothing else the starter had open."""
    held = guest.descriptors()
    assert len(held) == 11 and sum(path.startswith("socket:") for path in held) == 2


def test_reseed(connection: Connection) -> None:
    """Entropy goes to the device; too much of it is refused."""
    connection.request(RESEED, struct.pack("<I", 32) + os.urandom(32))
    with pytest.raises(GuestReplyError) as caught:
        connection.request(RESEED, struct.pack("<I", 5000) + bytes(5000))
    assert caught.value.errno == 22


def test_reseed_of_a_false_device(make_guest: Callable[..., Guest], tmp_path: Path) -> None:
    """What the guest put in the device's place gets nothing."""
    false = tmp_path / "false"
    false.write_bytes(b"")
    false.chmod(0o666)
    connection = make_guest(binds={"/dev/urandom": false}).connect()
    with pytest.raises(GuestReplyError) as caught:
        connection.request(RESEED, struct.pack("<I", 32) + os.urandom(32))
    assert caught.value.errno == 19 and false.read_bytes() == b""


def test_setclock_without_privilege(connection: Connection) -> None:
    """Where the clock can't be set the answer says so."""
    with pytest.raises(GuestReplyError) as caught:
        connection.request(SETCLOCK, struct.pack("<q", time.time_ns()))
    assert caught.value.errno == 1


def test_spool_files_have_no_name(connection: Connection, guest: Guest) -> None:
    """The spool directory stays empty: a guest that could see it would find nothing to delete or fill."""
    connection.run(["seq", "100000"])
    assert list(guest.spool.iterdir()) == []
    assert sum("deleted" in path for path in guest.descriptors()[3:]) == 1


def test_a_full_spool_disk_is_a_gap(make_guest: Callable[..., Guest], tmp_path: Path) -> None:
    """When the spool's disk is full, output is lost visibly and programs still end."""
    guest = make_guest(spool_disk_bytes=128 << 10)
    connection = guest.connect()
    connection.hello()
    handle, _, _ = connection.start("s", ["seq", "200000"], flags=0)
    deadline = time.monotonic() + 10
    while connection.ping()["running"]:
        assert time.monotonic() < deadline
    state = connection.follow(handle)
    output = connection.wait_exit(handle)
    assert output.code == 0 and state["stdout_head"] == output.exit["stdout_end"] == 1288895
    assert output.gaps == [(1, 0, 1288895)]


def test_unauthenticated_peers_do_not_disturb(connection: Connection, guest: Guest) -> None:
    """A peer that connects and goes, or never says a word, costs the host nothing but its own connection."""
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(guest.path)
    assert guest.connect().ping()["total"] == 0
