"""Network policies in real network namespaces: what a guest that has only loopback, or slirp4netns, really reaches."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from barchan.core.egress import Address, EgressEvent
from barchan.errors import BackendError, RequirementMissing
from barchan.node.egress import EgressProxy, proxy_env
from barchan.node.open_network import RESOLV_CONF, OpenNetwork

pytestmark = [pytest.mark.timeout(60), pytest.mark.requires("root")]

slirp = pytest.mark.skipif(
    shutil.which("slirp4netns") is None or not Path("/dev/net/tun").exists(),
    reason="no slirp4netns (Debian package slirp4netns) or no /dev/net/tun",
)
_CLONE_NEWNET = 0x40000000

# Runs in the guest's namespace: brings loopback up, listens like the supervisor, hands the listener over, and stays.
GUEST = textwrap.dedent(
    """
    import ctypes, fcntl, socket, struct, sys
    assert ctypes.CDLL(None).unshare(0x40000000) == 0
    with socket.socket() as control:
        fcntl.ioctl(control, 0x8914, struct.pack("16sH22x", b"lo", 1))
    listener = socket.create_server(("127.0.0.1", 3128))
    pipe = socket.socket(fileno=0)
    socket.send_fds(pipe, [b"x"], [listener.fileno()])
    listener.close()
    pipe.recv(1)
    """
)


class Guest:
    """A process in a network namespace of its own, with the descriptors a node would hold."""

    def __init__(self, pid: int, listener: socket.socket) -> None:
        self.pid = pid
        self.listener = listener
        self.netns_fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    async def run(self, *argv: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        """Run a program in the guest's network namespace."""
        process = await asyncio.create_subprocess_exec(
            "nsenter", f"--net=/proc/{self.pid}/ns/net", *argv, env={"PATH": os.environ["PATH"], **(env or {})},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode()

    async def python(self, source: str, *args: str) -> tuple[int, str]:
        return await self.run(sys.executable, "-I", "-S", "-c", textwrap.dedent(source), *args)


@pytest.fixture
def guest() -> Iterator[Guest]:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", GUEST], stdin=theirs.fileno())
    theirs.close()
    ours.settimeout(20)
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    made = Guest(process.pid, socket.socket(fileno=fds[0]))
    yield made
    os.close(made.netns_fd)
    made.listener.close()
    ours.close()
    process.wait(10)


@contextlib.asynccontextmanager
async def web(host: str) -> AsyncIterator[int]:
    """A server on the host that says who asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello " + head.split()[1])
        writer.close()

    server = await asyncio.start_server(serve, host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(0.02)


def host_address() -> str:
    """An address of this host that isn't loopback; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("the host has no address but loopback")
        return str(probe.getsockname()[0])


def helpers(parent: int | None = None) -> list[int]:
    """Living slirp4netns processes that this process, or `parent`, started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            comm, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if comm == "slirp4netns" and int(rest.split()[1]) == (parent or os.getpid()):
                found.append(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    """Whether a process is there, and not merely unreaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class TestAllow:
    async def test_only_the_listed_host_and_only_through_the_proxy(self, guest: Guest) -> None:
        """From a namespace with nothing but loopback, curl reaches the allowed server and no other."""
        events: list[EgressEvent] = []
        address = host_address()
        async with web(address) as allowed, web(address) as other:
            proxy = EgressProxy(guest.listener, (f"{address}:{allowed}",), events.append)
            async with proxy:
                env = proxy_env()
                got = await guest.run("curl", "-sS", f"http://{address}:{allowed}/a", env=env)
                assert got == (0, "hello /a")
                got = await guest.run("curl", "-sS", f"http://{address}:{other}/a", env=env)
                assert got == (0, f"port {other} of {address} is not in the sandbox's allow_hosts\n")
                code, _ = await guest.run("curl", "-sS", f"http://{address}:{allowed}/a")
                assert code == 7  # without the proxy: no route
        assert [event.outcome for event in events] == ["allowed", "denied"]

    async def test_the_hosts_loopback_is_not_the_guests(self, guest: Guest) -> None:
        """127.0.0.1 in a request means the node's, and is refused unless the list says so."""
        async with web("127.0.0.1") as port, EgressProxy(guest.listener, ("example.org",), lambda event: None):
            status = "import socket,sys; s=socket.create_connection(('127.0.0.1',3128)); "
            status += "s.sendall(b'CONNECT 127.0.0.1:%d HTTP/1.1\\r\\n\\r\\n' % int(sys.argv[1])); print(s.recv(12))"
            assert await guest.python(status, str(port)) == (0, "b'HTTP/1.1 403'\n")

    async def test_an_address_of_the_host_itself_is_refused(self) -> None:
        """A name that leads to a public address of the node's own host is not the world outside."""
        libc = ctypes.CDLL(None)

        async def ask() -> bytes:
            listener = socket.create_server(("127.0.0.1", 3128))

            async def resolve(host: str, port: int) -> list[Address]:
                return [ip_address("93.184.216.34")]

            proxy = EgressProxy(listener, ("a.example",), lambda event: None, resolve=resolve)
            async with await asyncio.start_server(lambda r, w: w.close(), "93.184.216.34", 443), proxy:
                reader, writer = await asyncio.open_connection("127.0.0.1", 3128)
                writer.write(b"CONNECT a.example:443 HTTP/1.1\r\n\r\n")
                answer = await reader.read()
                writer.close()
                return answer

        def alone() -> bytes:
            assert libc.unshare(_CLONE_NEWNET) == 0  # of this thread
            for command in ("link set lo up", "address add 93.184.216.34/32 dev lo"):
                subprocess.run(["ip", *command.split()], check=True)
            return asyncio.run(ask())

        assert (await asyncio.to_thread(alone)).endswith(b"\r\n\r\na.example leads to this host itself\n")


CONNECT = """
    import socket, sys
    try:
        with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as s:
            s.sendall(b"GET /x HTTP/1.1\\r\\n\\r\\n")
            print(s.recv(100).partition(b"\\r\\n\\r\\n")[2].decode())
    except OSError as error:
        print(type(error).__name__, error.errno)
"""


@slirp
class TestOpen:
    async def test_the_world_but_not_the_hosts_loopback(self, guest: Guest) -> None:
        """What the host reaches is reachable; its loopback, and cloud metadata addresses, are not."""
        address = host_address()
        async with web(address) as port, web("127.0.0.1") as private, OpenNetwork(guest.netns_fd):
            assert await guest.python(CONNECT, address, str(port)) == (0, "hello /x\n")
            assert "hello" not in (await guest.python(CONNECT, "10.0.2.2", str(private)))[1]
            for metadata in ("169.254.169.254", "100.100.100.200"):
                assert await guest.python(CONNECT, metadata, "80") == (0, "PermissionError 13\n")
            assert RESOLV_CONF == b"nameserver 10.0.2.3\n"
            assert "10.0.2.3" not in (await guest.run("ip", "address"))[1]
            assert "10.0.2.0/24 dev tap0" in (await guest.run("ip", "route"))[1]
        assert "tap0" not in (await guest.run("ip", "link"))[1]

    async def test_leaving_leaves_nothing(self, guest: Guest) -> None:
        """Process, pipes and descriptors are gone after each of three rounds in the same namespace."""
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            async with OpenNetwork(guest.netns_fd):
                assert len(helpers()) == 1
            assert helpers() == []
            assert len(os.listdir("/proc/self/fd")) == before

    async def test_its_own_end_is_seen(self, guest: Guest) -> None:
        """A killed helper is reaped and reported, and leaving the context is still fine."""
        async with OpenNetwork(guest.netns_fd) as network:
            (pid,) = helpers()
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(network.wait_ended(), 5)
            assert helpers() == []

    async def test_a_cancelled_start_leaves_nothing(self, guest: Guest) -> None:
        """Cancelled at any moment, the helper is killed and reaped."""
        for delay in (0.0, 0.001, 0.005, 0.01, 0.02):
            starting = asyncio.create_task(OpenNetwork(guest.netns_fd).__aenter__())
            await asyncio.sleep(delay)
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await starting).__aexit__(None, None, None)
            for _ in range(100):
                if not helpers():
                    break
                await asyncio.sleep(0.02)
            assert helpers() == []

    async def test_a_killed_node_leaves_no_helper(self, guest: Guest) -> None:
        """SIGKILL of the node's process ends slirp4netns, whose pipe it held; a new node can connect again."""
        node = textwrap.dedent(
            """
            import asyncio, sys
            from barchan.node.open_network import OpenNetwork
            async def main():
                async with OpenNetwork(int(sys.argv[1])):
                    print("up", flush=True)
                    await asyncio.sleep(60)
            asyncio.run(main())
            """
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", node, str(guest.netns_fd), stdout=asyncio.subprocess.PIPE, pass_fds=[guest.netns_fd],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert process.stdout is not None
        assert await process.stdout.readline() == b"up\n"
        (helper,) = helpers(process.pid)
        process.kill()
        await process.wait()
        for _ in range(200):
            if not is_running(helper):
                break
            await asyncio.sleep(0.02)
        assert not is_running(helper)
        async with OpenNetwork(guest.netns_fd):
            assert "tap0" in (await guest.run("ip", "link"))[1]

    async def test_what_is_no_namespace_fails_with_words(self) -> None:
        """A wrong descriptor is an error that says so, and leaves no process."""
        with socket.socket() as wrong, pytest.raises(BackendError, match="network namespace"):
            await OpenNetwork(wrong.fileno()).__aenter__()
        assert helpers() == []

    async def test_a_namespace_that_has_it_already_fails_with_its_words(self, guest: Guest) -> None:
        """slirp4netns' own message reaches the caller."""
        async with OpenNetwork(guest.netns_fd):
            with pytest.raises(BackendError, match="Device or resource busy"):
                await OpenNetwork(guest.netns_fd).__aenter__()
            assert len(helpers()) == 1


async def test_a_missing_program_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the command."""
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RequirementMissing, match="apt-get install slirp4netns"):
        await OpenNetwork(0).__aenter__()
