"""What our starter says while it brings a guest up."""

import asyncio
from typing import Final

from barchan.backends.guest import Reader
from barchan.errors import BootFailed
from barchan.wire import guest as wire

READY: Final = b"ready\n"
START_S: Final = 60.0  # on a machine that is busy with many others
KEPT_BYTES: Final = 2048


class Starter(Reader):
    """The output of one: whether it is ready, and the last of what it and runsc have complained about."""

    def __init__(self) -> None:
        super().__init__()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._complaint = b""

    def output(self, stream: int, offset: int, data: bytes) -> None:
        """See `Reader.output`."""
        self.consumed[stream] = offset + len(data)
        if stream == wire.STDOUT and data.startswith(READY) and not self._ready.done():
            self._ready.set_result(None)
        elif stream == wire.STDERR:
            self._complaint = (self._complaint + data)[-KEPT_BYTES:]

    def finished(self) -> None:
        """See `Reader.finished`."""
        self._fail(BootFailed(f"what runs the guest has ended: {self.words()}"))

    def closed(self, stream: int) -> None:
        """See `Reader.closed`."""

    def lost(self, error: Exception) -> None:
        """See `Reader.lost`."""
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()

    async def ready(self) -> None:
        """Wait until a guest can be run.

        Raises:
            BootFailed: It has ended. TimeoutError: It takes too long.
        """
        async with asyncio.timeout(START_S):
            await self._ready

    def words(self) -> str:
        """The last lines of its complaints; empty: there were none."""
        lines = self._complaint.decode("utf-8", "replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-3:])
