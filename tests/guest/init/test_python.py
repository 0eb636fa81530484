"""Source for a warm interpreter: what its server gets, and what it can make of that. The test is the server."""

import array
import os
import secrets
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.guest.init.driver import FOLLOWED, NOBODY, STDIN_OPEN, Connection, Output
from tests.guest.init.guest import Guest, Leaf

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(60)]

PYTHON = 2
Contained = tuple[Connection, Leaf, Guest]


class Asked:
    """One start of source, as the server in the sandbox is asked to run it."""

    def __init__(self, connection: Connection, stack: ExitStack, source: bytes = b"source") -> None:
        name = f"barchan-test-{secrets.token_hex(8)}"
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(f"\0{name}")
        listener.listen()
        listener.settimeout(20)
        self.connection = connection
        self.handle, self.pid, _ = connection.start(name, [name, "one"], kind=PYTHON, user="", script=source)
        self.line = stack.enter_context(listener.accept()[0])
        space = socket.CMSG_LEN(16 * array.array("i").itemsize)
        self.text, ancillary, _, _ = self.line.recvmsg(4096, space)
        assert ancillary, connection.wait_exit(self.handle).err
        ((_, _, data),) = ancillary
        self.fds = list(array.array("i", data))
        for fd in self.fds:
            stack.callback(os.close, fd)

    def ask_to_join(self, *credentials: int) -> bytes:
        """What the process that stands for the program answers, when these are the sender's: pid, uid, gid."""
        with socket.socket(fileno=os.dup(self.fds[5])) as place:
            place.settimeout(20)
            sent = struct.pack("3i", *credentials)
            place.sendmsg([b"join"], [(socket.SOL_SOCKET, 2, sent)])  # SCM_CREDENTIALS; root may send others'
            return place.recv(100)

    def end(self, said: bytes = b"exit 3") -> Output:
        self.line.send(said)
        return self.connection.wait_exit(self.handle)


@contextmanager
def asked(connection: Connection, source: bytes = b"source") -> Iterator[Asked]:
    with ExitStack() as stack:
        yield Asked(connection, stack, source)


def pid_here(guest: Guest, pid: int) -> int:
    """The number outside of one of the guest's processes."""
    for found in guest.processes():
        if f"\t{pid}\n" in Path(f"/proc/{found}/status").read_text().partition("NSpid:")[2].partition("\n")[0] + "\n":
            return found
    raise AssertionError(f"the guest has no process {pid}")


def sleeper(connection: Connection, guest: Guest, name: str, user: str) -> int:
    """The number outside of a program that has joined its cgroup."""
    handle, number, _ = connection.start(name, ["sh", "-c", "echo up; exec sleep 600"], user=user)
    connection.wait_until(handle, b"up")
    return pid_here(guest, number)


def group_of(pid: int) -> str:
    """In the version 2 hierarchy."""
    return Path(f"/proc/{pid}/cgroup").read_text().partition("0::")[2].strip().rpartition("/")[2]


def test_a_server_gets_streams_source_and_request(connection: Connection) -> None:
    """Without a cgroup there is nothing else; the end is that of the program, and an empty source is one."""
    with asked(connection) as source:
        assert (source.text, len(source.fds)) == (b"run", 5)
        assert os.pread(source.fds[3], 100, 0) == b"source"
        os.write(source.fds[1], b"out")
        output = source.end()
        assert (output.out, output.code) == (b"out", 3)
    with asked(connection, b"") as empty:
        assert os.pread(empty.fds[3], 100, 0) == b""
        assert empty.end(b"signal 15").code == -signal.SIGTERM


def test_what_stands_for_source_keeps_nothing_of_the_init(connection: Connection, guest: Guest) -> None:
    """It holds its own alone, so that whoever waits for the end of another's stream sees it."""
    handle, _, _ = connection.start("cat", ["cat"], flags=FOLLOWED | STDIN_OPEN)
    with asked(connection) as source:
        folder = Path(f"/proc/{pid_here(guest, source.pid)}/fd")
        kinds = sorted(os.readlink(path).partition(":")[0] for path in folder.iterdir())
        assert kinds == ["anon_inode", "pipe", "socket"]  # signals, stderr, the server
        assert connection.stdin(handle, 0, b"in", eof=True) == 2
        assert connection.wait_exit(handle).out == b"in"
        source.end()


@pytest.mark.requires("cgroup")
def test_a_server_moves_its_own_processes_alone(contained: Contained) -> None:
    """It gets no file of a cgroup. One process of the same user may join; not what is where the init is, not a file
    operation, not another user's program, whatever number it sends, and not a second one."""
    connection, leaf, guest = contained
    own, inner, other = (sleeper(connection, guest, name, user) for name, user in (("a", ""), ("b", ""), ("c", NOBODY)))
    (leaf.base / "cgroup.procs").write_text(str(inner))  # where the init is
    _, number, _ = connection.start(
        "w", ["write", str(guest.work / "x"), "644", "0"], kind=1, flags=STDIN_OPEN, user=""
    )
    operation = pid_here(guest, number)
    before = {pid: group_of(pid) for pid in (own, other, operation, inner, guest.pid)}
    for pid, credentials in (
        (guest.pid, (guest.pid, 0, 0)),
        (operation, (operation, 0, 0)),
        (other, (other, 0, 0)),
        (other, (other, 65534, 65534)),
        (own, (own, 65534, 65534)),
        (inner, (inner, 0, 0)),
        (own, (own, 0, 0)),
    ):
        with asked(connection) as source:
            kinds = [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in source.fds]
            assert (len(kinds), kinds[5]) == (6, "socket")
            assert not any("cgroup" in kind for kind in kinds)
            answer = source.ask_to_join(*credentials)
            if credentials == (own, 0, 0):
                assert (answer, group_of(own)) == (b"go", group_of(pid_here(guest, source.pid)))
                with pytest.raises((BrokenPipeError, ConnectionResetError)):
                    source.ask_to_join(other, 0, 0)
            else:
                assert (answer, group_of(pid)) == (b"", before[pid])
            source.end()
    assert [group_of(pid) for pid in (other, operation, inner)] == [before[pid] for pid in (other, operation, inner)]
    for pid in (own, other, operation, inner):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("user", ["", "65534:65534"], ids=["guest root", "another user"])
def test_a_guest_can_not_touch_what_stands_for_source(connection: Connection, user: str) -> None:
    """It could choose the moment at which a number that it was sent is looked at."""
    with asked(connection) as source:
        script = (
            f"for s in STOP KILL CONT; do kill -$s {source.pid} 2>/dev/null && echo $s; done; renice 19 {source.pid}"
        )
        output = connection.run(["bash", "-c", script], user=user)
        assert (output.out, output.code) == (b"", 1)
        assert source.end().code == 3
