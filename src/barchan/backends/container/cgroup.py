"""Read a sandbox's counters from the kernel's files, on cgroup version 1 and 2."""

import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from barchan.errors import CapacityError
from barchan.model.sandbox import SandboxStats

ROOT = "/sys/fs/cgroup"
READ_BYTES = 64 << 10
FREEZE_S = 10.0
FREEZE_POLL_S = 0.0005
FULL_SPARE_BYTES = 1 << 20  # below the limit: an allocation that found no room need not have filled it to the last byte
APART = "apart"
_LIMITS_V1 = ("memory.memsw.limit_in_bytes", "memory.limit_in_bytes")  # the first is never less, and may be absent


class Counters:
    """Where the kernel counts for one sandbox. A file that is gone (the sandbox ended) counts 0."""

    __slots__ = ("_full_before", "_leaf", "_version")

    def __init__(self, node: str, sandbox_id: str, version: str) -> None:
        self._leaf = f"barchan/{node}/{sandbox_id}"
        self._version = version
        self._full_before: bool | None = None  # while the limit is raised

    @property
    def guest(self) -> str:
        """Directory of the group, of the version 2 hierarchy, that holds what the guest runs."""
        return f"{ROOT}/{'unified/' if self._version == 'v1' else ''}{self._leaf}/guest"

    @property
    def memory(self) -> str:
        """Directory of the group that the guest's memory is counted in."""
        return f"{ROOT}/memory/{self._leaf}" if self._version == "v1" else self.guest

    def cpu_s(self) -> float:
        return _field(f"{self.guest}/cpu.stat", "usage_usec") / 1e6

    def pids(self) -> int:
        """Threads that the guest has."""
        group = f"{ROOT}/pids/{self._leaf}" if self._version == "v1" else self.guest
        return _number(f"{group}/pids.current")

    def oom_kills(self) -> int:
        """Programs killed since the guest reached its own limit."""
        kills = self._kills()
        return kills if kills and self._was_full() else 0

    def host_kills(self) -> int:
        """Programs that the kernel killed for want of memory, though the guest never reached its limit: the host's."""
        kills = self._kills()
        return kills if kills and not self._was_full() else 0

    def _kills(self) -> int:
        """Of any kind of shortage, the host's too."""
        if self._version == "v1":  # each group counts its own
            return _field(f"{self.memory}/memory.oom_control", "oom_kill") + (self.kills_apart() or 0)
        return _field(f"{self.memory}/memory.events", "oom_kill")

    def _was_full(self) -> bool:
        """Version 1 counts no attempts beyond the limit (its failcnt stays 0): there the highest use tells."""
        if self._version == "v2":
            return _field(f"{self.memory}/memory.events", "oom") > 0
        most = _number(f"{self.memory}/memory.max_usage_in_bytes")
        is_full = most + FULL_SPARE_BYTES >= _number(f"{self.memory}/memory.limit_in_bytes")
        return is_full or bool(self._full_before)

    # processes apart

    def set_apart(self, pids: Iterable[int]) -> None:
        """Count the kernel's kills of these apart from those of the others, under the same limit. In version 2, where
        no group with processes has others below it that are limited, nothing happens.

        Raises:
            OSError: One of them is gone.
        """
        if self._version == "v1":
            os.mkdir(f"{self.memory}/{APART}", 0o755)
            for pid in pids:
                _write(f"{self.memory}/{APART}/cgroup.procs", str(pid).encode())

    def charged(self, *, apart: bool = False) -> list[int]:
        """Processes whose memory is counted here; `apart`: those that were set apart, which are none of these."""
        return [int(pid) for pid in _read(f"{self.memory}{f'/{APART}' if apart else ''}/cgroup.procs").split()]

    def kills_apart(self) -> int | None:
        """Of those that were set apart, how many the kernel has killed for want of memory; None: none were."""
        said = _read(f"{self.memory}/{APART}/memory.oom_control") if self._version == "v1" else ""
        return _field_in(said, "oom_kill") if said else None

    # room above the limit

    def give_room(self, limit_bytes: int) -> None:
        """Raise the memory limit to that, unless there is none, or a higher one. Raises `OSError`."""
        if self._full_before is None:
            self._full_before = self._was_full()
        for path in self._limits():
            now = _read(path).strip()
            if now and now != "max" and int(now) < limit_bytes:
                _write(path, str(limit_bytes).encode())

    def take_room(self, limit_bytes: int, room_bytes: int, kept_bytes: int = 0) -> bool:
        """Lower a limit that was raised by no more than that again, but for what is kept of it. False: it is not as
        before, for something is kept, or more is in use. May block for milliseconds.

        Raises:
            OSError: It can't be lowered for another reason.
        """
        is_raised = False
        for path in reversed(self._limits()):
            now = _read(path).strip()
            if not now or now == "max" or not limit_bytes < int(now) <= limit_bytes + room_bytes:
                continue
            is_raised = True
            if self._version == "v2" and _number(f"{self.memory}/memory.current") > limit_bytes + kept_bytes:
                return False  # there its programs would be killed for that
            try:
                _write(path, str(limit_bytes + kept_bytes).encode())
            except OSError as error:
                if error.errno == errno.EBUSY:
                    return False
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise
        if is_raised and kept_bytes:
            return False
        was_full, self._full_before = self._full_before, None
        if was_full is None:  # an earlier node has raised it, if anybody has
            was_full = not is_raised or self._kills() > 0
        if self._version == "v1" and not was_full and self._was_full():
            # What it took when it had more room is no sign that it was ever full.
            _write(f"{self.memory}/memory.max_usage_in_bytes", b"0")
        return True

    def _limits(self) -> list[str]:
        """Files of the memory limit, in the order in which they are raised."""
        if self._version == "v1":
            return [f"{self.memory}/{name}" for name in _LIMITS_V1]
        return [f"{self.memory}/memory.max"]

    def dirty_bytes(self) -> int:
        """Of the guest's files, what is not on disk yet."""
        if self._version == "v1":
            path, name = f"{ROOT}/memory/{self._leaf}/memory.stat", "total_dirty"
        else:
            path, name = f"{self.guest}/memory.stat", "file_dirty"
        return _field(path, name)

    def stats(self) -> SandboxStats:
        if self._version == "v1":
            memory = f"{ROOT}/memory/{self._leaf}"
            usage, peak = f"{memory}/memory.usage_in_bytes", f"{memory}/memory.max_usage_in_bytes"
        else:
            usage, peak = f"{self.guest}/memory.current", f"{self.guest}/memory.peak"
        return SandboxStats(
            memory_bytes=_number(usage),
            memory_peak_bytes=_number(peak),
            oom_kills=self.oom_kills(),
            cpu_s=self.cpu_s(),
            pids=self.pids(),
        )


def node_memory(node: str, version: str) -> tuple[int, int]:
    """Bytes that a node's sandboxes take, and how many of them are the cache of files that are on disk, too."""
    if version == "v1":
        group = f"{ROOT}/memory/barchan/{node}"
        used, names = _number(f"{group}/memory.usage_in_bytes"), ("total_active_file", "total_inactive_file")
    else:
        group = f"{ROOT}/barchan/{node}"
        used, names = _number(f"{group}/memory.current"), ("active_file", "inactive_file")
    return used, min(used, sum(_field(f"{group}/memory.stat", name) for name in names))


@contextmanager
def frozen(guest: str) -> Iterator[None]:
    """Stop every process of a group, and let them go on at the end, unless it was stopped before. Blocks for up to
    `FREEZE_S`.

    Raises:
        CapacityError: Some process did not stop in time: it waits for a disk, or the host is that busy.
    """
    deadline = time.monotonic() + FREEZE_S
    was_stopped = _read(f"{guest}/cgroup.freeze").strip() == "1"
    try:
        stop(guest)
        while not is_frozen(guest):
            if time.monotonic() > deadline:
                raise CapacityError("the sandbox's processes don't stop for a snapshot", retry_after_ms=1000)
            time.sleep(FREEZE_POLL_S)
        yield
    finally:
        if not was_stopped:
            thaw(guest)


def stop(guest: str) -> None:
    """Ask every process of a group to stop; `is_frozen` says when they have."""
    _write(f"{guest}/cgroup.freeze", b"1")


def is_frozen(guest: str) -> bool:
    return bool(_field(f"{guest}/cgroup.events", "frozen"))


def thaw(guest: str) -> None:
    """Let a group's processes go on; one that is gone needs nothing."""
    try:
        _write(f"{guest}/cgroup.freeze", b"0")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise


def kill(guest: str) -> None:
    """Kill whatever is in a sandbox, its init too, all at once; one that is gone needs nothing."""
    try:
        _write(f"{os.path.dirname(guest)}/cgroup.kill", b"1")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise


def sandbox_of(pid: int, node: str) -> str | None:
    """The sandbox of this node that a process of the host belongs to."""
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, found, rest = line.partition(f"/barchan/{node}/")
        name = rest.partition("/")[0].removesuffix(".platform")
        if found and name not in ("", "init"):
            return name
    return None


def _write(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _read(path: str) -> str:
    """The whole of a kernel's file, without Python's layers: the policy reads thousands."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    try:
        text = b""
        while piece := os.read(fd, READ_BYTES):
            text += piece
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.ESRCH):  # it went while it was read
            raise
        return ""
    finally:
        os.close(fd)
    return text.decode("ascii")


def _number(path: str) -> int:
    return int(_read(path).strip() or 0)


def _field(path: str, name: str) -> int:
    return _field_in(_read(path), name)


def _field_in(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
