"""The node's end of the supervisor's socket, and of the reader's: requests and answers with descriptors."""

import array
import asyncio
import errno
import itertools
import os
import shutil
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from barchan.backends.container import background
from barchan.errors import (
    BackendError,
    BarchanError,
    BootFailed,
    CapacityError,
    ConnectionLost,
    NotFound,
    RequirementMissing,
)
from barchan.wire import supervisor as wire

REQUEST_TIMEOUT_S = 60.0
SOCKET = "supervisor.sock"
ORPHAN_GRACE_S = 30
POOL_SHARE = 0.5  # of the free disk; it takes a part of that at first, and more as it is used
POOL_MIB_MAX = 256 << 10
TRIES, TRY_AGAIN_S = 3, 0.5
_FULL = {os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT)}
_PASSING = {os.strerror(number) for number in (errno.EIO, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)}
BINARIES = Path(__file__).parents[2] / "_guest"


async def spawn(state_dir: Path, name: str, weaken: Sequence[str]) -> None:
    """Start the supervisor of a node, and wait until it listens.

    Raises:
        RequirementMissing: It did not come up, and never will; says why.
        CapacityError: The disk is full.
        BootFailed: It was killed, or the host lacked something for a moment, again and again.
    """
    for tries_left in reversed(range(TRIES)):
        try:
            return await _spawn(state_dir, name, weaken)
        except BootFailed:
            if not tries_left:
                raise
        await asyncio.sleep(TRY_AGAIN_S)


async def _spawn(state_dir: Path, name: str, weaken: Sequence[str]) -> None:
    free_mib = shutil.disk_usage(state_dir).free >> 20
    log = state_dir / "supervisor.log"
    line = await background.start(
        (
            BINARIES / "barchan-supervisor",
            *("--socket", state_dir / SOCKET),
            *("--pool", state_dir / "pool.img"),
            *("--pool-mib", str(min(POOL_MIB_MAX, max(1024, int(free_mib * POOL_SHARE))))),
            *("--cgroup", name),
            *("--init", BINARIES / "barchan-init"),
            *("--orphan-grace-s", str(ORPHAN_GRACE_S)),
            *("--log", log),
            *(f"--{protection}" for protection in weaken),
        )
    )
    if line != "ready":
        raise _refusal(line, log)


def _refusal(line: str, log: Path) -> BarchanError:
    """What its one line, `error STEP: REASON`, comes to."""
    reason, told = line.rpartition(": ")[2], f"the supervisor did not start: {line}; see {log}"
    if reason in _FULL:
        return CapacityError(f"{told} (try: free some of the disk of the state directory)", retry_after_ms=1000)
    return BootFailed(told) if reason in _PASSING else RequirementMissing(told)


class Answer:
    """A reply and the descriptors that came with it; whoever takes it owns them."""

    def __init__(self, message: wire.Message, fds: list[int]) -> None:
        self.message = message
        self.fds = fds

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def take_connection(self) -> tuple[socket.socket, int | None]:
        """The connection to the init and the network's descriptor, if there is one; the supervisor minds the pidfd."""
        if not self.fds:
            raise BackendError("the supervisor sent no connection")
        sock = socket.socket(fileno=self.fds.pop(0))
        sock.setblocking(False)
        network_fd = self.fds.pop() if len(self.fds) > 1 else None
        self.close()
        return sock, network_fd


class SupervisorClient:
    """One connection to the supervisor, or to the `peer` that speaks as it does.

    Args:
        on_event: Called for each message that answers no request.
        failure: Makes an exception of an operation and its `error` answer.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_event: Callable[[wire.Message], None],
        peer: str = "supervisor",
        failure: Callable[[str, wire.Message], Exception] | None = None,
    ) -> None:
        self._sock = sock
        self._on_event = on_event
        self._peer = peer
        self._failure = failure or _failure
        self._tags = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._is_ending = False
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    @classmethod
    def connect(
        cls,
        path: Path,
        on_event: Callable[[wire.Message], None],
        peer: str = "supervisor",
        failure: Callable[[str, wire.Message], Exception] | None = None,
    ) -> "SupervisorClient":
        """Connect to a live supervisor of our own user.

        Raises:
            OSError: There is none.
            BackendError: Somebody else listens there.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.connect(os.fspath(path))
            _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.geteuid():
                raise BackendError(f"the {peer}'s socket {path} belongs to user {uid}")
            return cls(sock, on_event, peer, failure)
        except BaseException:
            sock.close()
            raise

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._sock.close()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ConnectionLost(f"the {self._peer} closed the connection"))
                future.exception()  # whoever asked may have seen it by a failed send
        if not self.lost.done():
            self.lost.set_result(None)

    async def request(
        self, op: str, *, fds: Sequence[int] = (), timeout_s: float = REQUEST_TIMEOUT_S, **keys: str | int
    ) -> Answer:
        """One request; waits for its answer. `fds` stay the caller's.

        Raises:
            BootFailed: The supervisor says that it failed, with the stage and errno.
            ConnectionLost: The peer is gone.
        """
        if self._is_ending:  # what it does not read any more would take its last answer along
            raise ConnectionLost(f"the {self._peer} is ending")
        self._is_ending = op == "shutdown"
        tag = next(self._tags)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[tag] = future
        try:
            await self._send(wire.encode(op, tag=tag, **keys), fds)
            async with asyncio.timeout(timeout_s):
                answer = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().close()
            raise
        except TimeoutError as error:
            raise BackendError(f"the {self._peer} did not answer {op!r} within {timeout_s:g} s") from error
        finally:
            self._waiting.pop(tag, None)
        if answer.message.word == "error":
            answer.close()
            raise self._failure(op, answer.message)
        return answer

    async def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        while True:
            try:
                if fds:
                    socket.send_fds(self._sock, [packet], fds)
                else:
                    self._sock.send(packet)
                return
            except BlockingIOError:
                await asyncio.sleep(0.002)
            except OSError as error:
                self.close()
                raise ConnectionLost(f"the {self._peer} is gone: {error.strerror}") from error

    def _readable(self) -> None:
        for _ in range(64):
            try:
                data, ancillary, _flags, _ = self._sock.recvmsg(
                    wire.PACKET_BYTES_MAX, socket.CMSG_SPACE(wire.FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            if not data:
                self.close()
                return
            self._take(Answer(wire.decode(data), _descriptors(ancillary)))

    def _take(self, answer: Answer) -> None:
        message = answer.message
        if message.word not in ("ok", "error"):
            answer.close()
            self._on_event(message)
            return
        future = self._waiting.get(message.number("tag"))
        if future is None or future.done():
            answer.close()
        else:
            future.set_result(answer)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _failure(op: str, message: wire.Message) -> Exception:
    stage, number = message.get("stage", "?"), message.number("errno", 0)
    text = message.get("message", "") or os.strerror(number)
    if stage == "unknown_id":
        return NotFound(f"the supervisor knows no such sandbox: {text}")
    if op in ("create", "restore"):
        return BootFailed(f"the sandbox did not start: {stage}: {text}", stage=stage, errno=number)
    return BackendError(f"the supervisor failed at {op}: {stage}: {text}", stage=stage, errno=number)
