"""The pager: takes sandboxes from its node, and tells it how their memory came in."""

import asyncio
import os
import resource
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from barchan.errors import BarchanError, CapacityError, Conflict, ConnectionLost, LocalProtocolError
from barchan.image.lazy.control import Answer, Control
from barchan.snapshot.pager.keeper import SERVED_MAX, Keeper
from barchan.snapshot.pager.served import Dropped, Served
from barchan.snapshot.pager.source import Chunks, Source
from barchan.snapshot.shelf import Shelf
from barchan.wire import supervisor as wire

VERSION: Final = 1
IDLE_S: Final = 30.0
"""Without a node and without work it ends after that long."""
END_WAIT_S: Final = 5.0
"""For the node, which is to record why a sandbox ends before it does."""
_THREADS = 2
_SWITCH_S = 0.0005


class Pager:
    """Serves until nobody needs it.

    Args:
        root: Its directory: the control socket and CRIU's work directories. Leftovers are removed.
        shelf: Where the node keeps snapshots.

    Raises:
        OSError: The directory can't be used.
    """

    def __init__(self, root: Path, shelf: Path, keeper: Keeper) -> None:
        self._root = root
        self._shelf = Shelf(shelf)
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._served: dict[str, tuple[Served, asyncio.Task[None]]] = {}
        self._ended: dict[str, asyncio.Event] = {}  # of sandboxes that are being ended, set by the node
        self._executor = ThreadPoolExecutor(_THREADS, "barchan-pager")
        self._turn = asyncio.Lock()
        self._chunks = Chunks()
        self._is_last = False
        self._finished = asyncio.Event()
        sys.setswitchinterval(_SWITCH_S)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for left in root.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
        self._control = Control(
            root / "pager.sock",
            {
                "hello": self._hello,
                "serve": self._serve,
                "drop": self._drop,
                "status": self._status,
                "ended": self._node_ended,
                "shutdown": self._shutdown,
            },
        )
        self._loop.add_reader(keeper.ended, self._unkept)

    async def run(self) -> None:
        """Until it is idle for long, or (when its keeper is gone) done with what it has."""
        idle_since_s = self._loop.time()
        while not (self._is_last and not self._served):
            if self._served or self._control.is_connected:
                idle_since_s = self._loop.time()
            elif self._loop.time() - idle_since_s > IDLE_S:
                break
            try:
                async with asyncio.timeout(IDLE_S / 4):
                    await self._finished.wait()
            except TimeoutError:
                continue
            self._finished.clear()
        self._control.close()
        self._executor.shutdown()

    def _unkept(self) -> None:
        """Without the keeper nothing new is begun: the node starts another pager when this one has ended."""
        self._loop.remove_reader(self._keeper.ended)
        self._is_last = True
        self._finished.set()

    async def _hello(self, message: wire.Message, fds: list[int]) -> Answer:
        _refuse(fds)
        if message.number("version") != VERSION:
            raise LocalProtocolError(f"the node speaks version {message.get('version')}, and this pager {VERSION}")
        return {"version": VERSION, "pid": os.getpid()}, []

    async def _serve(self, message: wire.Message, fds: list[int]) -> Answer:
        _refuse(fds)
        sandbox_id, snapshot_id, group = message.get("id"), message.get("snapshot"), message.get("group")
        if self._is_last:
            raise ConnectionLost("this pager ends when it is done with what it has")
        if len(self._served) >= SERVED_MAX:
            raise CapacityError(f"the memory of {SERVED_MAX} sandboxes is coming in already", retry_after_ms=1000)
        if sandbox_id in self._served or "/" in sandbox_id or sandbox_id.startswith("."):
            raise Conflict(f"the pager serves a sandbox {sandbox_id} already, or can't")
        source = await self._loop.run_in_executor(self._executor, self._open, snapshot_id)
        try:
            served = Served(
                sandbox_id,
                source,
                self._root / sandbox_id,
                group,
                self._keeper,
                self._executor,
                self._turn,
                self._before_end,
                is_alone=not self._served,
            )
        except BaseException:
            source.close()
            raise
        self._served[sandbox_id] = served, self._loop.create_task(self._run(served))
        return {"directory": os.fspath(self._root / sandbox_id)}, []

    def _open(self, snapshot_id: str) -> Source:
        file = self._shelf.open(snapshot_id)
        try:
            return Source(file, self._chunks)
        except BaseException:
            file.close()
            raise

    async def _run(self, served: Served) -> None:
        try:
            placed = await served.run()
        except Exception as error:
            self._log(served.sandbox_id, error)
            if not isinstance(error, Dropped):
                self._control.event("lost", id=served.sandbox_id, **_described(error))
        else:
            self._control.event(
                "placed",
                id=served.sandbox_id,
                faults=placed.faults,
                faulted_bytes=placed.faulted_bytes,
                streamed_bytes=placed.streamed_bytes,
                elapsed_ms=placed.elapsed_ms,
            )
        finally:
            del self._served[served.sandbox_id]
            if not self._served:
                self._chunks.clear()
            self._finished.set()

    async def _before_end(self, sandbox_id: str, error: BaseException) -> None:
        """Tell the node, which records the cause and ends the sandbox; we do so too, whatever it does."""
        if not self._control.is_connected:
            return
        ended = self._ended[sandbox_id] = asyncio.Event()
        self._control.event("failed", id=sandbox_id, **_described(error))
        try:
            async with asyncio.timeout(END_WAIT_S):
                await ended.wait()
        except TimeoutError as late:
            self._log(sandbox_id, late)
        finally:
            del self._ended[sandbox_id]

    async def _node_ended(self, message: wire.Message, fds: list[int]) -> Answer:
        _refuse(fds)
        if (ended := self._ended.get(message.get("id"))) is not None:
            ended.set()
        return {}, []

    async def _drop(self, message: wire.Message, fds: list[int]) -> Answer:
        _refuse(fds)
        if (found := self._served.get(message.get("id"))) is not None:
            served, task = found
            served.drop()
            await asyncio.wait({task})
        return {}, []

    async def _shutdown(self, message: wire.Message, fds: list[int]) -> Answer:
        """All sandboxes have ended."""
        _refuse(fds)
        for served, _ in self._served.values():
            served.drop()
        self._is_last = True
        self._finished.set()
        return {}, []

    async def _status(self, message: wire.Message, fds: list[int]) -> Answer:
        _refuse(fds)
        return {"ids": ",".join(self._served)}, []

    def _log(self, sandbox_id: str, error: BaseException) -> None:
        sys.stderr.write(f"{sandbox_id}: {type(error).__name__}: {error}\n")
        sys.stderr.flush()


def _described(error: BaseException) -> dict[str, str]:
    code = error.code if isinstance(error, BarchanError) else "backend"
    return {"code": code, "cause": (str(error) or type(error).__name__).replace("\0", "?")[:2000]}


def _refuse(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
