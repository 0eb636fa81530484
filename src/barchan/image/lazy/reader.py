"""What the reader does for the kernel and for the node. One event loop; threads only for the device and for work."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn
from weakref import WeakValueDictionary

from barchan.errors import BlobUnavailable, LocalProtocolError, NotFound
from barchan.image.erofs import check_layer
from barchan.image.lazy import mounter
from barchan.image.lazy.cache import RECORDED_BYTES_MAX, Cache
from barchan.image.lazy.control import Answer, Control
from barchan.image.lazy.device import Device, File
from barchan.image.lazy.fetch import Fetcher, StorePair, Traffic
from barchan.image.lazy.protocol import node_id_of
from barchan.image.lazy.waits import Waits
from barchan.image.stored import read_lazy, write_durably
from barchan.wire import supervisor as wire

VERSION: Final = 1
WORKERS: Final = 4
DYING_POLL_S: Final = 0.25  # how soon a read is given up whose reader was killed
_SIGKILL_BIT: Final = 1 << 8

_log = logging.getLogger(__name__)


class _Report:
    """A read that can't be answered; the node has to end whoever waits for it first."""

    def __init__(self, layer: str, pid: int, cause: str) -> None:
        self.layer = layer
        self.pid = pid
        self.cause = cause
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Reader:
    """Serves layers through one FUSE connection.

    Args:
        root: Directory of the cache; the description of each layer in use is kept there, too.
        socket_path: Where the node comes to.
        budget_bytes, wait_s: See `Cache`, `Traffic`.
        child: As `mounter.start_mounter` gave it.
    """

    def __init__(
        self, root: Path, socket_path: Path, budget_bytes: int, wait_s: float, child: tuple[socket.socket, int]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._root = root
        self._cache = Cache(root, budget_bytes)
        self._pool = ThreadPoolExecutor(WORKERS, "reader")
        self._traffic = Traffic(self._cache, self._pool, wait_s)
        self._mounter, self._mounter_pid = child
        self._mounting = asyncio.Lock()
        self._fetchers: dict[int, Fetcher] = {}
        self._broken: dict[int, str] = {}  # layers whose descriptions could not be used, by node id
        self._checked: set[str] = set()  # layers whose structure was looked at
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._stores: dict[str, StorePair] = {}
        self._reports: dict[int, _Report] = {}
        self._reports_made = 0
        self._waits = Waits()
        self._device: Device | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()
        for path in root.glob("*.lazy"):
            self._take_over(path.stem)
        self._loop.add_reader(os.pidfd_open(self._mounter_pid), _end_without_mounter)
        self._control = Control(
            socket_path,
            {
                "hello": self._hello,
                "mount": self._mount,
                "hold": self._hold,
                "drop": self._drop,
                "prefetch": self._prefetch,
                "record": self._record,
                "stats": self._stats,
                "waits": self._waited,
                "ended": self._acknowledged,
            },
        )

    @property
    def is_idle(self) -> bool:
        """Nobody has given it anything to serve."""
        return self._device is None and not self._control.is_connected

    async def run(self) -> None:
        """Until the file system is gone."""
        while not self.ended.is_set():
            self._cache.tick()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.ended.wait()
        self._control.close()
        for fetcher in self._fetchers.values():
            await fetcher.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # layers

    def _open(self, digest: str) -> Fetcher:
        """The layer whose description lies in the cache's directory."""
        described = read_lazy(self._root / f"{digest}.lazy")
        url, index = described.url, described.index
        store = self._stores.get(url)
        if store is None:
            store = self._stores[url] = StorePair.open(url, self._traffic.wait_s)
        layer = self._cache.open(digest, index.raw_bytes, index.chunk_bytes)
        fetcher = self._fetchers[node_id_of(digest)] = Fetcher(store, index, layer, self._traffic)
        self._broken.pop(node_id_of(digest), None)
        return fetcher

    def _take_over(self, digest: str) -> None:
        """What an earlier reader served. One that can't be opened keeps nobody from the others; reads try again."""
        if not _is_digest(digest):
            return
        try:
            self._open(digest)
        except Exception as error:
            _log.warning("layer %s can't be served now: %s", digest, error)
            self._broken[node_id_of(digest)] = digest

    def _find(self, node_id: int) -> File | None:
        fetcher = self._fetchers.get(node_id)
        return None if fetcher is None else fetcher.layer

    def _known(self, message: wire.Message) -> Fetcher:
        fetcher = self._fetchers.get(node_id_of(message.get("layer")))
        if fetcher is None:
            raise NotFound(f"the reader does not hold layer {message.get('layer')}")
        return fetcher

    def _lock(self, digest: str) -> asyncio.Lock:
        """One of mount, hold and drop of a layer at a time; the caller keeps the lock while it uses it."""
        return self._locks.setdefault(digest, asyncio.Lock())

    async def _take(self, digest: str, described: Path) -> Fetcher:
        """The layer, known from now on: its description is copied, for the image may be removed. Under its lock."""
        fetcher = self._fetchers.get(node_id_of(digest))
        if fetcher is None:
            path = self._root / f"{digest}.lazy"
            if described != path:  # a copy that is there already could not be used
                fresh = path.with_suffix(".new")
                await asyncio.to_thread(lambda: write_durably(fresh, described.read_bytes()))
                fresh.replace(path)
            fetcher = self._open(digest)
        fetcher.layer.pinned.update(fetcher.index.first_chunks())
        return fetcher

    async def _check(self, fetcher: Fetcher) -> None:
        """Look at a layer's structure before the kernel does: its bytes are those of whoever wrote the index."""
        if fetcher.index.layer in self._checked:
            return

        def read(offset: int, size: int) -> bytes:
            data = fetcher.layer.read(offset, size)
            if data is None:
                data = asyncio.run_coroutine_threadsafe(fetcher.read(offset, size), self._loop).result()
            return data

        thread = ThreadPoolExecutor(1, "check")  # of its own: it may wait for a store
        try:
            await self._loop.run_in_executor(thread, check_layer, read, f"layer {fetcher.index.layer}")
        finally:
            thread.shutdown(wait=False)
        self._checked.add(fetcher.index.layer)

    # what the kernel asks for

    def _missed(self, unique: int, node_id: int, offset: int, size: int, pid: int) -> None:
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._answer(unique, node_id, offset, size, pid)))

    def _over(self) -> None:
        self._loop.call_soon_threadsafe(self.ended.set)

    async def _answer(self, unique: int, node_id: int, offset: int, size: int, pid: int) -> None:
        assert self._device is not None
        began = self._loop.time()
        work = self._loop.create_task(self._obtain(node_id, offset, size, pid))
        while not (await asyncio.wait({work}, timeout=DYING_POLL_S))[0]:
            self._waits.begin(unique, pid, began)
            if pid and _is_dying(pid):  # it will not see any answer, and waits for one nevertheless
                work.cancel()
                await asyncio.wait({work})
                break
        self._waits.end(unique, self._loop.time())
        data = None if work.cancelled() else work.result()
        if data is None:
            self._device.fail(unique, errno.EIO)
        else:
            self._device.reply(unique, data)

    async def _obtain(self, node_id: int, offset: int, size: int, pid: int) -> bytes | None:
        """The bytes; None once nobody is left who could see that they are missing."""
        layer = self._broken.get(node_id, f"{node_id:x}")
        try:
            fetcher = self._fetchers.get(node_id) or self._open(layer)
            layer = fetcher.index.layer
            return await fetcher.read(offset, size)
        except BlobUnavailable as error:
            cause = str(error)
        except OSError as error:
            cause = f"the cache can't be used: {error}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():  # by `_answer`; otherwise what it waited for was given up
                raise
            cause = "the layer is served no more"
        except Exception as error:  # whatever it is, the node is told before the guest can see it
            _log.exception("a read of layer %s failed", layer)
            cause = str(error) or repr(error)
        if pid != self._mounter_pid:
            await self._report(_Report(layer, pid, cause))
        return None

    async def _report(self, report: _Report) -> None:
        self._reports_made += 1
        number = self._reports_made
        self._reports[number] = report
        try:
            self._tell(number, report)
            await report.ended
        finally:
            del self._reports[number]

    def _tell(self, number: int, report: _Report) -> None:
        cause = report.cause.replace("\0", "?")[:1000].encode("utf-8", "replace").decode()
        self._control.event("unavailable", report=number, layer=report.layer, pid=report.pid, cause=cause)

    # what the node asks for

    async def _hello(self, message: wire.Message, fds: list[int]) -> Answer:
        """With the FUSE connection's descriptor: served from now on, unless one is served already."""
        if message.number("version") != VERSION:
            _close(fds)
            raise LocalProtocolError(f"this reader speaks version {VERSION}, the node {message.get('version')}")
        if fds and self._device is None:
            self._device = Device(fds.pop(0), self._find, self._missed, self._over)
            self._device.start()
        _close(fds)
        for number, report in self._reports.items():
            self._tell(number, report)
        return {"version": VERSION, "pid": os.getpid()}, []

    async def _mount(self, message: wire.Message, fds: list[int]) -> Answer:
        """With the FUSE file system's descriptor: gives one of the layer's own file system, mounted nowhere."""
        try:
            if len(fds) != 1:
                raise LocalProtocolError("mount goes with one descriptor")
            digest = _digest(message)
            async with self._lock(digest):
                fetcher = await self._take(digest, Path(message.get("path")))
                await fetcher.load(fetcher.index.first_chunks())
                await self._check(fetcher)
                async with self._mounting:
                    work = asyncio.to_thread(mounter.ask, self._mounter, digest, fds[0])
                    return {}, [await asyncio.shield(work)]
        finally:
            _close(fds)

    async def _hold(self, message: wire.Message, fds: list[int]) -> Answer:
        """The layer is mounted, by an earlier reader: what a mount pins is pinned."""
        _close(fds)
        digest = _digest(message)
        async with self._lock(digest):
            await self._take(digest, Path(message.get("path")))
        return {}, []

    async def _drop(self, message: wire.Message, fds: list[int]) -> Answer:
        """The layer is mounted no more. With its image gone, so is what is cached of it; else that may stay."""
        _close(fds)
        digest = _digest(message)
        async with self._lock(digest):
            self._broken.pop(node_id_of(digest), None)
            fetcher = self._fetchers.pop(node_id_of(digest), None)
            if fetcher is not None:
                await fetcher.close()
            (self._root / f"{digest}.lazy").unlink(missing_ok=True)
            if message.get("data", "remove") == "keep":
                self._cache.rest(digest)
            else:
                self._cache.remove(digest)
            self._checked.discard(digest)
        return {}, []

    async def _prefetch(self, message: wire.Message, fds: list[int]) -> Answer:
        """Fetch chunks that will be wanted, and pin them as far as half the budget goes; answered at once."""
        _close(fds)
        fetcher = self._known(message)
        try:
            chunks = [int(word) for word in message.get("chunks").split(",") if word]
        except ValueError as error:
            raise LocalProtocolError("chunks are numbers with commas between") from error
        chunks = [chunk for chunk in chunks if 0 <= chunk < fetcher.index.count]
        pins = self._cache.budget_bytes // 2 - sum(
            len(layer.pinned) * layer.chunk_bytes for layer in self._cache.layers.values()
        )
        fetcher.layer.pinned.update(chunks[: max(0, pins // fetcher.index.chunk_bytes)])
        self._spawn(self._load(fetcher, chunks))
        return {}, []

    async def _load(self, fetcher: Fetcher, chunks: list[int]) -> None:
        with suppress(BlobUnavailable):  # whoever reads them will be told
            await fetcher.load(chunks)

    async def _record(self, message: wire.Message, fds: list[int]) -> Answer:
        """Begin to note which chunks are read first, or (`stop`) tell them in that order."""
        _close(fds)
        layer = self._known(message).layer
        if message.get("state") == "start":
            layer.touched = {}
            return {}, []
        touched, layer.touched = layer.touched or {}, None
        most = RECORDED_BYTES_MAX // layer.chunk_bytes
        return {"chunks": ",".join(str(chunk) for chunk in list(touched)[:most])}, []

    async def _stats(self, message: wire.Message, fds: list[int]) -> Answer:
        _close(fds)
        cache, traffic = self._cache.statistics(), self._traffic
        return {
            "bytes_fetched": traffic.bytes_fetched,
            "requests": traffic.requests,
            "retries": traffic.retries,
            "bytes_cached": cache.bytes_cached,
            "budget_bytes": cache.budget_bytes,
            "evictions": cache.evictions,
            "uncached": cache.uncached,
            "hits": sum(layer.hits for layer in self._cache.layers.values()),
            "waiting": len(self._reports),
        }, []

    async def _waited(self, message: wire.Message, fds: list[int]) -> Answer:
        """How long reads of a control group have waited in the last `ms`."""
        _close(fds)
        now = self._loop.time()
        waited_s, waiting_s = self._waits.of(message.get("group"), now - message.number("ms") / 1000, now)
        return {"waited_ms": int(waited_s * 1000), "waiting_ms": int(waiting_s * 1000)}, []

    async def _acknowledged(self, message: wire.Message, fds: list[int]) -> Answer:
        """Nobody who waits for that report's read will run again."""
        _close(fds)
        report = self._reports.get(message.number("report"))
        if report is not None and not report.ended.done():
            report.ended.set_result(None)
        return {}, []


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _is_digest(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def _digest(message: wire.Message) -> str:
    digest = message.get("layer")
    if not _is_digest(digest):
        raise LocalProtocolError(f"{digest!r} is no layer")
    return digest


def _end_without_mounter() -> NoReturn:
    """Without it nothing can be mounted; the node starts another reader, which is asked for all that waits."""
    _log.error("the child that mounts is gone")
    os._exit(1)


def _is_dying(pid: int) -> bool:
    """Whether a thread was killed, or is gone: it will not run again, whatever its read returns."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    masks = [line.split()[1] for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) & _SIGKILL_BIT for mask in masks)
