"""Room above a memory limit, in a control group of a test's own."""

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.backends.container import room as rooms
from barchan.backends.container.cgroup import ROOT, Counters
from barchan.backends.container.room import Room

pytestmark = [pytest.mark.requires("root", "cgroup1"), pytest.mark.timeout(60)]
MIB = 1 << 20
LIMIT, ROOM = 32 * MIB, 16 * MIB
# Has as many MiB, locked in memory, as each line that it reads says.
PROGRAM = """
import ctypes, mmap, sys
libc = ctypes.CDLL(None)
libc.mlockall(2)
for line in sys.stdin:
    held = None
    held = mmap.mmap(-1, (int(line) << 20) or 4096)
    print("has", flush=True)
"""


class Group:
    """One with a program in it."""

    def __init__(self, node: str) -> None:
        self.counters = Counters(node, "sb_1", "v1")
        self.path = Path(self.counters.memory)
        self.path.mkdir(parents=True)
        self.limit = LIMIT
        self.program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        (self.path / "cgroup.procs").write_text(str(self.program.pid))

    @property
    def limit(self) -> int:
        return int((self.path / "memory.limit_in_bytes").read_text())

    @limit.setter
    def limit(self, value: int) -> None:
        (self.path / "memory.limit_in_bytes").write_text(str(value))

    def has(self, mib: int) -> None:
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(f"{mib}\n")
        self.program.stdin.flush()
        assert self.program.stdout.readline() == "has\n"

    def close(self) -> None:
        with self.program:
            self.program.kill()
        for path in (self.path / "apart", self.path, self.path.parent):
            if path.exists():
                path.rmdir()
        if not os.listdir(self.path.parent.parent):
            self.path.parent.parent.rmdir()


@pytest.fixture
def group() -> Iterator[Group]:
    os.makedirs(f"{ROOT}/memory/barchan", exist_ok=True)
    made = Group(f"test-{secrets.token_hex(4)}")
    yield made
    made.close()


async def until_limit(group: Group, value: int) -> None:
    while group.limit != value:
        await asyncio.sleep(0.01)


async def test_it_is_given_and_goes_back(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where nothing of it is in use, else when that is free; nothing is killed, and it was never full."""
    monkeypatch.setattr(rooms, "AGAIN_S", 0.01)
    monkeypatch.setattr(rooms, "SETTLE_S", 0.0)
    room = Room(group.counters, LIMIT, ROOM)
    async with room.given():
        assert group.limit == LIMIT + ROOM
    assert group.limit == LIMIT
    async with room.given():
        group.has(24)
        group.has(40)
    assert group.limit == LIMIT + ROOM
    group.has(4)
    await until_limit(group, LIMIT)
    assert group.program.poll() is None
    assert group.counters.oom_kills() == group.counters.host_kills() == 0
    assert group.counters.stats().memory_peak_bytes < LIMIT


async def test_what_is_kept_of_it_is_not_taken_from_the_guest(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a while, and no more than there was. Another node finds it, and lets it go back."""
    monkeypatch.setattr(rooms, "AGAIN_S", 0.01)
    monkeypatch.setattr(rooms, "SLACK_BYTES", MIB)
    own = 5 * MIB
    room = Room(group.counters, LIMIT, ROOM, lambda: own)
    async with room.given():
        own = 8 * MIB
    assert group.limit == LIMIT + 4 * MIB
    own = 6 * MIB
    await until_limit(group, LIMIT + 2 * MIB)
    async with room.given():
        own = 90 * MIB
    assert group.limit == LIMIT + ROOM
    room.close()
    await Room(Counters(group.path.parent.name, "sb_1", "v1"), LIMIT, ROOM).go_back()
    assert group.limit == LIMIT
    group.limit = LIMIT + 2 * ROOM  # nobody's room
    async with Room(group.counters, LIMIT, ROOM).given():
        assert group.limit == LIMIT + 2 * ROOM
    assert group.limit == LIMIT + 2 * ROOM


async def test_kills_count_while_it_is_given(group: Group) -> None:
    """And those of processes apart for themselves, too."""
    assert group.counters.kills_apart() is None
    group.counters.set_apart([group.program.pid])
    assert (group.counters.charged(), group.counters.charged(apart=True)) == ([], [group.program.pid])
    assert group.counters.kills_apart() == 0
    with pytest.raises(AssertionError):
        group.has(64)
    assert group.counters.kills_apart() == group.counters.oom_kills() == 1
    async with Room(group.counters, LIMIT, ROOM).given():
        assert group.counters.oom_kills() == 1
        assert group.counters.host_kills() == 0
    assert group.counters.oom_kills() == 1
