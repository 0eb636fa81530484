"""How long a program took, by its sandbox's own time: also for whoever asks again, and whoever asks late."""

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

from barchan.backends.guest import GuestConnection, GuestProcess
from barchan.model.sandbox import ExecRequest
from barchan.node.clock import Clock
from barchan.node.processes import Defaults, Processes
from barchan.wire import guest as wire

TOOK_S = 100.0  # by the guest's clock, which counts what it was asleep
ASKED = ExecRequest(argv=("true",), process_id="p", timeout_s=60.0)


class Guest(GuestConnection):
    """Starts one program, and finds it again."""

    async def start(self, start: wire.Start, reader: Any) -> GuestProcess:
        process = self._register(start.process_id, wire.Started(1, 2, 1 in self.processes), None)
        process.readers.append(reader)
        process._settle(reader)
        return process

    def end(self) -> None:
        frame = struct.pack("<IiQQQQQQQ", 1, 0, 0, 0, 0, 0, int(TOOK_S * 1e9), 0, 0)
        self.take(wire.Frame(wire.Pushed.EXIT, 0, frame))


class Sandbox:
    """One that is asleep when it is told to be."""

    def __init__(self) -> None:
        self.guest, self.clock = Guest(), Clock()
        defaults: Any = Defaults.__new__(Defaults)
        defaults.env, defaults.cwd, defaults.user, defaults.shell = {}, "/", "root", "/bin/sh"
        handle: Any = SimpleNamespace(guest=self.guest, oom_kills=lambda: 0)
        self.processes = Processes(handle, defaults, self.clock, is_new=True)

    def sleep(self, missed_s: float) -> None:
        self.clock.stop()
        self.clock.go_on(missed_s)

    async def began(self) -> "asyncio.Task[Any]":
        asked = asyncio.create_task(self.processes.exec(ASKED))
        await asyncio.sleep(0.01)
        return asked


async def test_whoever_asks_again_is_told_the_same() -> None:
    """What the platform had it asleep counts for nobody, whether it was before or after that he asked."""
    sandbox = Sandbox()
    sandbox.sleep(1000.0)
    first = await sandbox.began()
    sandbox.sleep(30.0)
    again = await sandbox.began()
    sandbox.sleep(20.0)
    sandbox.guest.end()
    assert [(await asked).usage.wall_s for asked in (first, again)] == [50.0, 50.0]
    sandbox.sleep(500.0)
    assert (await sandbox.processes.exec(ASKED)).usage.wall_s == 50.0
    assert sandbox.processes.info(sandbox.guest.processes[1]).usage is not None


async def test_one_that_an_earlier_node_started_is_counted_from_there() -> None:
    """As far as this node knows."""
    sandbox = Sandbox()
    sandbox.guest._register("p", wire.Started(1, 2, True), None)
    sandbox.processes.found()
    sandbox.sleep(30.0)
    asked = await sandbox.began()
    sandbox.guest.end()
    assert (await asked).usage.wall_s == 70.0
