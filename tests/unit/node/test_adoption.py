"""A node's start, when what one sandbox says is not what can be: it is lost, and the others are not."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from barchan.backends.guest import GuestConnection
from barchan.errors import RemoteProtocolError
from barchan.model.sandbox import SandboxSpec
from barchan.node import adoption
from barchan.node.rest import Used
from barchan.wire import guest as wire


class Broken:
    """A backend whose sandbox stumbles, or waits for ever."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.discarded: list[str] = []

    async def adopt(self, *_: object) -> None:
        if self.error is not None:
            raise self.error
        await asyncio.get_running_loop().create_future()

    async def discard(self, sandbox_id: str) -> None:
        self.discarded.append(sandbox_id)


ROW = SimpleNamespace(
    sandbox_id="sb_1",
    spec=SandboxSpec(template="debian"),
    template=None,
    created_unix_s=0.0,
    own_layers=(),
    is_published=False,
    before=Used(),
    since_unix_s=None,
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(AttributeError("'list' object"), "AttributeError"), (RemoteProtocolError("odd"), "odd"), (None, "TimeoutError")],
    ids=["stumbles", "lies", "waits"],
)
async def test_one_that_can_not_be_adopted_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, cause: str
) -> None:
    """Whatever went wrong, or does not come to an end; and nothing of it is left."""
    monkeypatch.setattr(adoption, "ADOPT_S", 0.05)
    ended: list[str] = []
    sandboxes = SimpleNamespace(journal=SimpleNamespace(end=lambda *words: ended.append(words[2])))
    backend = Broken(error)
    await adoption._adopt(cast(Any, sandboxes), cast(Any, backend), cast(Any, ROW))
    assert len(ended) == 1
    assert cause in ended[0]
    assert backend.discarded == ["sb_1"]


class Endless(GuestConnection):
    """One that always has more processes."""

    asked = 0

    async def request(self, make: Any, **_: Any) -> wire.Frame:
        self.asked += 1
        first = int.from_bytes(make(1)[-4:], "little")
        count = min(1000, wire.PROCESSES_MAX)
        item = b"\1\0\0\0p" + bytes(9)
        body = count.to_bytes(4, "little")
        body += b"".join((first + number).to_bytes(4, "little") + item for number in range(count))
        return wire.Frame(wire.Request.LIST, 1, body)


async def test_a_list_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lying agent has pages for ever."""
    monkeypatch.setattr(wire, "PROCESSES_MAX", 3000)
    endless = Endless()
    with pytest.raises(RemoteProtocolError, match="more than 3000"):
        await endless.listed()
    assert endless.asked == 4
