"""What is left of a machine, and who is told, where something fails; QEMU, its outer and the init are stand-ins."""

import asyncio
import errno
import os
import signal
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from barchan.backends.base import Host
from barchan.backends.hosted.outer import HostLayer
from barchan.backends.microvm.handle import MicrovmHandle
from barchan.backends.qemu import backend as machines
from barchan.backends.qemu import handle as handles
from barchan.backends.qemu.backend import MachineBackend
from barchan.backends.qemu.guest import CountingGuest
from barchan.backends.qemu.machine import Machine
from barchan.backends.qemu.shape import Shape
from barchan.errors import (
    BackendError,
    BootFailed,
    CapacityError,
    ConnectionLost,
    GuestWrecked,
    InitDied,
    ReadTimeout,
    RemoteProtocolError,
)
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec, SandboxStats
from barchan.wire import guest as wire

ID = "sb_0a1b2c"
SPEC = SandboxSpec(template="t", memory_mib=16, disk_mib=1, network="none")
TEMPLATE = Template(
    name="t", digest="d" * 64, layers=(), size_bytes=0, created_unix_s=0.0, user="root", workdir="/", env={}, source=""
)
SHAPE = Shape(
    layers=(),
    hardware=(),
    boot=(),
    boot_layers=(HostLayer("boot", Path("/boot")),),
    memory_mib=16,
    disk="/disk",
    stores_disk=True,
    image=(),
    engine={},
    outer=SPEC,
)
STATS = SandboxStats(memory_bytes=0, memory_peak_bytes=0, oom_kills=0, cpu_s=0.0, pids=0)


class Outer:
    """The container around a machine."""

    def __init__(self) -> None:
        self.sandbox_id = f"{ID}-microvm"
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def do(*arguments: object) -> None:
            self.done.append(name)

        return do

    def stats(self) -> SandboxStats:
        return STATS


class Qemu:
    """A machine that does as it is told; `failing`: what it fails at, and how."""

    def __init__(self) -> None:
        self.outer = Outer()
        self.runner = self
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.guest_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.why_ended = ""
        self.exit = None
        self.is_there = True
        self.done: list[str] = []
        self.failing: dict[str, Exception] = {}

    async def _do(self, name: str) -> None:
        self.done.append(name)
        if name in self.failing:
            raise self.failing[name]

    async def cont(self) -> None:
        await self._do("cont")

    async def stop(self) -> None:
        await self._do("stop")

    async def load(self, memory: Path) -> None:
        await self._do("load")

    async def save(self, target: Path, memory_mib: int, disk: str | None) -> int:
        (target / "ram").write_bytes(b"much")
        await self._do("save")
        return 1

    async def console(self) -> str:
        await self._do("console")
        return ""

    def said(self) -> str:
        return "nothing"

    def close(self) -> None:
        self.done.append("close")


class Init(CountingGuest):
    """A connection whose requests are answered at once. `failing`: as often as is said, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[wire.Request] = []
        self.failing: dict[wire.Request, list[Exception]] = {}
        self.counted = asyncio.Event()
        self.counted.set()

    async def request(
        self,
        make: Callable[[int], bytes],
        *,
        timeout_s: float = 0,
        on_reply: Callable[[wire.Frame], object] | None = None,
    ) -> wire.Frame:
        kind = wire.Request(make(1)[4])
        self.asked.append(kind)
        if self.failing.get(kind):
            raise self.failing[kind].pop()
        body = b""
        if kind == wire.Request.START:
            body = struct.pack("<IIB", 7, 70, 0)
        if kind == wire.Request.COUNTERS:
            await self.counted.wait()
            raise ConnectionLost("no counters here")
        frame = wire.Frame(kind | 0x80, 1, body)
        if on_reply is not None:
            on_reply(frame)
        return frame

    async def ping(self, timeout_s: float = 0) -> wire.Pong:
        await self.request(wire.ping)
        return cast(wire.Pong, None)

    def say_killed(self, handle: int) -> None:
        self.take(wire.Frame(wire.Pushed.EXIT, 0, struct.pack("<IiQQQQQQQ", handle, signal.SIGKILL, *([0] * 7))))


class Microvm(MicrovmHandle):
    can_connect = True

    async def connect(self) -> Any:
        if not self.can_connect:
            raise ConnectionLost("no line")
        return None


class Line(socket.socket):
    """Notes how many tasks there are when it is closed."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.tasks: list[int] = []

    def close(self) -> None:
        self.tasks.append(len(asyncio.all_tasks()))
        super().close()


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "GO_ON_S", 0.0)
    monkeypatch.setattr(handles, "GO_ON_POLL_S", 0.0)
    monkeypatch.setattr("barchan.backends.hosted.handle.RECONNECT_S", 0.0)


def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Microvm, Qemu, Init]:
    async def reconnect(sock: object) -> None:
        pass

    async def left(sandbox_id: str) -> None:
        pass

    qemu, init = Qemu(), Init()
    monkeypatch.setattr(init, "reconnect", reconnect)
    return Microvm(ID, cast(Machine, qemu), init, SPEC, SHAPE, b"", left), qemu, init


# what a handle does


async def test_a_tar_that_is_too_large_ends_the_pack_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operation is killed while the programs stand still, even where that fails, and then they go on."""
    handle, _, init = made(monkeypatch)
    init.failing[wire.Request.SIGNAL] = [ReadTimeout("late")]
    packing = asyncio.ensure_future(handle.pack(tmp_path / "target"))
    while 7 not in init.processes:
        await asyncio.sleep(0)
    init.processes[7].take_output(wire.Output(7, wire.STDOUT, 0, bytes(64 << 20)))
    with pytest.raises(GuestWrecked, match="more than its disk"):
        await packing
    assert wire.Request.SIGNAL in init.asked
    assert init.at_work.is_set()
    assert not handle.ended.done()


async def test_a_frozen_one_is_packed_and_frozen_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its init is woken for it, its programs are not."""
    handle, qemu, init = made(monkeypatch)
    await handle.freeze()
    qemu.done.clear()
    packing = asyncio.ensure_future(handle.pack(tmp_path / "target"))
    while 7 not in init.processes:
        await asyncio.sleep(0)
    assert (qemu.done, qemu.outer.done[-1]) == (["cont"], "thaw")
    init.processes[7].readers[0].lost(InitDied("gone"))
    with pytest.raises(InitDied):
        await packing
    assert (qemu.done, qemu.outer.done[-1]) == (["cont", "stop"], "freeze")
    assert not init.at_work.is_set()


async def test_a_guest_that_answers_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over another connection, if need be."""
    monkeypatch.setattr(handles, "GO_ON_S", 60.0)
    handle, _, init = made(monkeypatch)
    await handle.freeze()
    init.failing[wire.Request.THAW] = [ConnectionLost("lost"), ReadTimeout("late")]
    await handle.thaw(0.0)
    assert init.at_work.is_set()
    assert not handle.ended.done()


@pytest.mark.parametrize("where", ["init", "qemu"])
async def test_a_guest_that_does_not_go_on_has_ended(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for its programs is told."""
    handle, qemu, init = made(monkeypatch)
    await handle.freeze()
    if where == "init":
        init.failing[wire.Request.THAW] = [ReadTimeout("late")] * 9
    else:
        qemu.failing["cont"] = ReadTimeout("late")
    with pytest.raises(InitDied, match="does not go on: late"):
        await handle.thaw(0.0)
    assert "late" in handle.ended.result().why
    assert init.at_work.is_set()


@pytest.mark.parametrize("failing", ["cont", "connect"])
@pytest.mark.parametrize("stored", [True, False])
async def test_after_a_dump_that_can_t_be_undone_nothing_is_left(
    failing: str, stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No directory, and no sandbox that nobody reaches."""
    handle, qemu, init = made(monkeypatch)
    if not stored:
        qemu.failing["save"] = OSError(errno.ENOSPC, "full")
    if failing == "cont":
        qemu.failing["cont"] = BackendError("QEMU refuses")
    handle.can_connect = failing != "connect"
    init.failing[wire.Request.THAW] = [ConnectionLost("no link")] * 9
    with pytest.raises(InitDied):
        await handle.dump(tmp_path / "memory", keep=True)
    assert not (tmp_path / "memory").exists()
    assert handle.ended.done()
    assert init.at_work.is_set()


async def test_a_dump_without_room_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on, and its connection is taken up again where it is lost."""
    handle, qemu, init = made(monkeypatch)
    qemu.failing["save"] = OSError(errno.ENOSPC, "full")
    with pytest.raises(CapacityError):
        await handle.dump(tmp_path / "memory", keep=True)
    assert not (tmp_path / "memory").exists()
    assert not handle.ended.done()
    assert init.at_work.is_set()
    assert init.on_lost == handle.recover


async def test_one_that_can_t_be_reached_any_more_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could use it, and it would stay for as long as it may live."""
    handle, _, init = made(monkeypatch)
    handle.can_connect = False
    init.link_lost()
    assert "no line" in (await handle.ended).why


@pytest.mark.parametrize("error", [ReadTimeout("late"), RemoteProtocolError("no QEMU")])
async def test_an_end_is_told_without_a_console(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """QEMU may be going, too."""
    handle, qemu, _ = made(monkeypatch)
    qemu.failing["console"] = error
    qemu.why_ended = "its kernel panicked"
    qemu.guest_ended.set_result(None)
    assert (await handle.ended).why == "its kernel panicked"


async def test_a_greeting_is_over_before_its_socket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest ends while it is called: nothing reads on from a descriptor that is somebody else's by then."""
    pair, theirs = socket.socketpair()
    ours = Line(fileno=pair.detach())
    monkeypatch.setattr(handles, "reach", lambda *made_of: ours)
    qemu = Qemu()
    qemu.why_ended = "its kernel panicked"
    before = len(asyncio.all_tasks())
    greeting = asyncio.ensure_future(handles.greeted(cast(Machine, qemu), b"secret", 30.0))
    await asyncio.get_running_loop().run_in_executor(None, theirs.recv, 1)
    qemu.guest_ended.set_result(None)
    with pytest.raises(ConnectionLost, match="panicked"):
        await greeting
    assert ours.tasks == [before + 1]
    theirs.close()


# ends that are counted first


async def test_ends_without_a_process_cost_nothing() -> None:
    """A guest may tell any number of them; one look at the counters serves all that are real."""
    init = Init()
    init.counted.clear()
    for handle in (1, 2):
        init._register(f"p{handle}", wire.Started(handle, handle, False), None)
    before = len(asyncio.all_tasks())
    for _ in range(100):
        for handle in (1, 2, 3):
            init.say_killed(handle)
    assert len(asyncio.all_tasks()) == before + 1
    assert init.processes[1].exit is None
    init.counted.set()
    assert [(await process.ended).wstatus for process in list(init.processes.values())] == [9, 9]
    assert init.asked == [wire.Request.COUNTERS]


# backends


class Outers:
    def __init__(self, qemu: Qemu) -> None:
        self.qemu = qemu
        self.alive: list[str] = []
        self.free = True
        self.let_go_of: list[object] = []
        self.container = self

    async def found(self) -> list[str]:
        return self.alive

    async def create(self, *made_of: object, **more: object) -> Any:
        return self.qemu.outer

    adopt = create

    def let_go(self, outer: object) -> None:
        self.let_go_of.append(outer)

    async def drop_layer(self, name: str) -> bool:
        return self.free


class Machines(MachineBackend):
    name = "microvm"
    handle = Microvm

    def probe(self) -> Any:
        return ()

    async def shape(self, spec: SandboxSpec, template: Template, image: Any = None) -> Shape:
        return SHAPE


class Node:
    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir

    async def backend(self, name: str) -> Any:
        return None


@pytest.fixture
async def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    """One of which every machine is the same stand-in."""
    found = Machines(cast(Host, Node(tmp_path)))
    qemu = Qemu()
    outers = Outers(qemu)

    async def machine(*made_of: object) -> Any:
        return qemu

    monkeypatch.setattr("barchan.backends.hosted.backend.Outers", lambda *made_of: outers)
    monkeypatch.setattr(Machine, "start", machine)
    monkeypatch.setattr(Machine, "find", machine)
    monkeypatch.setattr(found, "capabilities", Capable(), raising=False)
    await found.start()
    return found


class Capable:
    def check(self, spec: SandboxSpec) -> None:
        pass


def of(backend: Machines) -> Qemu:
    return cast(Outers, backend.outers).qemu


@pytest.mark.parametrize("error", [ReadTimeout("late"), ConnectionLost("no"), OSError("broken"), TimeoutError()])
async def test_a_machine_that_does_not_come_up_leaves_nothing(
    error: Exception, backend: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that is told as what it is, also where QEMU does not say why."""

    async def first(machine: object, secret: bytes) -> Any:
        raise error

    monkeypatch.setattr(backend, "first", first)
    of(backend).failing["console"] = ReadTimeout("late")
    with pytest.raises(BootFailed):
        await backend.create(ID, SPEC, TEMPLATE)
    assert of(backend).outer.done == ["destroy"]
    assert "close" in of(backend).done
    assert list(tmp_path.glob("microvm/live/*")) == []


async def test_a_guest_that_can_t_be_settled_is_let_go_of(backend: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handle, too, which would take up a lost connection for ever."""
    init = Init()
    init.failing[wire.Request.RESEED] = [ReadTimeout("late")]

    async def opened(*made_of: object) -> Any:
        return init

    monkeypatch.setattr(backend, "first", opened)
    monkeypatch.setattr(CountingGuest, "open", opened)
    with pytest.raises(BootFailed):
        await backend.create(ID, SPEC, TEMPLATE)
    assert of(backend).outer.done == ["destroy"]


async def test_what_can_t_be_adopted_is_let_go_of(backend: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections and its outer's descriptors are closed; it is the caller's to remove."""

    async def greeted(*made_of: object) -> Any:
        raise ReadTimeout("late")

    backend._note(ID).write_bytes(b'{"layers":[],"image":[]}')
    monkeypatch.setattr(machines, "greeted", greeted)
    with pytest.raises(BootFailed):
        await backend.adopt(ID, SPEC, TEMPLATE)
    assert of(backend).done[-1] == "close"
    assert cast(Outers, backend.outers).let_go_of == [of(backend).outer]


async def test_a_start_removes_what_is_nobody_s(backend: Machines, tmp_path: Path) -> None:
    """Notes, layers and what was half made, of all that are gone; what a sandbox has stays."""
    memory = tmp_path / "memory"
    memory.mkdir()
    for name in ("ram", "state"):
        (memory / name).touch()
    for sandbox_id in (ID, "sb_gone"):
        backend._note(sandbox_id).touch()
        await backend._stored.once(sandbox_id, memory, SHAPE)
    (tmp_path / "microvm/layers/half.part").mkdir()
    (tmp_path / "microvm/templates/half.part").mkdir(parents=True)
    cast(Outers, backend.outers).alive = [ID]
    await backend.start()
    assert os.listdir(tmp_path / "microvm/live") == [f"{ID}.json"]
    (layer,) = os.listdir(tmp_path / "microvm/layers")
    assert layer.startswith("memory-sb-0a1b2c-")
    assert os.listdir(tmp_path / "microvm/templates") == []
