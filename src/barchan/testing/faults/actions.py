"""How each fault is done. Each is undone at its end, also when it is cancelled, and gives what it was done to:
empty where there was nothing.
"""

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from barchan.core.finished import finished
from barchan.errors import InvalidSpec
from barchan.testing.faults.ground import FOLDERS, Ground
from barchan.testing.faults.guests import Program, inits, programs
from barchan.testing.faults.http_proxy import HttpProxy, Mode
from barchan.testing.faults.plan import Choice, Fault
from barchan.testing.faults.pressure import Pressure

FILL_STEP, FILL_LEAST = 1 << 30, 1 << 9
POLL_S = 0.005
APPEAR_S = 60.0
SQUEEZE_EVERY_S = 0.05
Action = Callable[[Ground, Fault], Awaitable[str]]


async def node_kill(ground: Ground, fault: Fault) -> str:
    pid = ground.node_pid
    await ground.kill_node()
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        await finished(ground.start_node())  # whoever ends it must find it up
    return f"node {pid}"


async def node_stop(ground: Ground, fault: Fault) -> str:
    pid = ground.node_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        os.kill(pid, signal.SIGCONT)
    return f"node {pid}"


async def connection_cut(ground: Ground, fault: Fault) -> str:
    count = ground.proxy.connections
    ground.proxy.cut()
    return f"{count} connections" if count else ""


async def connection_silent(ground: Ground, fault: Fault) -> str:
    count = ground.proxy.connections
    await ground.proxy.silence(fault.for_s)
    return f"{count} connections" if count else ""


async def oom_host(ground: Ground, fault: Fault) -> str:
    pressure = Pressure(ground.node.watch.cgroup)
    stop = threading.Event()

    def press() -> int:
        seen = 0
        try:
            while not stop.is_set():
                pressure.squeeze()
                stop.wait(SQUEEZE_EVERY_S)
                seen = max(seen, pressure.kills())
        finally:
            pressure.release()
        return seen

    pressing = asyncio.ensure_future(asyncio.to_thread(press))
    try:
        await asyncio.wait((pressing,), timeout=fault.for_s)
    finally:
        stop.set()
        seen = await finished(pressing)
    return f"{seen} programs of living sandboxes killed" if seen else ""


async def disk_full(ground: Ground, fault: Fault) -> str:
    filler = ground.state_dir / "filler"
    try:
        size = await asyncio.to_thread(fill, filler)
        await asyncio.sleep(fault.for_s)
    finally:
        filler.unlink(missing_ok=True)
    return f"{size} bytes taken"


def fill(file: Path) -> int:
    """Take what room there is, to the last block; gives how many bytes that was."""
    size, step = 0, FILL_STEP
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while step >= FILL_LEAST:
            try:
                os.posix_fallocate(fd, size, step)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                step //= 2
            else:
                size += step
    finally:
        os.close(fd)
    return size


async def image_missing(ground: Ground, fault: Fault) -> str:
    away = ground.folder / "away"
    await asyncio.to_thread(_move, ground.images, away)
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        _move(away, ground.images)
    return "every image"


def _move(source: Path, target: Path) -> None:
    """What is in the folders of one store into those of another; what is there meanwhile stays."""
    for name in FOLDERS:
        (target / name).mkdir(parents=True, exist_ok=True)
        for path in (source / name).iterdir():
            path.rename(target / name / path.name)


def _served(of: Callable[[Ground], HttpProxy | None], mode: Mode) -> Action:
    async def action(ground: Ground, fault: Fault) -> str:
        proxy = of(ground)
        if proxy is None:
            raise InvalidSpec(f"{fault.kind}: this run talks to no such server (try: --policy chat --base-url URL)")
        before = proxy.touched
        proxy.mode = mode
        try:
            await asyncio.sleep(fault.for_s)
        finally:
            proxy.mode = "pass"
        count = proxy.touched - before
        return f"{count} requests" if count else ""

    return action


_STORE: tuple[Mode, ...] = ("slow", "corrupt", "down")
_ENDPOINT: tuple[Mode, ...] = ("429", "500", "hang", "garbage", "cut")
AT_MOMENTS: dict[str, Action] = {
    "node-kill": node_kill,
    "node-stop": node_stop,
    "connection-cut": connection_cut,
    "connection-silent": connection_silent,
    "oom-host": oom_host,
    "disk-full": disk_full,
    "image-missing": image_missing,
    **{f"store-{mode}": _served(lambda ground: ground.store, mode) for mode in _STORE},
    **{f"endpoint-{mode}": _served(lambda ground: ground.endpoint, mode) for mode in _ENDPOINT},
}


async def hit(ground: Ground, fault: Fault, sandbox_id: str, choice: Choice) -> str:
    """Do a fault to one sandbox; empty where there was nothing that it could be done to."""
    await asyncio.sleep(choice.delay_s)
    if fault.kind == "init-kill":
        with _closed(inits(ground.node.watch, sandbox_id)) as held:
            killed = [program.pid for program in held if program.send(signal.SIGKILL)]
        return f"init of {sandbox_id}" if killed else ""
    with _closed(await _awaited(ground, sandbox_id)) as found:
        meant = {"all": found, "first": found[:1], "last": found[-1:]}[choice.who]
        number = signal.SIGKILL if fault.kind == "grader-kill" else signal.SIGSTOP
        reached = [program for program in meant if program.send(number)]
        if reached and number is signal.SIGSTOP:
            try:
                await asyncio.sleep(fault.for_s)
            finally:
                for program in reached:
                    program.send(signal.SIGCONT)
        return f"{len(reached)} programs of {sandbox_id} ({choice.who} of {len(found)})" if reached else ""


async def _awaited(ground: Ground, sandbox_id: str) -> list[Program]:
    """The programs in a sandbox as soon as there are some; none, where it ends before."""
    give_up_at = time.monotonic() + APPEAR_S
    while time.monotonic() < give_up_at and ground.node.watch.sandbox_groups(sandbox_id):
        if found := programs(ground.node.watch, sandbox_id):
            return found
        await asyncio.sleep(POLL_S)
    return []


@contextmanager
def _closed(held: Sequence[Program]) -> Iterator[Sequence[Program]]:
    try:
        yield held
    finally:
        for program in held:
            program.close()
