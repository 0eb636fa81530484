"""Runs a task's checks against a function that lives in another process, of another user, and says how it went.

Runs as the sandbox's root, whose processes the candidate can't signal, trace or read. The job comes by stdin: a
nonce, the checks, the candidate's source. The only way to the candidate is two FIFOs in `/`, where root alone can
make files. The report is one line on stdout: `NONCE OUTCOME PASSED CALLS DETAIL`.
"""

import errno
import os
import select
import sys
import time

from barchan.rollout.graders.guest.codec import FRAME_BYTES_MAX, Garbled, decode, encode

CALL_FIFO = "/.barchan-call"
REPLY_FIFO = "/.barchan-reply"


class Ended(BaseException):
    """The checks cannot go on: (outcome, detail). No `except Exception` of a check catches it."""


class Candidate:
    """The candidate's function: a call sends the arguments over and waits for the answer, to `deadline` (monotonic)."""

    def __init__(self, deadline: float) -> None:
        self.calls = 0
        self.deadline = deadline
        os.umask(0)
        os.mkfifo(CALL_FIFO, 0o604)
        os.mkfifo(REPLY_FIFO, 0o602)
        self.reply_fd = os.open(REPLY_FIFO, os.O_RDONLY | os.O_NONBLOCK)
        self.call_fd = -1

    def connect(self) -> None:
        """Open for writing, which fails until the other side has opened for reading."""
        while time.monotonic() < self.deadline:
            try:
                self.call_fd = os.open(CALL_FIFO, os.O_WRONLY | os.O_NONBLOCK)
                return
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
            time.sleep(0.001)
        raise Ended("absent", "the candidate's process did not start")

    def load(self, entry_point: str, source: str) -> None:
        self._ask(encode((entry_point, source)))

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        return self._ask(encode((args, kwargs)))

    def _ask(self, body: bytes) -> object:
        self._send(len(body).to_bytes(4, "little") + body)
        size = int.from_bytes(self._receive(4), "little")
        if not 0 < size <= FRAME_BYTES_MAX + 64:
            raise Ended("garbled", "a frame of an impossible size")
        reply = self._receive(size)
        if reply[:1] == b"!":
            raise Ended("raised", reply[1:400].decode("utf-8", "replace"))
        try:
            return decode(reply[1:])
        except Garbled as error:
            raise Ended("garbled", str(error)) from None

    def _wait(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, self.deadline - time.monotonic()) * 1000):
            raise Ended("slow", "no answer in time")

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            self._wait(self.call_fd, select.POLLOUT)
            try:
                view = view[os.write(self.call_fd, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise Ended("gone", "the candidate's process closed its end") from None

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._wait(self.reply_fd, select.POLLIN)
            try:
                piece = os.read(self.reply_fd, size - len(data))
            except BlockingIOError:
                continue
            if not piece:
                raise Ended("gone", "the candidate's process ended")
            data += piece
        return data


def run(job, names, passed: "set[int]") -> "tuple[int, str, str]":  # type: ignore[no-untyped-def]
    """Calls made, outcome and detail; `passed` collects the checks that held."""
    candidate = Candidate(time.monotonic() + job["wall_s"])
    outcome, detail = "passed", ""
    try:
        candidate.connect()
        candidate.load(job["entry_point"], job["source"])
        names["check"](candidate)
    except Ended as end:
        outcome, detail = end.args
    except AssertionError:
        outcome, detail = "failed", "an assertion did not hold"
    except Exception as error:  # an answer that the check cannot even compare
        outcome, detail = "failed", f"{type(error).__name__} in the check"
    return candidate.calls, outcome, detail


def main() -> None:
    job = decode(sys.stdin.buffer.read())
    passed: set[int] = set()
    names = {"__name__": "checks", "__passed__": passed.add}
    exec(compile(job["checks"], "checks.py", "exec"), names)  # a fault here is the task's: no report, only a traceback
    calls, outcome, detail = run(job, names, passed)
    sys.stdout.write(f"{job['nonce']} {outcome} {len(passed)} {calls} {detail!a}\n")
    sys.stdout.flush()
    os._exit(0)  # nothing to tidy, and the candidate may have filled our memory with garbage to collect


if __name__ == "__main__":
    main()
