"""Tasks at which no further attempt begins, as all processes of a run know them."""

import asyncio
import fcntl
import os
import secrets
import threading
from pathlib import Path

import msgspec
from msgspec import Struct

from barchan.errors import BackendError, InvalidSpec
from barchan.rollout.shared import Lines, translated

FILE = "quarantine.jsonl"
HELD_OFF = "held-off"


class Quarantined(Struct, frozen=True):
    """One of them, and why."""

    task_id: str
    why: str


class Quarantine:
    """Of one run.

    Args:
        folder: The run's, that its processes share. None: only this process knows.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._known: dict[str, str] = {}
        self._lines: Lines[Quarantined] | None = None
        self._held_off: _HeldOff | None = None
        self._reading = threading.Lock()
        if folder is not None:
            self._held_off = _HeldOff(folder / HELD_OFF)
            self._lines = Lines(folder / FILE, Quarantined)
            with self._lines.locked():
                pass  # makes the file

    async def add(self, task_id: str, why: str) -> None:
        """Begin no further attempt at a task, whoever asks from now on. The first reason stands.

        Raises:
            BackendError: The folder can't be written.
        """
        if await self.why(task_id) is None:
            self._known[task_id] = why
            if self._lines is not None:
                await asyncio.to_thread(self._lines.append, Quarantined(task_id, why))

    async def hold_off(self, task_id: str, why: str) -> None:
        """As `add`, but only for as long as this process goes on: what speaks against the task may be mended, and who
        goes on with the run begins it again.

        Raises:
            BackendError: The folder can't be written.
        """
        if task_id in self._known:
            return
        self._known[task_id] = why
        if self._held_off is not None:
            await asyncio.to_thread(self._held_off.add, Quarantined(task_id, why))

    async def why(self, task_id: str) -> str | None:
        """Why no attempt at a task begins; None: nothing speaks against it.

        Raises:
            BackendError, InvalidSpec: The folder can't be read.
        """
        if task_id not in self._known and self._lines is not None:
            await asyncio.to_thread(self._look, self._lines)
        if task_id not in self._known and self._held_off is not None:
            return await asyncio.to_thread(self._held_off.why, task_id)
        return self._known.get(task_id)

    def _look(self, lines: Lines[Quarantined]) -> None:
        with self._reading:
            for line in lines.new():
                self._known.setdefault(line.task_id, line.why)

    def close(self) -> None:
        """Hold nothing off any more, for others; idempotent."""
        if self._held_off is not None:
            self._held_off.close()


class _HeldOff:
    """A file per process, which keeps it locked: the kernel lets go of it with the process, and it counts no more."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"{secrets.token_hex(8)}.jsonl"
        self._fd = -1
        self._adding = threading.Lock()
        self._decoder = msgspec.json.Decoder(Quarantined)

    def add(self, line: Quarantined) -> None:
        data = msgspec.json.encode(line) + b"\n"
        with self._adding, translated(self._path):
            if self._fd < 0:
                self._fd = self._begun()
            if os.write(self._fd, data) != len(data):
                raise BackendError(f"{self._path} can't be written: no space for a whole line")

    def _begun(self) -> int:
        """The file, in its place once it is locked: before, whoever looks would take it for that of a dead process."""
        self._folder.mkdir(exist_ok=True)
        partial = self._path.with_suffix(".partial")
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            partial.rename(self._path)
        except BaseException:
            os.close(fd)
            partial.unlink(missing_ok=True)
            raise
        return fd

    def why(self, task_id: str) -> str | None:
        with translated(self._folder):
            for path in self._folder.glob("*.jsonl") if self._folder.exists() else ():
                for line in self._lines_of(path):
                    if line.task_id == task_id:
                        return line.why
        return None

    def _lines_of(self, path: Path) -> list[Quarantined]:
        """Those of a process that goes on. The file of one that does not is removed."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return []  # somebody else has removed it
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                data = file.read()
            else:
                path.unlink(missing_ok=True)
                return []
        try:
            return [self._decoder.decode(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidSpec(f"{path}: {error}") from error

    def close(self) -> None:
        with self._adding:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                self._path.unlink(missing_ok=True)
                os.close(fd)
