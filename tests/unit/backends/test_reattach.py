"""A container whose init can't be had again has ended, whatever the supervisor says of it."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from barchan.backends.base import Ended
from barchan.backends.container import backend
from barchan.backends.container.backend import ContainerHandle
from barchan.errors import BackendError, InitDied


class Guest:
    """Takes what a connection is told."""

    def __init__(self) -> None:
        self.gone: list[Exception] = []
        self.on_lost: Any = None

    async def reconnect(self, sock: object) -> None:
        raise AssertionError("there is no other connection")

    def guest_gone(self, error: Exception) -> None:
        self.gone.append(error)


def handle_of(guest: Guest) -> ContainerHandle:
    async def request(name: str, **fields: object) -> None:
        raise BackendError("no such sandbox")

    made = SimpleNamespace(request=request, take_socket=None)
    unused: Any = None
    return ContainerHandle(cast(Any, made), "sb_a", cast(Any, guest), unused, 0, 1, unused, unused)


async def test_its_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for those who wait for programs, and once for the node, which frees what it had."""
    monkeypatch.setattr(backend, "END_S", 0.0)
    guest = Guest()
    handle = handle_of(guest)
    guest.on_lost()
    ended = await asyncio.wait_for(handle.ended, 10)
    assert "can't be reached any more: no such sandbox" in ended.why
    assert isinstance(guest.gone[0], InitDied)


async def test_what_the_supervisor_tells_meanwhile_counts() -> None:
    """It knows how the init ended, and of what."""
    guest = Guest()
    handle = handle_of(guest)
    guest.on_lost()
    await asyncio.sleep(0)
    told = Ended(wstatus=9, oom_kills=1)
    handle.tell_end(told)
    assert await handle.ended == told
    handle.release()
