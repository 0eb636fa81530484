"""A sandbox's writable layer as it is at one moment: a cut, which other sandboxes start from, or which becomes a file.

A cut is a btrfs snapshot, made while the guest is stopped; barchan-pack reads it while the guest goes on.

The node makes and removes the snapshots itself, in threads, with descriptors that the supervisor hands over: making one
waits for the disk, which the supervisor never may.
"""

import asyncio
import ctypes
import errno
import os
import secrets
import stat
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from barchan.backends.container.cgroup import Counters, frozen
from barchan.core.finished import finished
from barchan.errors import BackendError, BarchanError, CapacityError, GuestWrecked

PACK_TIMEOUT_S = 600.0
COPIES_MAX = 64  # of one cut, that are made ahead; as the supervisor has it
_COPIES, _COPY = ".copies", "copy"  # copy N of a cut is CUT.copies/N/copy
RETRY_AFTER_MS = 1000
FLUSH_BYTES = (
    8 << 20
)  # not on disk: with so much, it is worth two more milliseconds to write it before the guest is stopped
_SNAP_CREATE_V2 = 0x50009417  # _IOW(0x94, 23, 4096 bytes)
_SNAP_DESTROY = 0x5000940F  # _IOW(0x94, 15, 4096 bytes)
_READ_ONLY = 1 << 1
_ARGUMENT_BYTES = 4096
_TREE, _ROOM = 3, 4  # exit codes of barchan-pack: the tree can't be packed; the disk is full
_libc = ctypes.CDLL(None, use_errno=True)  # fcntl.ioctl would hold the interpreter's lock while the disk works


class Cutter:
    """Cuts of one pool. Owns `upper` (a subvolume per sandbox) and `cuts` (where snapshots of them go)."""

    def __init__(self, upper: int, cuts: int, packer: Path) -> None:
        self._upper = upper
        self._cuts = cuts
        self._packer = packer
        self._packing = asyncio.Semaphore(os.cpu_count() or 1)
        self._tasks: set[asyncio.Task[object]] = set()

    async def close(self) -> None:
        """Cancel whoever is cutting or packing, and close the descriptors."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        os.close(self._upper)
        os.close(self._cuts)

    async def cut(self, sandbox_id: str, counters: Counters, turn: asyncio.Lock, name: str, copies: int = 0) -> None:
        """Keep a sandbox's layer as it is, until `remove` or the next node. A guest that is stopped already stays so.

        Args:
            turn: Of this sandbox: the first of two cuts would let the guest go on in the middle of the second.
            copies: Sandboxes that will start from it: each finds a copy that is its own, as far as `COPIES_MAX` goes.

        Raises:
            CapacityError: The pool is full, or the guest does not stop.

        Cancellation: No cut is left.
        """
        with self._counted():
            try:
                async with turn:
                    await finished(asyncio.to_thread(self._cut, sandbox_id, name, counters))
                if copies:
                    await finished(asyncio.to_thread(self._copy, name, min(copies, COPIES_MAX)))
            except BaseException:
                await self._drop(name)
                raise

    async def remove(self, name: str) -> None:
        """Let go of a cut; one that is not there needs nothing."""
        with self._counted():
            await self._drop(name)

    async def pack(self, sandbox_id: str, counters: Counters, turn: asyncio.Lock, target: Path, bytes_max: int) -> None:
        """Pack a sandbox's layer into the file `target`.

        Args:
            turn: As for `cut`.
            bytes_max: Of the file.

        Raises:
            CapacityError: The pool or the target's disk is full, or the guest does not stop.
            GuestWrecked: What the guest made can't be a layer.

        Cancellation: Nothing is left but the target, which may be half written.
        """
        with self._counted():
            async with self._packing:
                name = f"{sandbox_id}-{secrets.token_hex(4)}"
                await self.cut(sandbox_id, counters, turn, name)
                try:
                    await self._pack(name, target, bytes_max)
                finally:
                    await self._drop(name)

    async def pack_cut(self, name: str, target: Path, bytes_max: int) -> None:
        """Pack a cut into the file `target`, as `pack` does; the cut stays."""
        with self._counted():
            async with self._packing:
                await self._pack(name, target, bytes_max)

    def open_file(self, name: str, path: str) -> int:
        """Open a plain file of a cut for reading, following no link in there. Blocking; the caller closes it.

        Raises:
            BackendError: There is none.
        """
        at = os.open(f"{name}/u", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._cuts)
        try:
            *folders, last = path.split("/")
            for part in folders:
                above, at = at, os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(above)
            fd = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        except OSError as error:
            raise BackendError(f"{path} of the cut {name} can't be read: {error.strerror}") from error
        finally:
            os.close(at)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BackendError(f"{path} of the cut {name} is no plain file")
        return fd

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Whoever uses the descriptors, so that `close` ends that first."""
        task = asyncio.current_task()
        assert task is not None
        is_outermost = task not in self._tasks
        self._tasks.add(task)
        try:
            yield
        finally:
            if is_outermost:
                self._tasks.discard(task)

    async def _pack(self, name: str, target: Path, bytes_max: int) -> None:
        tree = os.open(f"{name}/u", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._cuts)
        try:
            await self._run(tree, target, bytes_max)
        finally:
            os.close(tree)

    def _cut(self, sandbox_id: str, name: str, counters: Counters) -> None:
        try:
            source = os.open(sandbox_id, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._upper)
            try:
                if counters.dirty_bytes() >= FLUSH_BYTES:
                    self._flush(source, name)
                with frozen(counters.guest):
                    make_snapshot(source, self._cuts, name)
            finally:
                os.close(source)
        except OSError as error:
            raise _failed(f"no snapshot of {sandbox_id} could be made", error) from error

    def _copy(self, name: str, count: int) -> None:
        """Each in a directory of its own, which the kernel holds until that is written: so many are written at once."""
        try:
            with ExitStack() as opened:
                source = opened.enter_context(_directory(name, self._cuts))
                os.mkdir(name + _COPIES, 0o700, dir_fd=self._cuts)
                places = []
                for number in range(count):
                    os.mkdir(f"{name}{_COPIES}/{number}", 0o700, dir_fd=self._cuts)
                    places.append(opened.enter_context(_directory(f"{name}{_COPIES}/{number}", self._cuts)))
                with ThreadPoolExecutor(count) as threads:
                    for made in [threads.submit(make_snapshot, source, place, _COPY, 0) for place in places]:
                        made.result()
        except OSError as error:
            raise _failed(f"no copies of {name} could be made", error) from error

    def _flush(self, source: int, name: str) -> None:
        """Making a snapshot writes what is not on disk yet; the guest need not wait for that."""
        try:
            make_snapshot(source, self._cuts, name)
        finally:
            self._remove(name)

    async def _drop(self, name: str) -> None:
        await finished(asyncio.to_thread(self._remove, name))

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            remove_snapshot(self._cuts, name)
        with suppress(FileNotFoundError), _directory(name + _COPIES, self._cuts) as copies:
            for number in os.listdir(copies):
                with _directory(number, copies) as place, suppress(FileNotFoundError):
                    remove_snapshot(place, _COPY)
                os.rmdir(number, dir_fd=copies)
            os.rmdir(name + _COPIES, dir_fd=self._cuts)

    async def _run(self, tree: int, target: Path, bytes_max: int) -> None:
        process = await asyncio.create_subprocess_exec(
            self._packer,
            *(f"/proc/self/fd/{tree}", target, str(bytes_max)),
            pass_fds=(tree,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(PACK_TIMEOUT_S):
                _, said = await process.communicate()
        except TimeoutError as error:
            raise BackendError(f"packing the layer took more than {PACK_TIMEOUT_S:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await finished(process.wait())
        reason = said.decode("utf-8", "replace").strip()[-300:]
        if process.returncode == _TREE:
            raise GuestWrecked(f"the sandbox's files can't be a layer: {reason}")
        if process.returncode == _ROOM:
            raise CapacityError(f"no room for the layer: {reason}", retry_after_ms=RETRY_AFTER_MS)
        if process.returncode != 0:
            raise BackendError(f"packing the layer failed with exit code {process.returncode}: {reason}")


def make_snapshot(source: int, directory: int, name: str, flags: int = _READ_ONLY) -> None:
    """A snapshot of the subvolume `source` in `directory`; first its unwritten data goes to disk."""
    _ioctl(directory, _SNAP_CREATE_V2, struct.pack("=qQQ32x", source, 0, flags) + name.encode())


def remove_snapshot(directory: int, name: str) -> None:
    _ioctl(directory, _SNAP_DESTROY, struct.pack("=q", 0) + name.encode())


@contextmanager
def _directory(path: str, at: int) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)


def _failed(what: str, error: OSError) -> BarchanError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError("the pool is full", retry_after_ms=RETRY_AFTER_MS)
    return BackendError(f"{what}: {error}")


def _ioctl(fd: int, request: int, argument: bytes) -> None:
    buffer = ctypes.create_string_buffer(argument, _ARGUMENT_BYTES)
    if _libc.ioctl(fd, ctypes.c_ulong(request), buffer) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
