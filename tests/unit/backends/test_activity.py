"""Whether programs wait for their client, by what the kernel says of real ones."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan.backends.base import Activity
from barchan.backends.container.activity import THREADS_MAX, activity

pytestmark = pytest.mark.requires("root")

READER = "exec python3 -c 'import os; os.write(1, b\"on\\n\"); os.read(os.pipe()[0], 1)'"


def python(source: str) -> str:
    """A shell command that becomes a Python which says that it is there, and then does that."""
    imports = "import ctypes, os, select, socket, threading"
    return f"exec python3 -c \"{imports}; os.write(1, b'on\\n'); {source}\""


@contextmanager
def programs(group: Path, *commands: str) -> Iterator[Callable[[], int]]:
    """Shells with their input at a pipe, and their children, in what looks like a group; gives what looks anew who is
    there, and says how many.
    """
    started = [
        subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        for command in commands
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"on\n"

        def look() -> int:
            pids = [process.pid for process in started]
            for process in started:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                pids += [int(pid) for pid in children.split()]
            (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
            (group.parent / "cgroup.procs").write_text(f"{os.getpid()}\n")  # who feeds them, as the init does
            return len(pids)

        yield look
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def settled(group: Path, look: Callable[[], int], count: int, *, waits: bool, events: bool) -> Activity:
    """What is seen once all `count` programs are there and have come to rest; after ten seconds, whatever is seen."""
    until = time.monotonic() + 10
    while True:
        is_complete = look() == count
        seen = activity(str(group), 1, 0.5, is_closed=True)
        if (
            is_complete and (seen.waits_for_client, seen.waits_for_events) == (waits, events)
        ) or time.monotonic() > until:
            return seen
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("commands", "count", "waits", "events"),
    [
        (["echo on; read line"], 1, True, True),
        (["echo on; exec cat"], 1, True, True),
        (["echo on; cat; true"], 2, False, True),  # a shell that waits for a child, or for a timer as well
        ([READER], 1, False, True),  # of a pipe of its own: nobody feeds it, so it waits for something else
        ([python("socket.create_server(('127.0.0.1', 0)).accept()")], 1, False, True),
        ([python("select.epoll().poll()")], 1, False, True),
        ([python("select.epoll().poll(1000)")], 1, False, False),
        ([python("threading.Event().wait()")], 1, False, True),
        ([python("threading.Event().wait(1000)")], 1, False, False),
        ([python("threading.Timer(1000, print).start()")], 1, False, False),
        ([python("t = ctypes.CDLL(None).timerfd_create(1, 0); select.epoll().poll()")], 1, False, False),
        (["echo on; exec sleep 1000"], 1, False, False),
        (["echo on; read line", "echo on; exec sleep 1000"], 2, False, False),
        (["echo on; sleep 1000 | cat; true"], 3, False, False),
    ],
)
def test_who_waits(tmp_path: Path, commands: list[str], count: int, waits: bool, events: bool) -> None:
    """For their client only if every one of them reads what it feeds; for events only if none has a limit of time."""
    group = tmp_path / "guest"
    group.mkdir()
    with programs(group, *commands) as look:
        seen = settled(group, look, count, waits=waits, events=events)
        assert (seen.has_programs, seen.waits_for_client, seen.waits_for_events) == (True, waits, events)
        assert seen.cpu_s == 0.5
        assert activity(str(group), 1, 0.5, is_closed=False).waits_for_events is waits  # the network may wake them


def test_nobody_is_there(tmp_path: Path) -> None:
    """An empty group, and one that has gone."""
    (tmp_path / "cgroup.procs").touch()
    assert not activity(str(tmp_path), 0, 0.0, is_closed=True).has_programs
    assert not activity(str(tmp_path / "gone"), 0, 0.0, is_closed=True).has_programs


def test_a_crowd_is_at_work(tmp_path: Path) -> None:
    """Nobody looks at each of thousands."""
    seen = activity(str(tmp_path), THREADS_MAX + 1, 0.0, is_closed=True)
    assert (seen.waits_for_client, seen.waits_for_events) == (False, False)


def test_without_programs_nothing_is_looked_at(tmp_path: Path) -> None:
    """The kernel's count says so: most sandboxes that wait for a model are such."""
    seen = activity(str(tmp_path / "gone"), 0, 0.5, is_closed=True)
    assert seen == Activity(has_programs=False, waits_for_client=True, cpu_s=0.5)
