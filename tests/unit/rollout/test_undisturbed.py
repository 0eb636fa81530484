"""The platform's work in a sandbox whose programs stand in its way."""

import asyncio

import pytest

from barchan.errors import BackendError, ConnectionLost, ReadTimeout, SandboxLost
from barchan.rollout.undisturbed import undisturbed
from tests.unit.rollout.fakes import FakeClient, FakeSandbox

pytestmark = pytest.mark.timeout(30)


def disturbed(*running: str) -> FakeSandbox:
    sandbox = FakeSandbox(FakeClient(), 1)
    sandbox.running += running
    return sandbox


async def test_what_goes_well_disturbs_nobody() -> None:
    """Nothing is ended."""
    sandbox = disturbed("a", "b")

    async def work() -> int:
        return 7

    assert await undisturbed(sandbox, work, 10.0) == 7
    assert sandbox.running == ["a", "b"]


@pytest.mark.parametrize("way", ["killed", "stopped", "broken off"])
async def test_whoever_stands_in_the_way_is_ended(way: str) -> None:
    """Killed, never done, or given up on: with nothing else running it is done again."""
    sandbox = disturbed(*(f"p{number}" for number in range(40)))

    async def work() -> int:
        if sandbox.running and way == "killed":
            raise BackendError("read failed in the guest", wstatus=9)
        if sandbox.running and way == "stopped":
            await asyncio.Event().wait()
        if sandbox.running:
            raise ConnectionLost("in the middle of a stream")
        return 7

    assert await undisturbed(sandbox, work, 0.05) == 7
    assert sandbox.running == []


async def test_what_fails_with_nothing_else_running_is_the_platforms() -> None:
    """It is raised, as is what no guest can cause."""

    async def never() -> int:
        await asyncio.Event().wait()
        raise AssertionError

    async def fails() -> int:
        raise BackendError("read failed in the guest", wstatus=9)

    async def lost() -> int:
        raise SandboxLost("gone")

    with pytest.raises(ReadTimeout):
        await undisturbed(disturbed("a"), never, 0.02)
    with pytest.raises(BackendError):
        await undisturbed(disturbed("a"), fails, 10.0)
    sandbox = disturbed("a")
    with pytest.raises(SandboxLost):
        await undisturbed(sandbox, lost, 10.0)
    assert sandbox.running == ["a"]
