"""What group commits promise: who waits is told after the disk has it, and never of what may be lost."""

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from barchan.errors import BackendError, Conflict
from barchan.trajectory.reader import verify
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.trajectory.logs import new_log

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The real syncs: inode, and the file's size when its sync began."""
    seen: list[tuple[int, int]] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        found = os.fstat(fd)
        time.sleep(0.01)  # as a disk that is busy: what is appended meanwhile must not be taken for durable
        real(fd)
        seen.append((found.st_ino, found.st_size))

    monkeypatch.setattr("barchan.trajectory.commits.os.fdatasync", fdatasync)
    return seen


async def test_who_waits_is_told_after_a_sync_that_began_later(tmp_path: Path, syncs: list[tuple[int, int]]) -> None:
    """Each wait ends only when some sync began with the entry in the file, also for entries appended during one."""
    with new_log(tmp_path) as log:
        inode = log.path.stat().st_ino

        async def append(number: int) -> None:
            await asyncio.sleep(number * 0.002)
            seq = log.entry("note", {"n": number})
            size = log.path.stat().st_size
            await log.committed(seq)
            assert any(found == inode and begun >= size for found, begun in syncs)

        await asyncio.gather(*(append(number) for number in range(30)))
        shared = len(syncs)
        await log.committed()  # nothing is new
        assert len(syncs) == shared
    assert shared < 30


async def test_logs_of_one_process_are_synced_at_once(tmp_path: Path, syncs: list[tuple[int, int]]) -> None:
    """Many logs: each is synced, none waits for all others, and no thread or descriptor is left with a log."""
    logs = [new_log(tmp_path, f"r-{number}") for number in range(40)]
    descriptors = len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*(log.committed(log.entry("note", {})) for log in logs))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert {inode for inode, _ in syncs} == {log.path.stat().st_ino for log in logs}
    for log in logs:
        log.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors - len(logs)


async def test_a_disk_that_fails_is_told_to_all_and_stays_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All who wait get the error; nothing can be appended then, for what the kernel had may be lost."""
    log = new_log(tmp_path)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("barchan.trajectory.commits.os.fdatasync", fail)
    log.entry("note", {})
    told = await asyncio.gather(*(log.committed() for _ in range(5)), return_exceptions=True)
    assert [type(error) for error in told] == [BackendError] * 5
    monkeypatch.undo()
    with pytest.raises(BackendError, match="can't be put on disk"):
        await log.committed()
    with pytest.raises(BackendError, match="can't be put on disk"):
        log.entry("note", {})


async def test_a_cancelled_wait_harms_no_other(tmp_path: Path, syncs: list[tuple[int, int]]) -> None:
    """One of two who wait for the same entry gives up; the other is told."""
    with new_log(tmp_path) as log:
        seq = log.entry("note", {})
        first, second = (asyncio.create_task(log.committed(seq)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await second
        assert first.cancelled()


async def test_a_fenced_writer_tells_nobody_that_its_entry_is_safe(tmp_path: Path) -> None:
    """Its append is refused, and a wait for what it had not committed ends with an error."""
    log = new_log(tmp_path)
    log.entry("note", {})
    TrajectoryWriter.reopen(log.path).close()
    with pytest.raises(Conflict):
        log.entry("note", {})
    log.close()
    await log.committed()  # its own entry is on disk with the log's


def test_a_forked_process_has_threads_of_its_own(tmp_path: Path) -> None:
    """A child of fork() that goes on with a log waits for no thread of its parent's."""
    with new_log(tmp_path) as log:
        asyncio.run(log.committed(log.entry("note", {})))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with TrajectoryWriter.reopen(log.path) as mine:
                    asyncio.run(mine.committed(mine.entry("note", {"child": True})))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    assert verify(log.path).entries == 4


# Appends to several logs at once, and tells of each entry when it is committed.
WRITER = """
import asyncio, os, sys
from pathlib import Path
from barchan.trajectory.writer import TrajectoryWriter
async def write(path):
    log = TrajectoryWriter.reopen(Path(path))
    while True:
        seq = log.entry("note", {"pad": "x" * 2000})
        await log.committed(seq)
        os.write(1, f"{path} {seq}\\n".encode())
async def main():
    await asyncio.gather(*(write(path) for path in sys.argv[1:]))
asyncio.run(main())
"""


def test_kill_9_in_the_middle_of_group_commits(tmp_path: Path) -> None:
    """Several logs, killed again and again while their commits are under way: what was told is there, all verify."""
    paths = []
    for number in range(4):
        with new_log(tmp_path, f"r-{number}") as log:
            paths.append(str(log.path))
    pause = random.Random(3)
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", WRITER, *paths], stdout=subprocess.PIPE)
        assert child.stdout is not None
        told = child.stdout.readline()
        time.sleep(pause.uniform(0.0, 0.1))
        child.send_signal(signal.SIGKILL)
        told += child.stdout.read()
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        last = dict(line.rsplit(" ", 1) for line in told.decode().splitlines())
        for path in paths:
            found = verify(Path(path))
            assert found.ok, found.why
            assert found.entries > int(last.get(path, -1))
