"""The network of a sandbox with `network="open"`: user-mode networking by slirp4netns, one process per sandbox.

The sandbox's network namespace belongs to the host's user namespace, so the guest can change nothing in it. It reaches
what the host reaches, through connections that slirp4netns makes on the host; it does not reach the host's loopback,
nor the addresses where clouds give their machines credentials.
"""

import asyncio
import ctypes
import errno
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
from ipaddress import IPv4Network
from pathlib import Path
from typing import Self

from barchan.core.egress import METADATA_NETWORKS
from barchan.errors import BackendError, RequirementMissing

RESOLV_CONF = b"nameserver 10.0.2.3\n"  # slirp4netns passes what is asked there on to the host's own resolver
PROGRAM = "slirp4netns"
READY_S = 10.0
_MESSAGES_BYTES_MAX = 4096

_CLONE_NEWNET = 0x40000000
_RTM_NEWROUTE, _RTA_DST, _RTN_PROHIBIT = 24, 1, 8
_REQUEST_ACK_CREATE_EXCL = 0x1 | 0x4 | 0x400 | 0x200
_TABLE_MAIN, _PROTOCOL_STATIC = 254, 4


class OpenNetwork:
    """Connects a network namespace while its context is entered. The descriptor stays the caller's.

    The process ends with the node, however that ends: it watches a pipe that only the node holds open. A node that
    finds its sandboxes again enters a new `OpenNetwork` for each.
    """

    def __init__(self, netns_fd: int) -> None:
        self._netns_fd = netns_fd
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_pipe = -1
        self._messages = b""
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Start, and wait until the interface is up.

        Raises:
            RequirementMissing: slirp4netns or /dev/net/tun is missing.
            BackendError: It did not come up; the message has its own words.
        """
        program = _find_program()
        _prohibit(self._netns_fd, METADATA_NETWORKS)
        ready = self._start(program)
        try:
            await self._wait_ready(ready)
        except BaseException:
            await self._stop()
            raise
        finally:
            os.close(ready)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stop()

    async def wait_ended(self) -> str:
        """Wait until the process ends by itself or by leaving the context; returns its last words."""
        await self._ended.wait()
        return self._messages.decode("utf-8", "replace").strip()

    def _start(self, program: str) -> int:
        """Start the process and watch it. Returns the reading end of its ready pipe."""
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        exit_read, self._exit_pipe = os.pipe2(os.O_CLOEXEC)
        argv = [
            program, "--configure", "--mtu=65520", "--disable-host-loopback", "--enable-sandbox", "--enable-seccomp",
            f"--ready-fd={ready_write}", f"--exit-fd={exit_read}",
            "--netns-type=path", f"/proc/self/fd/{self._netns_fd}", "tap0",
        ]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", bufsize=0,
                pass_fds=(ready_write, exit_read, self._netns_fd), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.close(ready_read)
            os.close(self._exit_pipe)
            self._ended.set()
            raise BackendError(f"{PROGRAM} can't be started: {error.strerror}") from error
        finally:
            os.close(ready_write)
            os.close(exit_read)
        self._watch(self._process)
        return ready_read

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        assert process.stderr is not None
        stderr = process.stderr.fileno()
        os.set_blocking(stderr, False)
        loop.add_reader(stderr, self._read_messages, process)
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, self._reap, process, pidfd)

    def _read_messages(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        try:
            words = os.read(process.stderr.fileno(), _MESSAGES_BYTES_MAX)
        except BlockingIOError:
            return
        self._messages = (self._messages + words)[-_MESSAGES_BYTES_MAX:]
        if not words:
            asyncio.get_running_loop().remove_reader(process.stderr.fileno())

    def _reap(self, process: subprocess.Popen[bytes], pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        process.wait()
        self._read_messages(process)
        assert process.stderr is not None
        loop.remove_reader(process.stderr.fileno())
        process.stderr.close()
        self._ended.set()

    async def _wait_ready(self, ready: int) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(ready, readable.set)
        try:
            async with asyncio.timeout(READY_S):
                await readable.wait()
        except TimeoutError as error:
            raise BackendError(f"{PROGRAM} did not come up in {READY_S:g} s") from error
        finally:
            loop.remove_reader(ready)
        if not os.read(ready, 1):
            await self._ended.wait()
            words = self._messages.decode("utf-8", "replace").strip()
            raise BackendError(f"{PROGRAM} did not come up: {words[-400:]}")

    async def _stop(self) -> None:
        """Kill and reap. Cancelled, it leaves the reaping to the loop, which does it in any case."""
        assert self._process is not None
        if self._exit_pipe >= 0:
            os.close(self._exit_pipe)
            self._exit_pipe = -1
        if not self._ended.is_set():
            self._process.send_signal(signal.SIGKILL)
        await self._ended.wait()


def _find_program() -> str:
    program = shutil.which(PROGRAM)
    if program is None:
        raise RequirementMissing(f"{PROGRAM} is not installed: apt-get install {PROGRAM}", program=PROGRAM)
    if not Path("/dev/net/tun").exists():
        raise RequirementMissing("/dev/net/tun is missing: modprobe tun", device="/dev/net/tun")
    return program


def _prohibit(netns_fd: int, networks: tuple[IPv4Network, ...]) -> None:
    """Add a route of kind `prohibit` for each network (rtnetlink(7)); repeating is fine."""
    with _netlink_inside(netns_fd) as netlink:
        for network in networks:
            route = struct.pack("=8BI", socket.AF_INET, network.prefixlen, 0, 0, _TABLE_MAIN, _PROTOCOL_STATIC, 0,
                                _RTN_PROHIBIT, 0)  # fmt: skip
            body = route + struct.pack("=HH", 8, _RTA_DST) + network.network_address.packed
            netlink.send(struct.pack("=IHHII", 16 + len(body), _RTM_NEWROUTE, _REQUEST_ACK_CREATE_EXCL, 1, 0) + body)
            (negative_errno,) = struct.unpack_from("=i", netlink.recv(4096), 16)
            if negative_errno not in (0, -errno.EEXIST):
                raise BackendError(f"no route can be added in the sandbox: {os.strerror(-negative_errno)}")


def _netlink_inside(netns_fd: int) -> socket.socket:
    """A netlink socket of another network namespace: it stays where it was made, so a thread goes there to make it."""
    libc = ctypes.CDLL(None, use_errno=True)
    made: list[socket.socket | int] = []

    def make() -> None:
        if libc.setns(netns_fd, _CLONE_NEWNET):
            made.append(ctypes.get_errno())
        else:
            made.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE))

    thread = threading.Thread(target=make, name="netlink-inside")
    thread.start()
    thread.join()
    if isinstance(made[0], int):
        raise BackendError(f"the sandbox's network namespace can't be entered: {os.strerror(made[0])}")
    return made[0]
