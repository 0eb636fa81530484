"""One machine with a disk of its own, and a screen."""

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

from barchan.backends.qemu.handle import MachineHandle
from barchan.backends.vm.screen import QemuScreen
from barchan.core.finished import finished
from barchan.errors import BackendError, CapacityError
from barchan.image.disks import pack_files
from barchan.wire import guest as wire

SYNC_S = 60.0
PICTURE = "/dev/shm/screen.png"


class VmHandle(MachineHandle):
    """See `backends.base.Handle` and `backends.screen.HasScreen`."""

    def __init__(self, *made: Any) -> None:
        super().__init__(*made)
        self.screen = QemuScreen(self.machine, PICTURE)

    async def sync(self) -> None:
        """Its agent does it, also while its programs stand still."""
        process_id = f"barchan-sync-{secrets.token_hex(6)}"
        flags = wire.StartFlag.FOLLOW | wire.StartFlag.PLATFORM
        start = wire.Start(process_id=process_id, argv=("sync",), operation=True, flags=flags)
        process = await self.counting.operate(start, None)
        try:
            async with asyncio.timeout(SYNC_S):
                ended = await asyncio.shield(process.ended)
        except TimeoutError as error:
            raise CapacityError(
                f"{self.sandbox_id} has not written its files to its disk in {SYNC_S:g} s", retry_after_ms=1000
            ) from error
        if ended.wstatus != 0:
            raise BackendError(f"{self.sandbox_id} can't write its files to its disk: wait status {ended.wstatus}")

    async def pack(self, target: Path) -> None:
        """See `Handle.pack`: the disk of this sandbox, which lies above those of its template."""
        name = f"{self.sandbox_id}-{secrets.token_hex(4)}"
        await self.cut(name)
        try:
            await self.pack_cut(name, target)
        finally:
            await asyncio.shield(self.outer.remove_cut(name))

    async def pack_cut(self, name: str, target: Path) -> None:
        disk = self.shape.disk.lstrip("/")
        source = await self.outer.open_in_cut(name, disk)
        await finished(asyncio.to_thread(_pack, source, disk, target))


def _pack(source: int, disk: str, target: Path) -> None:
    with os.fdopen(source, "rb") as file:
        pack_files({disk: file}, target)
