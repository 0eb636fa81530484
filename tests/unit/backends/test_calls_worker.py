"""A worker's side of its line: what it makes of the end of each call."""

import array
import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any, cast

import pytest

from barchan.backends.base import Handle
from barchan.backends.function.worker import ENDED, KILL_WAIT_S, Call, Outcome, Worker
from barchan.errors import BarchanError, ReadTimeout, SandboxLost

pytestmark = pytest.mark.timeout(60)
DIED, EXITED = signal.SIGKILL, 0


class Counters:
    """Of a handle: what the kernel has killed."""

    def __init__(self) -> None:
        self.own = self.host = 0

    def oom_kills(self) -> int:
        return self.own

    def host_kills(self) -> int:
        return self.host


class Keeper:
    """What is at the other end, in the words of the protocol; each call is a process that sleeps."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.process = subprocess.Popen(["sleep", "600"])

    def offer(self) -> None:
        request, value, out, err = os.pipe(), os.pipe(), os.pipe(), os.pipe()
        fds = [request[1], value[0], out[0], err[0], os.pidfd_open(self.process.pid)]
        self.line.sendmsg([b"spare"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        for fd in (*fds, request[0], value[1], out[1], err[1]):
            os.close(fd)

    def end(self, wstatus: int) -> None:
        self.line.send(ENDED.pack(b"done", wstatus, 0, 0, 0))

    def close(self) -> None:
        self.line.close()
        self.process.kill()
        self.process.wait()


class Rig:
    """A worker with a keeper and counters."""

    def __init__(self, theirs: socket.socket, ours: socket.socket) -> None:
        self.keeper = Keeper(theirs)
        self.counters = Counters()
        self._ours = ours

    async def ready(self) -> Worker:
        self.worker = Worker(cast(Handle, self.counters), self._ours, set())
        await self.offered()
        return self.worker

    async def offered(self) -> None:
        ready = asyncio.Event()
        self.worker.on_ready = ready.set
        self.keeper.offer()
        await ready.wait()

    def begin(self, timeout_s: float = 60.0) -> tuple[Call, "asyncio.Future[Any]"]:
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = Call(b"", timeout_s, 100, told.set_result)
        self.worker.run(call)
        return call, told

    async def ended(self, wstatus: int) -> Outcome | BarchanError:
        """What a call is told that ends so."""
        _, told = self.begin()
        self.keeper.end(wstatus)
        outcome: Outcome | BarchanError = await told
        await self.offered()
        return outcome


@pytest.fixture
def rig() -> Iterator[Rig]:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rig = Rig(theirs, ours)
    yield rig
    rig.keeper.close()
    ours.close()


async def test_what_the_kernel_killed_for_one_call_is_no_evidence_for_the_next(rig: Rig) -> None:
    """Be it a child of one that ended well, and for want of the host's memory or of its own."""
    await rig.ready()
    for name in ("own", "host"):
        setattr(rig.counters, name, 1)
        well = await rig.ended(EXITED)
        assert isinstance(well, Outcome) and not well.oom_killed
        killed = await rig.ended(DIED)
        assert isinstance(killed, Outcome) and not killed.oom_killed
    rig.counters.own, rig.counters.host = 3, 0
    killed = await rig.ended(DIED)
    assert isinstance(killed, Outcome) and killed.oom_killed
    rig.counters.own, rig.counters.host = 0, 4
    assert isinstance(await rig.ended(DIED), SandboxLost)


async def test_a_call_that_is_cancelled_has_a_while_to_die_in(rig: Rig) -> None:
    """One near its deadline breaks no worker; one that has long to go holds none for long."""
    worker = await rig.ready()
    broken: list[BarchanError] = []
    worker.on_broken = broken.append
    for timeout_s in (0.05, 3600.0):
        call, told = rig.begin(timeout_s)
        worker.cancel(call)
        running = worker._running
        assert running is not None
        left_s = running.deadline - asyncio.get_running_loop().time()
        assert KILL_WAIT_S - 5 < left_s <= KILL_WAIT_S
        await asyncio.sleep(0.2)
        rig.keeper.end(DIED)
        assert not (await told).timed_out and not broken
        await rig.offered()


async def test_a_call_whose_end_its_worker_can_not_tell_has_timed_out(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bomb that starves the keeper buys no fault of the platform's; the worker goes."""
    monkeypatch.setattr("barchan.backends.function.worker.KILL_WAIT_S", 0.2)
    worker = await rig.ready()
    broken: list[BarchanError] = []
    worker.on_broken = broken.append
    _, told = rig.begin(0.05)
    outcome = await told
    assert isinstance(outcome, Outcome) and outcome.timed_out and not outcome.oom_killed
    assert [type(error) for error in broken] == [ReadTimeout]
