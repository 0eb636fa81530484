"""What a guest's kernel stores of it, with a writer that may write anything."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from barchan.backends.gvisor.intake import PIPE_BYTES, Intake
from barchan.backends.hosted import target
from barchan.errors import BackendError

BYTES_MAX = 3 * PIPE_BYTES


def taken(directory: Path, write: Callable[[list[int]], None]) -> list[Path]:
    """The files of what is written to the ends of two pipes."""
    files = [directory / "a", directory / "b"]
    intake = Intake(files, BYTES_MAX)
    errors: list[Exception] = []

    def run() -> None:
        try:
            intake.run()
        except (BackendError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        write(intake.ends)
    finally:
        intake.stop()
        thread.join()
        intake.close()
    if errors:
        raise errors[0]
    return files


def test_all_that_was_written_is_there(tmp_path: Path) -> None:
    """Though the writer keeps its ends, and more than a pipe holds."""
    data = os.urandom(PIPE_BYTES + 5)

    def write(ends: list[int]) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(ends[0], rest) :]
        os.write(ends[1], b"little")

    first, second = taken(tmp_path, write)
    assert first.read_bytes() == data
    assert second.read_bytes() == b"little"


def endless(ends: list[int]) -> None:
    with pytest.raises(BrokenPipeError):
        while True:
            os.write(ends[1], bytes(PIPE_BYTES))


def test_a_writer_without_an_end_is_stopped(tmp_path: Path) -> None:
    """By a broken pipe, and no more is on the disk than may be."""
    with pytest.raises(BackendError, match="more than its memory"):
        taken(tmp_path, endless)
    assert (tmp_path / "b").stat().st_size <= BYTES_MAX + PIPE_BYTES


def test_a_full_disk_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the last of it."""
    monkeypatch.setattr(target, "FREE_BYTES_MIN", 1 << 60)
    with pytest.raises(OSError, match="No space"):
        taken(tmp_path, endless)
    assert (tmp_path / "b").stat().st_size == 0
