"""What a gVisor guest is started with, what is put right of what its kernel tells, and which guests are made ahead."""

import asyncio
import os
import signal
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from barchan.backends.base import Ended
from barchan.backends.guest import GuestProcess
from barchan.backends.gvisor import guest
from barchan.backends.gvisor.guest import STUB_KILLED, GvisorConnection, end_of
from barchan.backends.gvisor.handle import OUT_OF_MEMORY, GvisorHandle
from barchan.backends.gvisor.slots import READY_MAX, GvisorSlots
from barchan.backends.gvisor.spec import OVERHEAD_MIB, PIDS_MAX, oci, outer_spec, starter_words
from barchan.backends.gvisor.starter import Starter
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec
from barchan.wire import guest as wire

SPEC = SandboxSpec(template="debian", backend="gvisor", memory_mib=100)
TEMPLATE = Template(
    name="debian",
    digest="d" * 64,
    layers=(),
    size_bytes=0,
    created_unix_s=0.0,
    user="root",
    workdir="/",
    env={},
    source="",
)


def test_an_outer_has_room_for_what_runs_the_guest() -> None:
    """And nothing of what concerns the guest's programs."""
    spec = msgspec.structs.replace(SPEC, env={"A": "b"}, setup="true", user="agent", pids_max=PIDS_MAX)
    outer = outer_spec(spec)
    assert outer.memory_mib == 100 + OVERHEAD_MIB
    assert outer.pids_max == PIDS_MAX
    assert (outer.root, outer.env, outer.setup, outer.user) == ("capable", {}, None, None)


@pytest.mark.parametrize(("root", "bits"), [("plain", 0), ("capable", 0x800400DB)])
def test_a_capable_root_is_one_inside(root: str, bits: int) -> None:
    """The init is told the same capabilities that a container's supervisor tells it, and no others."""
    spec = msgspec.structs.replace(SPEC, root=root)
    words = msgspec.json.decode(oci(spec))["process"]["args"]
    assert int(words[words.index("--root-capabilities") + 1]) == bits


@pytest.mark.parametrize(("network", "word"), [("none", "none"), ("open", "host"), ("allow", "host")])
def test_only_a_guest_without_a_network_has_one_of_its_kernel(network: str, word: str) -> None:
    """The others use the outer's, which is theirs alone."""
    spec = msgspec.structs.replace(SPEC, network=network)
    assert f"--network={word}" in starter_words(spec, "systrap")


def test_a_signal_comes_through_the_starter() -> None:
    """Which passes it on as a shell does."""
    assert end_of((128 + signal.SIGKILL) << 8) == signal.SIGKILL
    assert os.waitstatus_to_exitcode(end_of(70 << 8)) == 70


def exit_frame(handle: int, wstatus: int) -> wire.Frame:
    return wire.Frame(kind=wire.Pushed.EXIT, tag=0, body=struct.pack("<IiQQQQQQQ", handle, wstatus, *([0] * 7)))


class Connection(GvisorConnection):
    """To an init that starts whatever it is asked to."""

    def __init__(self, oom_kills: Callable[[], int]) -> None:
        super().__init__(8, oom_kills)
        self._count = 0
        self.count_in_start: Callable[[], int] | None = None

    async def request(self, make: Any, *, on_reply: Any = None, **_: Any) -> wire.Frame:
        if on_reply is None:
            return wire.Frame(kind=wire.Request.SIGNAL, tag=1, body=struct.pack("<I", 1))
        self._count += 1
        if self.count_in_start is not None:
            self._oom_kills = self.count_in_start
        frame = wire.Frame(kind=wire.Request.START, tag=1, body=struct.pack("<IIB", self._count, 2, 0))
        on_reply(frame)
        return frame

    def ended(self, process: GuestProcess, wstatus: int) -> int:
        """The wait status that a program's end is told with."""
        self.take(exit_frame(process.handle, wstatus))
        assert process.exit is not None
        return process.exit.wstatus


async def test_an_end_for_want_of_memory_is_sigkill() -> None:
    """Where the kernel's count has risen during its life, once for each time, and only then."""
    kills = 0
    connection = Connection(lambda: kills)
    first, second, third = [await connection.start(wire.Start(process_id=name, argv=("p",)), None) for name in "abc"]
    assert connection.ended(third, STUB_KILLED) == STUB_KILLED
    kills = 1
    assert connection.ended(first, STUB_KILLED) == signal.SIGKILL
    assert connection.ended(second, STUB_KILLED) == STUB_KILLED
    kills = 2
    last = await connection.start(wire.Start(process_id="d", argv=("p",)), None)
    assert connection.ended(last, STUB_KILLED) == STUB_KILLED


async def test_what_the_platform_started_ends_as_it_did() -> None:
    """A grader's exit code is a verdict, whatever else was killed meanwhile. And a count that is gone is none."""
    kills = 0
    connection = Connection(lambda: kills)
    start = wire.Start(process_id="grader", argv=("p",), flags=wire.StartFlag.PLATFORM)
    grader = await connection.start(start, None)
    kills = 1
    assert connection.ended(grader, STUB_KILLED) == STUB_KILLED

    def gone() -> int:
        raise FileNotFoundError

    connection = Connection(gone)
    program = await connection.start(wire.Start(process_id="a", argv=("p",)), None)
    assert connection.ended(program, STUB_KILLED) == STUB_KILLED


async def test_a_program_that_sigkill_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host's kernel has killed at the sandbox's limit during its life; else it may only be slow."""
    monkeypatch.setattr(guest, "STUCK_S", 0.0)
    kills, told = 0, []
    connection = Connection(lambda: kills)
    connection.on_stuck = lambda: told.append(kills)
    program = await connection.start(wire.Start(process_id="a", argv=("p",)), None)
    for count in (0, 1):
        kills = count
        await connection.signal(program, signal.SIGKILL, wire.Scope.ALL)
        while connection._killing:
            await asyncio.sleep(0)
    assert told == [1]
    connection.ended(program, signal.SIGKILL)
    await connection.signal(program, signal.SIGKILL, wire.Scope.ALL)
    assert told == [1]


async def test_it_is_hurt_from_a_kill_until_a_program_is_started() -> None:
    """Not by what was counted before this node knew it; one that began before a kill shows nothing."""
    kills = 1
    connection = Connection(lambda: kills)

    def is_hurt() -> bool:
        return connection.is_hurt

    assert not is_hurt()
    kills = 2
    assert is_hurt()
    connection.count_in_start = lambda: 3
    await connection.start(wire.Start(process_id="a", argv=("p",)), None)
    assert is_hurt()
    await connection.start(wire.Start(process_id="b", argv=("p",)), None)
    assert not is_hurt()


FULL = f"{OUT_OF_MEMORY}: "


@pytest.mark.parametrize(
    ("apart", "is_hurt", "is_stopped", "end", "cause"),
    [
        (1, False, False, Ended(wstatus=137 << 8, oom_kills=2), FULL),
        (0, True, False, Ended(wstatus=137 << 8, oom_kills=2), ""),
        (0, True, False, Ended(wstatus=70 << 8, oom_kills=2), ""),
        (0, True, False, Ended(wstatus=2 << 8, oom_kills=2), FULL),
        (0, False, False, Ended(wstatus=2 << 8, oom_kills=2), ""),
        (0, True, False, Ended(wstatus=0, oom_kills=2, why="gone"), FULL),
        (0, False, False, Ended(wstatus=0, oom_kills=2, why="gone"), ""),
        (0, True, True, Ended(wstatus=0, oom_kills=2, why="gone"), ""),
        (0, True, False, Ended(wstatus=0, oom_kills=0, why="gone"), ""),
        (None, True, False, Ended(wstatus=137 << 8, oom_kills=2), FULL),
        (None, False, False, Ended(wstatus=137 << 8, oom_kills=2), ""),
    ],
)
async def test_whose_doing_an_end_is(
    monkeypatch: pytest.MonkeyPatch, apart: int | None, is_hurt: bool, is_stopped: bool, end: Ended, cause: str
) -> None:
    """The guest's only where the kernel has killed what runs it, or has killed in it since it last was whole."""
    monkeypatch.setattr("barchan.backends.gvisor.handle.is_stopped", lambda outer: is_stopped)
    kills = 0
    connection = Connection(lambda: kills)
    kills = int(is_hurt)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    outer = SimpleNamespace(ended=never, counters=SimpleNamespace(kills_apart=lambda: apart))
    handle = GvisorHandle(
        *("sb_1", cast(Any, outer), connection, cast(Any, SimpleNamespace(ended=never)), Starter()),
        room=cast(Any, None),
        secret=b"",
        engine={},
        spec=SPEC,
        template=TEMPLATE,
    )
    handle.tell_end(end)
    assert (await handle.ended).why == (cause + end.why).removesuffix(": ")


class Made:
    """A sandbox, as far as slots look at it."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> None:
        self.sandbox_id, self.spec, self.template = sandbox_id, spec, template
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_destroyed = False

    async def destroy(self) -> None:
        self.is_destroyed = True


async def begin(sandbox_id: str, spec: SandboxSpec, template: Template, cut: str | None) -> Any:
    return Made(sandbox_id, spec, template)


async def filled(slots: GvisorSlots) -> None:
    while (await slots.keep(1, "")).ready < READY_MAX:
        await asyncio.sleep(0.01)


async def test_what_is_asked_for_twice_is_made_ahead() -> None:
    """Once for each create that is alike; one that died is not given out, and one not wanted is there for the next."""
    slots = GvisorSlots(begin)
    for index in range(2):
        assert slots.take(SPEC, TEMPLATE) is None
        await slots.create(f"sb_node_{index}", SPEC, TEMPLATE, None)
    await filled(slots)
    assert slots.take(msgspec.structs.replace(SPEC, memory_mib=200), TEMPLATE) is None
    first = slots.take(SPEC, TEMPLATE)
    assert first is not None
    assert slots.is_lent(first)
    slots.put_back(first)
    assert slots.take(SPEC, TEMPLATE) == first
    handle = await slots.create(first, SPEC, TEMPLATE, None)
    assert handle.sandbox_id == first
    assert not slots.is_lent(first)
    await filled(slots)
    dead = slots.take(SPEC, TEMPLATE)
    assert dead is not None
    slots._lent[dead].ended.set_result(None)  # type: ignore[arg-type]
    again = await slots.create(dead, SPEC, TEMPLATE, None)
    assert not again.ended.done()
    await filled(slots)
    lent = slots.take(SPEC, TEMPLATE)
    assert lent is not None
    counts = await slots.keep(0, "")
    assert (counts.claimed, counts.cold, counts.died, counts.ready) == (1, 3, 1, 0)
    assert slots.is_lent(lent)
    assert not slots._lent[lent].is_destroyed  # type: ignore[attr-defined]
    slots.put_back(lent)
    assert not slots.is_lent(lent)
