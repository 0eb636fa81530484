"""What is told of a guest that lives in a container, of which only its own init knows what runs in there."""

import asyncio
import struct
from types import SimpleNamespace
from typing import Any, cast

from barchan.backends.guest import GuestConnection, GuestProcess
from barchan.backends.hosted.handle import HostedHandle
from barchan.wire import guest as wire


class Guest(GuestConnection):
    """One whose kernel counts so many processes."""

    pids: int | None = 0
    asked = 0

    async def request(self, make: Any, **_: Any) -> wire.Frame:
        self.asked += 1
        if self.pids is None:
            raise OSError(95, "not known here")
        return wire.Frame(wire.Request.COUNTERS, 1, struct.pack("<5Q", 0, 0, 0, 0, self.pids))


def handle_of(guest: Guest) -> HostedHandle:
    ended = asyncio.get_running_loop().create_future()
    outer = SimpleNamespace(ended=ended, stats=lambda: SimpleNamespace(cpu_s=1.0))
    return HostedHandle("sb_1", cast(Any, outer), guest, cast(Any, SimpleNamespace(ended=ended)))


def begun(guest: Guest, handle: int) -> GuestProcess:
    return guest._register(f"p{handle}", wire.Started(handle, 2, False), None)


def end(guest: Guest, process: GuestProcess) -> None:
    guest.take(wire.Frame(wire.Pushed.EXIT, 0, struct.pack("<IiQQQQQQQ", process.handle, 0, *([0] * 7))))


async def looked(handle: HostedHandle) -> bool:
    """Whether it has programs; what it has to ask for that is answered next."""
    found = handle.activity().has_programs
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return found


async def test_programs_that_their_shell_has_left_count() -> None:
    """There are some until the guest has said that there are none, and from the next start on."""
    guest = Guest()
    handle = handle_of(guest)
    assert await looked(handle)
    assert not await looked(handle)
    shell = begun(guest, 1)
    guest.pids = 1
    assert await looked(handle)
    end(guest, shell)
    assert [await looked(handle) for _ in range(3)] == [True] * 3
    guest.pids = 0
    assert [await looked(handle) for _ in range(2)] == [True, False]
    asked = guest.asked
    assert not await looked(handle)
    assert guest.asked == asked


async def test_what_can_not_be_told_counts_as_programs() -> None:
    """An init that does not count is not taken for an empty one."""
    guest = Guest()
    guest.pids = None
    handle = handle_of(guest)
    assert [await looked(handle) for _ in range(3)] == [True] * 3
