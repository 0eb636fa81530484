"""A microVM: what its guest has written comes out as a tar that its init makes."""

import asyncio
import secrets
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from barchan.backends.guest import GuestProcess, Reader
from barchan.backends.microvm.disks import disk_bytes
from barchan.backends.qemu.handle import MachineHandle
from barchan.core.finished import finished
from barchan.errors import BackendError, BarchanError, CapacityError, GuestWrecked, InvalidSpec
from barchan.image.pack import Limits, pack_tar, pack_tree
from barchan.wire import guest as wire

SYNC_S = 60.0
TAR_S = 600.0
SPOOL_BYTES = 4 << 20
LAYER_DISKS_MAX = 2  # a tar of a disk, in sizes of it: parts of sparse files take more room in it
ERROR_BYTES_MAX = 2000


class _ToFile(Reader):
    """Takes stdout into a file of at most so many bytes."""

    def __init__(self, file: BinaryIO, bytes_max: int) -> None:
        super().__init__()
        self.error = b""
        self.failed: Exception | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._file = file
        self._left = bytes_max

    def output(self, stream: int, offset: int, data: bytes) -> None:
        self.consumed[stream] = offset + len(data)
        if stream == wire.STDERR:
            self.error = (self.error + data)[-ERROR_BYTES_MAX:]
            return
        self._left -= len(data)
        if self.failed is None and self._left < 0:
            self.failed = GuestWrecked("the guest's files are more than its disk has room for")
        if self.failed is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.failed = error
        if self.failed is not None:
            self._end()

    def finished(self) -> None:
        self._end()

    def lost(self, error: Exception) -> None:
        self.failed = self.failed or error
        self._end()

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class MicrovmHandle(MachineHandle):
    """See `backends.base.Handle`."""

    async def sync(self) -> None:
        await self._operation("sync", None, SYNC_S)

    async def pack(self, target: Path) -> None:
        """See `Handle.pack`. Its programs stand still while its init writes the tar."""
        bytes_max = LAYER_DISKS_MAX * disk_bytes(self.spec.disk_mib)
        with tempfile.TemporaryFile(dir=target.parent) as file:
            async with self._turn, self.standing():
                await self._operation("layer", _ToFile(file, bytes_max), TAR_S)
            file.seek(0)
            limits = Limits(bytes_max=bytes_max)
            try:
                await finished(asyncio.to_thread(pack_tar, file, target, limits=limits))
            except InvalidSpec as error:
                raise GuestWrecked(f"the sandbox's files can't be a layer: {error}") from error

    async def pack_cut(self, name: str, target: Path) -> None:
        """See `Handle.pack_cut`. An empty layer: the disk of the same moment lies with the memory."""
        with tempfile.TemporaryDirectory(dir=target.parent) as empty:
            await finished(asyncio.to_thread(pack_tree, Path(empty), target))

    async def _operation(self, name: str, reader: _ToFile | None, within_s: float) -> None:
        """Have the init do something with its own rights, beside the guest's limits.

        Raises:
            BackendError: It failed, or took too long. GuestWrecked: It gave too much.
        """
        start = wire.Start(
            process_id=f"barchan-{name}-{secrets.token_hex(6)}",
            argv=(name,),
            operation=True,
            flags=wire.StartFlag.BLOCK | wire.StartFlag.FOLLOW | wire.StartFlag.PLATFORM,
            spool_bytes=SPOOL_BYTES,
        )
        process = await self.counting.operate(start, reader)
        try:
            async with asyncio.timeout(within_s):
                if reader is not None:
                    await reader.done
                    if reader.failed is not None:
                        raise reader.failed
                ended = await asyncio.shield(process.ended)
        except BaseException as error:
            await finished(self._kill(process))
            if isinstance(error, TimeoutError):
                raise CapacityError(
                    f"{name} took more than {within_s:g} s in {self.sandbox_id}", retry_after_ms=1000
                ) from error
            raise
        if ended.wstatus != 0:
            said = reader.error.decode("utf-8", "replace") if reader is not None else ""
            raise BackendError(f"the guest of {self.sandbox_id} could not {name}: wait status {ended.wstatus} {said}")

    async def _kill(self, process: GuestProcess) -> None:
        """End an operation that has failed, also while the guest's programs stand still: nobody is to wait for them."""
        with suppress(BarchanError, OSError):  # what it failed by is what is told
            await self.guest.request(lambda tag: wire.signal(tag, process.handle, signal.SIGKILL, wire.Scope.ALL))
