"""One sandbox in which calls run, one after the other: the node's end of what `keeper.py` says.

The keeper hands over the ends of each call's streams before the call is known, so that a call costs a write, and three
reads at its end. One that takes longer is looked at from time to time, not waited for: output without end then costs
the node a bounded share of its time, and the call waits for the reader as at any pipe.
"""

import array
import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from barchan.backends.base import Handle
from barchan.errors import BackendError, BarchanError, InitDied, ReadTimeout, SandboxLost

FDS = 4  # of each call: the call's own, stdout, stderr, and its process
MESSAGE_BYTES_MAX = 4200
ENDED = struct.Struct("<4siqqq")
PIECE_BYTES = 64 << 10
TAKEN_BYTES_MAX = 256 << 10  # of one stream at one look
VALUE_BYTES_MAX = (16 << 20) + 4096
FIRST_LOOK_S, LOOK_S_MAX = 0.002, 0.02
KILL_WAIT_S = 10.0


class Outcome(NamedTuple):
    """How a call ended. CPU and wall seconds; `value` is what it gave, as it came: nothing of it was looked at."""

    wstatus: int
    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_kib: int = 0
    wall_s: float = 0.0
    timed_out: bool = False
    oom_killed: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    value: bytes = b""


class Call:
    """One call on its way. `request` is for the call's process alone.

    Args:
        done: Told once: the outcome, or why there is none.
        output_bytes_max: Of each stream; beyond it the head and the tail are kept, half each.
    """

    __slots__ = ("done", "output_bytes_max", "request", "timeout_s")

    def __init__(
        self,
        request: bytes | memoryview,
        timeout_s: float,
        output_bytes_max: int,
        done: Callable[[Outcome | BarchanError], None],
    ) -> None:
        self.request = request
        self.timeout_s = timeout_s
        self.output_bytes_max = output_bytes_max
        self.done = done


class _Kept:
    """What is kept of a stream: its head and its tail."""

    def __init__(self, fd: int, head_max: int, tail_max: int) -> None:
        self.fd = fd
        self.total = 0
        self._head = bytearray()
        self._tail = bytearray()
        self._head_max, self._tail_max = head_max, tail_max

    def take(self, bytes_max: int) -> bool:
        """Read what is there, so many bytes at most; whether there was some."""
        taken = 0
        while taken < bytes_max:
            try:
                piece = os.read(self.fd, PIECE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:  # it ended without having read its request
                break
            if not piece:
                break
            taken += len(piece)
            self._add(piece)
        return taken > 0

    def _add(self, piece: bytes) -> None:
        self.total += len(piece)
        room = self._head_max - len(self._head)
        self._head += piece[:room]
        if len(piece) > room:
            self._tail += piece[room:]
            if len(self._tail) > 2 * self._tail_max + PIECE_BYTES:
                del self._tail[: len(self._tail) - self._tail_max]

    def value(self) -> bytes:
        """All of it, or without its middle."""
        return bytes(self._head + self._tail[max(0, len(self._tail) - self._tail_max) :])


class _Spare:
    """The place of the next call: a process that waits for what it is to do."""

    def __init__(self, fds: list[int]) -> None:
        self.sock = socket.socket(fileno=fds[0])
        self.out, self.err, self.process = fds[1:]
        for fd in fds[:3]:
            os.set_blocking(fd, False)

    def close(self) -> None:
        self.sock.close()
        for fd in (self.out, self.err, self.process):
            os.close(fd)


class _Running:
    """A call in its place."""

    def __init__(self, call: Call, spare: _Spare, now: float) -> None:
        """`now`: as the loop has it, which is not exact enough to tell how long it took."""
        half = call.output_bytes_max // 2
        self.call = call
        self.spare = spare
        self.began = time.monotonic()
        self.out = _Kept(spare.out, call.output_bytes_max - half, half)
        self.err = _Kept(spare.err, call.output_bytes_max - half, half)
        self.value = _Kept(spare.sock.fileno(), VALUE_BYTES_MAX, 0)
        self.left = memoryview(call.request)
        self.deadline = now + call.timeout_s
        self.look_s = FIRST_LOOK_S
        self.look: asyncio.TimerHandle | None = None
        self.timed_out = False
        self.is_killed = False

    def send(self) -> None:
        """As much of the request as fits."""
        try:
            while self.left:
                self.left = self.left[self.spare.sock.send(self.left) :]
        except BlockingIOError:
            return
        except OSError:  # it is gone; how, the keeper says
            self.left = memoryview(b"")

    def take(self) -> bool:
        """What there is of each stream, up to a bound; whether there was some."""
        taken = [stream.take(TAKEN_BYTES_MAX) for stream in (self.out, self.err, self.value)]
        return any(taken)

    def kill(self) -> None:
        self.is_killed = True
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.spare.process, signal.SIGKILL)

    def close(self) -> None:
        if self.look is not None:
            self.look.cancel()
        self.spare.close()


class Worker:
    """A sandbox that takes one call at a time.

    Args:
        line: To its keeper; belongs to the worker.

    Attributes:
        on_ready: Called when the next call may come.
        on_broken: Called once, with the reason, when none may come any more; `end` is to follow.
        was_ready: A call could have come.
    """

    def __init__(self, handle: Handle, line: socket.socket) -> None:
        self.handle = handle
        self.on_ready: Callable[[], None] = lambda: None
        self.on_broken: Callable[[BarchanError], None] = lambda error: None
        self._loop = asyncio.get_running_loop()
        self._line: socket.socket | None = line
        self._spare: _Spare | None = None
        self._running: _Running | None = None
        self._oom_seen = handle.oom_kills()
        self.was_ready = False
        self.calls_total = 0
        self.made_at = self._loop.time()
        line.setblocking(False)
        self._loop.add_reader(line.fileno(), self._hear)

    @property
    def is_ready(self) -> bool:
        return self._spare is not None

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def run(self, call: Call) -> None:
        """Run it; the worker must be ready."""
        spare, self._spare = self._spare, None
        assert spare is not None
        self.calls_total += 1
        running = self._running = _Running(call, spare, self._loop.time())
        running.send()
        running.look = self._loop.call_later(min(FIRST_LOOK_S, call.timeout_s), self._look, running)

    def cancel(self, call: Call) -> None:
        """Nobody waits for it any more. It is killed, if it runs here."""
        if self._running is not None and self._running.call is call:
            self._running.kill()

    async def end(self) -> None:
        """Remove it. A call that runs is told so."""
        self._let_go(BackendError("the worker of this call was ended"))
        await self.handle.destroy()

    # what the keeper says

    def _hear(self) -> None:
        while self._line is not None:
            try:
                data, ancillary, _, _ = self._line.recvmsg(MESSAGE_BYTES_MAX, socket.CMSG_SPACE(FDS * 4))
            except BlockingIOError:
                return
            except OSError as error:
                return self._break(BackendError(f"the line to a worker broke: {error}"))
            fds = array.array("i")
            for _, _, content in ancillary:
                fds.frombytes(content)
            self._act(data, list(fds))

    def _act(self, data: bytes, fds: list[int]) -> None:
        if data == b"spare" and len(fds) == FDS and self._spare is None and self._running is None:
            self._spare = _Spare(fds)
            self.was_ready = True
            return self.on_ready()
        for fd in fds:
            os.close(fd)
        if data[:4] == b"done" and len(data) == ENDED.size and self._running is not None:
            return self._finish(self._running, data)
        if data:
            said = data.decode("utf-8", "replace").removeprefix("error ")
            return self._break(BackendError(f"a worker can make no place for a call: {said[:400]}"))
        self._break(None)

    def _finish(self, running: _Running, data: bytes) -> None:
        self._running = None
        try:
            _, wstatus, user_us, system_us, max_rss_kib = ENDED.unpack(data)
            usage = (user_us / 1e6, system_us / 1e6, max_rss_kib)
            self._tell(running, wstatus, usage)
        finally:
            running.close()

    def _tell(self, running: _Running, wstatus: int, usage: tuple[float, float, int]) -> None:
        while running.take():
            continue
        if running.value.total > VALUE_BYTES_MAX:
            return running.call.done(BackendError("a call gave more than it may"))
        oom_killed = False
        if wstatus & 0x7F == signal.SIGKILL and not running.is_killed:
            kills = self.handle.oom_kills()
            oom_killed, self._oom_seen = kills > self._oom_seen, kills
            if not oom_killed and self.handle.host_kills():
                return running.call.done(SandboxLost("the host was out of memory, and its kernel killed the call"))
        out, err = running.out, running.err
        wall_s = time.monotonic() - running.began
        value = running.value.value()
        running.call.done(
            Outcome(
                *(wstatus, *usage, wall_s, running.timed_out, oom_killed),
                *(out.value(), err.value(), out.total, err.total, value),
            )
        )

    # a call that takes its time

    def _look(self, running: _Running) -> None:
        now = self._loop.time()
        if running.left:
            running.send()
        if running.take() or running.left:
            running.look_s = FIRST_LOOK_S
        else:
            running.look_s = min(2 * running.look_s, LOOK_S_MAX)
        if now >= running.deadline:
            if running.timed_out or running.is_killed:
                error = ReadTimeout(f"a call survived SIGKILL for {KILL_WAIT_S:g} s")
                return self._break(error)
            running.timed_out = True
            running.kill()
            running.deadline = now + KILL_WAIT_S
        running.look = self._loop.call_later(min(running.look_s, max(0.0, running.deadline - now)), self._look, running)

    # the end

    def _break(self, error: BarchanError | None) -> None:
        """None: the keeper is gone, which the call that ran may have brought about."""
        running = self._running
        if error is None:
            error = InitDied("the worker of this call died")
            if running is not None and self.handle.oom_kills() > self._oom_seen:  # by its memory
                self._running = None
                with suppress(BarchanError):
                    self._tell(running, signal.SIGKILL, (0.0, 0.0, 0))
                running.close()
        self._let_go(error)
        self.on_broken(error)

    def _let_go(self, error: BarchanError) -> None:
        if self._line is not None:
            self._loop.remove_reader(self._line.fileno())
            self._line.close()
            self._line = None
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        running, self._running = self._running, None
        if running is not None:
            running.close()
            running.call.done(error)
