"""One sandbox in which calls run, one after the other: the node's end of what `keeper.py` says.

The keeper hands over the ends of each call's streams before the call is known, so that a call costs a write, and three
reads at its end. One that takes longer is looked at from time to time, not waited for: output without end then costs
the node a bounded share of its time, and the call waits for the reader as at any pipe.
"""

import array
import asyncio
import fcntl
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

FDS = 5  # of each call: its request, its value, stdout, stderr, and its process
MESSAGE_BYTES_MAX = 4200
ENDED = struct.Struct("<4siqqq")
PIECE_BYTES = 64 << 10  # what a pipe holds, too
WIDE_PIPE_BYTES = 1 << 20
TAKEN_BYTES_MAX = 256 << 10  # of one stream at one look
VALUE_BYTES_MAX = (16 << 20) + 4096
FIRST_LOOK_S, LOOK_S_MAX = 0.002, 0.02  # the former for each call that runs, of one that is not quiet
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

    Attributes:
        worker: Which runs it, or has.
    """

    __slots__ = ("done", "output_bytes_max", "request", "timeout_s", "worker")

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
        self.worker: Worker | None = None


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
        self.request, self.value, self.out, self.err, self.process = self._fds = fds
        for fd in fds[:-1]:
            os.set_blocking(fd, False)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def _widen(pipe: int) -> None:
    """Have it hold more, as far as the host lets us."""
    with suppress(OSError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, WIDE_PIPE_BYTES)


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
        self.value = _Kept(spare.value, VALUE_BYTES_MAX, 0)
        self.left = memoryview(call.request)
        self.deadline = now + call.timeout_s
        self.look_s = FIRST_LOOK_S
        self.look: asyncio.TimerHandle | None = None
        self.timed_out = False
        self.is_wide = False
        self.is_killed = False
        if len(self.left) > PIECE_BYTES:
            _widen(spare.request)

    def send(self) -> None:
        """As much of the request as fits."""
        try:
            while self.left:
                self.left = self.left[os.write(self.spare.request, self.left) :]
        except BlockingIOError:
            return
        except OSError:  # it is gone; how, the keeper says
            self.left = memoryview(b"")

    def take(self) -> bool:
        """What there is of each stream, up to a bound; whether there was some."""
        taken = [stream.take(TAKEN_BYTES_MAX) for stream in (self.out, self.err, self.value)]
        if taken[-1] and not self.is_wide and self.value.total >= PIECE_BYTES:
            self.is_wide = True
            _widen(self.spare.value)
        return any(taken)

    def kill(self, now: float) -> None:
        """It has a while to die in, whatever time it had left."""
        if self.is_killed:
            return
        self.is_killed = True
        self.deadline = now + KILL_WAIT_S
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
        together: Those of all workers of this node that run a call.

    Attributes:
        on_ready: Called when the next call may come.
        on_broken: Called once, with the reason, when none may come any more; `end` is to follow.
        was_ready: A call could have come.
    """

    def __init__(self, handle: Handle, line: socket.socket, together: set["Worker"]) -> None:
        self.handle = handle
        self.on_ready: Callable[[], None] = lambda: None
        self.on_broken: Callable[[BarchanError], None] = lambda error: None
        self._loop = asyncio.get_running_loop()
        self._line: socket.socket | None = line
        self._spare: _Spare | None = None
        self._running: _Running | None = None
        self._together = together
        self._kills_seen = self._kills()
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
        self._together.add(self)
        call.worker = self
        running = self._running = _Running(call, spare, self._loop.time())
        running.send()
        running.look = self._loop.call_later(min(FIRST_LOOK_S, call.timeout_s), self._look, running)

    def cancel(self, call: Call) -> None:
        """Nobody waits for it any more. It is killed, if it runs here."""
        if self._running is not None and self._running.call is call:
            self._running.kill(self._loop.time())

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
        self._together.discard(self)
        try:
            _, wstatus, user_us, system_us, max_rss_kib = ENDED.unpack(data)
            usage = (user_us / 1e6, system_us / 1e6, max_rss_kib)
            self._tell(running, wstatus, usage)
        finally:
            running.close()

    def _tell(
        self, running: _Running, wstatus: int, usage: tuple[float, float, int], *, writes_on: bool = False
    ) -> None:
        while running.take() and not writes_on:
            continue
        # Looked at after each call, whatever became of it: what killed its children speaks of no later one.
        kills, seen = self._kills(), self._kills_seen
        self._kills_seen = kills
        if running.value.total > VALUE_BYTES_MAX:
            return running.call.done(BackendError("a call gave more than it may"))
        oom_killed = False
        if wstatus & 0x7F == signal.SIGKILL and not running.is_killed and kills > seen:
            oom_killed = self.handle.oom_kills() > 0
            if not oom_killed:
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

    def _kills(self) -> int:
        """Processes that the kernel has killed for want of memory, here or on the host: the handle counts them as one
        or as the other, by what it knows at the moment."""
        return self.handle.oom_kills() + self.handle.host_kills()

    # a call that takes its time

    def _look(self, running: _Running) -> None:
        now = self._loop.time()
        if running.left:
            running.send()
        if running.take() or running.left:
            running.look_s = FIRST_LOOK_S * max(1, len(self._together))
        else:
            running.look_s = min(2 * running.look_s, LOOK_S_MAX)
        if now >= running.deadline:
            if running.is_killed:
                if running.timed_out:  # what keeps its worker from telling its end, such as a bomb, is its own doing
                    self._tell_killed(running, writes_on=True)
                return self._break(ReadTimeout(f"a call survived SIGKILL for {KILL_WAIT_S:g} s"))
            running.timed_out = True
            running.kill(now)
        running.look = self._loop.call_later(min(running.look_s, max(0.0, running.deadline - now)), self._look, running)

    # the end

    def _break(self, error: BarchanError | None) -> None:
        """None: the keeper is gone, which the call that ran may have brought about."""
        running = self._running
        if error is None:
            error = InitDied("the worker of this call died")
            if running is not None and self._kills() > self._kills_seen:  # by its memory, or the host's
                self._tell_killed(running)
        self._let_go(error)
        self.on_broken(error)

    def _tell_killed(self, running: _Running, *, writes_on: bool = False) -> None:
        """The outcome of a call that goes with its worker."""
        self._running = None
        with suppress(BarchanError):
            self._tell(running, signal.SIGKILL, (0.0, 0.0, 0), writes_on=writes_on)
        running.close()

    def _let_go(self, error: BarchanError) -> None:
        if self._line is not None:
            self._loop.remove_reader(self._line.fileno())
            self._line.close()
            self._line = None
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        running, self._running = self._running, None
        self._together.discard(self)
        if running is not None:
            running.close()
            running.call.done(error)
