"""A container's processes and memory into a directory, and containers out of it (decision 0012).

The supervisor runs CRIU; what it runs it with is decided here. Both share a directory per run, for words and the log.
"""

import asyncio
import os
import secrets
import shutil
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from barchan.backends.base import Ended
from barchan.backends.container import criu
from barchan.backends.container.cgroup import FREEZE_POLL_S, FREEZE_S, Counters, is_frozen, kill, stop, thaw
from barchan.backends.container.criu import Criu
from barchan.backends.container.inside import Inside, is_place, look, outside_connections, places_text
from barchan.backends.container.wipe import wipe
from barchan.backends.guest import GuestConnection, init_died
from barchan.core.finished import finished
from barchan.errors import (
    BackendError,
    BarchanError,
    BootFailed,
    CapacityError,
    InitDied,
    NotSnapshotable,
    ReadTimeout,
    RequirementMissing,
    SnapshotCorrupt,
)
from barchan.image.disk import NO_ROOM
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.compatible import check, this_host
from barchan.snapshot.pager.link import PagerLink
from barchan.snapshot.shelf import FREE_BYTES_MIN
from barchan.wire import guest as wire

if TYPE_CHECKING:
    from barchan.backends.container.backend import ContainerBackend

DETACH_S = 15.0
DUMP_S = 300  # CRIU's own time; beyond it the sandbox is lost
RESTORE_S = 120  # and beyond that for its pages, which may still be on their way into the directory
PAGES_BYTES_PER_S = 8 << 20  # at least, from a busy disk and decompressed
ANSWER_SPARE_S = 30.0
ENTROPY_BYTES = 64
FIRST_FD = 12  # of the init's files: RESTORE_FILES_FD of guest/criu/restore.h
LOG_BYTES_MAX = 1 << 20
FULL_BYTES = 1 << 20  # CRIU writes more than that at a time; of a full disk it tells in many ways
JOB_PREFIX = "criu-"
NETWORKS = {"none": "none", "allow": "proxy", "open": "open"}


class Memory:
    """What a container backend needs for memory snapshots: CRIU, found once, and a place for its runs."""

    def __init__(self, state_dir: Path, preload: Path) -> None:
        self._state_dir = state_dir
        self._preload = preload
        self._criu: Criu | None = None
        self._finding = asyncio.Lock()

    async def is_possible(self) -> bool:
        """Whether there is a CRIU; where there is none yet, looks again."""
        async with self._finding:
            if self._criu is None:
                self._criu = await asyncio.to_thread(criu.find, self._state_dir)
        return self._criu is not None

    async def criu(self) -> Criu:
        """Raises RequirementMissing where there is none."""
        await self.is_possible()
        if self._criu is None:
            raise RequirementMissing(
                "memory snapshots need CRIU 4 or later, and there is none: run `barchan tools install criu`"
            )
        return self._criu

    @asynccontextmanager
    async def job(self) -> AsyncIterator[Path]:
        """A directory for one run."""
        path = self._state_dir / f"{JOB_PREFIX}{secrets.token_hex(6)}"
        path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            await finished(asyncio.to_thread(shutil.rmtree, path))

    def adopted(self) -> None:
        """No run that an earlier node had asked for is under way any more: remove what they have left."""
        for path in self._state_dir.glob(f"{JOB_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)

    async def write_arguments(self, job: Path, userns: str, words: list[str]) -> None:
        found = await self.criu()
        lines = [os.fspath(self._preload), userns, *found.command, *words]
        (job / "args").write_bytes(b"".join(os.fsencode(line) + b"\0" for line in lines))


class Dumping:
    """The part of a container's handle that stores its memory."""

    sandbox_id: str
    guest: GuestConnection
    pid: int
    spec: SandboxSpec
    template: Template
    is_dumped = False
    end_held: Ended | None = None
    ended: asyncio.Future[Ended]
    _backend: "ContainerBackend"
    _counters: Counters
    _cutting: asyncio.Lock
    _recover: Callable[[], None]

    async def dump(self, target: Path, *, keep: bool, cut: str | None = None) -> MemoryRecord:
        """See `Handle.dump`."""
        found = await self._backend.memory.criu()
        if self.spec.zygote is not None:
            raise NotSnapshotable(
                "it was forked from a warm interpreter, in whose sandbox its namespaces lie: create it without one"
            )
        if (link := await self._backend.pager.known_link(self.sandbox_id)) is not None:
            await link.complete()  # what it lacks is not in the processes that CRIU sees
        if shutil.disk_usage(target.parent).free < self._counters.stats().memory_bytes + FREE_BYTES_MIN:
            raise _no_room(self.sandbox_id)
        async with self._cutting:
            return await finished(self._dump(target, found, cut, keep=keep))

    async def _dump(self, target: Path, found: Criu, cut: str | None, *, keep: bool) -> MemoryRecord:
        guest = self._counters.guest
        os.mkdir(target, 0o700)
        was_stopped = is_frozen(guest)
        inside: Inside | None = None
        self.is_dumped = not keep
        done = False
        try:
            await self._detach()
            await _stop_all(guest)
            if cut is not None:  # not sooner: a file operation, which is no program of the guest's, might go on writing
                cutter = await self._backend.cutter()
                await cutter.cut(self.sandbox_id, self._counters, asyncio.Lock(), cut)  # the turn is ours
            if outside := await asyncio.to_thread(outside_connections, self.pid, NETWORKS[self.spec.network]):
                raise NotSnapshotable(f"it has a connection to {outside[0]}, which would not survive: close it first")
            inside = await asyncio.to_thread(look, self.pid, guest)
            await asyncio.to_thread(_begin, target, inside)
            await self._run(target, inside, keep=keep)
            done = True
            record = self._record(target, inside, found)
            await asyncio.to_thread(_finish, target, inside, record)
            return record
        except BaseException as error:
            await finished(asyncio.to_thread(shutil.rmtree, target, ignore_errors=True))
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise _no_room(self.sandbox_id) from error
            if isinstance(error, OSError | ValueError | struct.error):
                raise BackendError(f"the memory of {self.sandbox_id} could not be stored: {error}") from error
            raise
        finally:
            if inside is not None:
                inside.close()
            if keep or not done:
                await self._go_on(was_stopped=was_stopped)

    async def _detach(self) -> None:
        """The init lets go of us: until it has, it holds a socket of the host. Nobody is to reconnect meanwhile."""
        closed = asyncio.Event()
        self.guest.on_lost = closed.set
        self.guest.at_work.clear()
        try:
            await self.guest.request(lambda tag: wire.frame(wire.Request.DETACH, tag))
            async with asyncio.timeout(DETACH_S):
                await closed.wait()
        except (ReadTimeout, TimeoutError) as error:
            raise CapacityError(
                f"the init of {self.sandbox_id} does not answer now: it waits for a program that is stopped",
                retry_after_ms=1000,
            ) from error
        self.guest.on_lost = None

    async def _run(self, target: Path, inside: Inside, *, keep: bool) -> None:
        words = criu.dump_arguments(
            self.pid, target / "criu", os.path.dirname(self._counters.guest), inside.mounts, inside.files, keep=keep
        )
        async with self._backend.memory.job() as job:
            await self._backend.memory.write_arguments(job, "", words)
            fd = os.open(job, os.O_RDONLY | os.O_DIRECTORY)
            try:
                answer = await self._backend.request(
                    "dump", fds=[fd], timeout_s=DUMP_S + ANSWER_SPARE_S, id=self.sandbox_id, seconds=DUMP_S
                )
            except BackendError:
                self._lose()
                raise
            finally:
                os.close(fd)
            answer.close()
            wstatus = answer.message.number("wstatus")
            if wstatus == 0:
                return
            log = _log(job)
            if criu.is_out_of_room(log):
                raise _no_room(self.sandbox_id)
            words_, first = criu.reason(log)
            if os.WIFSIGNALED(wstatus):  # half way: what its processes are now is not known
                self._lose()
                raise InitDied(f"CRIU was killed while it stored the memory of {self.sandbox_id}: {first}")
            if shutil.disk_usage(target).free < FULL_BYTES:
                raise CapacityError(
                    f"the memory of {self.sandbox_id} can't be stored: the disk of {target} is full (CRIU: {first}) "
                    "(try: barchan snapshot rm, barchan image gc)",
                    retry_after_ms=5000,
                )
            why = f"{words_} (CRIU: {first})" if words_ else f"CRIU refuses: {first}"
            raise NotSnapshotable(f"the memory of {self.sandbox_id} can't be stored: {why}")

    def _lose(self) -> None:
        kill(self._counters.guest)

    def tell_end(self, end: Ended) -> None:
        """The init is gone. While a dump that ends the sandbox is under way, that is no news."""
        if self.is_dumped:
            self.end_held = end
        elif not self.ended.done():
            self.ended.set_result(end)
            self.guest.guest_gone(init_died(self.sandbox_id, end.wstatus))

    async def _go_on(self, *, was_stopped: bool) -> None:
        """As it was before: the init runs, and the guest unless it was stopped."""
        guest = self._counters.guest
        with suppress(FileNotFoundError):  # it has ended
            stop(guest)
        thaw(os.path.dirname(guest))
        try:
            answer = await self._backend.request("attach", id=self.sandbox_id)
            await self.guest.reconnect(self._backend.take_socket(answer))
        except (BarchanError, OSError, TimeoutError) as error:
            self.guest.guest_gone(InitDied(f"the init of {self.sandbox_id} can't be reached any more: {error}"))
        finally:
            self.guest.on_lost = self._recover
            self.is_dumped = False
            if self.end_held is not None:
                self.tell_end(self.end_held)
            if not was_stopped:
                thaw(guest)
                self.guest.at_work.set()

    def _record(self, target: Path, inside: Inside, found: Criu) -> MemoryRecord:
        host = os.uname()
        return MemoryRecord(
            criu=found.version,
            kernel=host.release,
            machine=host.machine,
            cpu_features=_cpu_features(),
            uid_base=inside.uid_base,
            mounts=inside.mounts,
            files=inside.files,
            places=inside.places,
            monotonic_ns=inside.clocks_ns[0],
            boottime_ns=inside.clocks_ns[1],
            hostname=self.spec.hostname,
            network=self.spec.network,
            layers=tuple(layer.digest for layer in self.template.layers),
            processes=len(inside.places),
            resident_bytes=sum(path.stat().st_size for path in (target / "criu").glob("pages-*.img")),
        )


async def _stop_all(guest: str) -> None:
    """Stop the init with its guest: by the group of both, for CRIU lets go what it must by that one."""
    tree = os.path.dirname(guest)
    deadline = time.monotonic() + FREEZE_S
    stop(tree)
    while not is_frozen(tree):
        if time.monotonic() > deadline:
            raise CapacityError("the sandbox's processes don't stop: they wait for a disk", retry_after_ms=1000)
        await asyncio.sleep(FREEZE_POLL_S)
    thaw(guest)


def _begin(target: Path, inside: Inside) -> None:
    (target / "criu").mkdir()
    (target / "spool").mkdir()
    program, _, *spools = inside.fds
    _copy(program, target / "init")
    for index, fd in enumerate(spools):
        _copy(fd, target / "spool" / str(index))


def _copy(source: int, target: Path) -> None:
    with open(target, "xb", buffering=0) as file:
        left, at = os.fstat(source).st_size, 0
        while left > 0 and (count := os.sendfile(file.fileno(), source, at, left)) > 0:
            at, left = at + count, left - count
        os.fchmod(file.fileno(), 0o755)


def _finish(target: Path, inside: Inside, record: MemoryRecord) -> None:
    wipe(target / "criu", inside.wiped)
    for path in (target / "criu").glob("stats-*"):
        path.unlink()
    (target / "record.json").write_bytes(msgspec.json.encode(record))


def _no_room(sandbox_id: str) -> CapacityError:
    return CapacityError(f"the node's disk has no room for the memory of {sandbox_id}", retry_after_ms=1000)


def _log(job: Path) -> str:
    with suppress(FileNotFoundError), open(job / "log", "rb") as file:
        return file.read(LOG_BYTES_MAX).decode("utf-8", "replace")
    return ""


def _cpu_features() -> tuple[str, ...]:
    """Of the first processor, as the kernel names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return tuple(value.split())
    return ()


def restore_s(resident_bytes: int) -> int:
    """Seconds that the supervisor gives a restore of that much memory; no sandbox has more than a TiB."""
    return RESTORE_S + min(max(resident_bytes, 0), 1 << 40) // PAGES_BYTES_PER_S


@asynccontextmanager
async def restoring(
    memory: Memory, source: Path, record: MemoryRecord, pager: PagerLink | None
) -> AsyncIterator[tuple[dict[str, int | str], int]]:
    """What the supervisor is told for a restore, beside the spec: keys, and a descriptor. In it, a failure of the
    restore itself becomes one with CRIU's words.

    Raises:
        SnapshotCorrupt: The memory directory is not as `dump` makes it.
        SnapshotIncompatible: It is of another kind of host.
        RequirementMissing: There is no CRIU.
    """
    check(record, this_host((await memory.criu()).version))
    images = source / "criu"
    userns = [os.fspath(path) for path in images.glob("userns-*.img")]
    names = (*record.mounts, *record.files)
    if len(userns) != 1 or len(record.files) < 2 or any(":" in name for name in record.mounts) or "" in names:
        raise SnapshotCorrupt(f"{source} is no memory directory of this release")
    if not all(is_place(place) for place in record.places.values()):
        raise SnapshotCorrupt(f"{source} names groups that can't be")
    async with memory.job() as job:
        work_dir = os.fspath(pager.directory) if pager is not None else "/run/job"
        words = criu.restore_arguments(images, record.mounts, record.files, FIRST_FD, work_dir, lazy=pager is not None)
        await memory.write_arguments(job, userns[0], words)
        (job / "places").write_text(places_text(record.places))
        (job / "memory").symlink_to(Path.cwd() / source)
        fd = os.open(job, os.O_RDONLY | os.O_DIRECTORY)
        keys: dict[str, int | str] = {
            "mounts": ":".join(record.mounts),
            "spools": len(record.files) - 2,
            "monotonic_ns": record.monotonic_ns,
            "boottime_ns": record.boottime_ns,
            "seconds": restore_s(record.resident_bytes),
        }
        try:
            yield keys, fd
        except BootFailed as error:
            said = criu.reason(_log(job))[1]
            raise BootFailed(f"{error}: {said}" if said else str(error), **error.details) from error
        finally:
            os.close(fd)


async def reseed(guest: GuestConnection) -> None:
    """Fresh entropy for the kernel's generator, before anything of a restored guest runs."""
    entropy = secrets.token_bytes(ENTROPY_BYTES)
    await guest.request(lambda tag: wire.frame(wire.Request.RESEED, tag, wire.blob(entropy)))
