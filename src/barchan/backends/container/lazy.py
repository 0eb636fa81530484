"""The node's side of the reader: the process that serves lazily kept layers (`barchan.image.lazy`).

It is started on first use, outlives the node as the supervisor does, and is replaced at once when it dies: what it
served waits meanwhile. docs/decisions/0011-lazy-reader.md says why.
"""

import asyncio
import errno
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from barchan.backends.container import background
from barchan.backends.container.supervisor import Answer, SupervisorClient
from barchan.errors import (
    BackendError,
    BarchanError,
    BlobUnavailable,
    ConnectionLost,
    NotFound,
    RequirementMissing,
    from_wire,
)
from barchan.wire import supervisor as wire

VERSION = 1
CACHE_SHARE = 0.2  # of the free disk, unless a budget is given
CACHE_MIB_MIN, CACHE_MIB_MAX = 64, 64 << 10
MOUNT_TRIES = 3  # while readers are killed
RESTART_PAUSE_S = 1.0
MOUNT_WAITS = 5  # times of `wait_s` for a mount, whose metadata may come in many pieces
MARGIN_S = 30.0  # the reader's own bound comes first


class ReaderSettings(Struct, frozen=True, kw_only=True):
    """Of a node's reader.

    Attributes:
        cache_mib: What was read is kept up to this size; None: a fifth of the free disk, at most 64 GiB.
        wait_s: How long a store may take to give a piece of an image before the sandbox that waits is ended.
    """

    cache_mib: int | None = None
    wait_s: float = 60.0


class Ask(Protocol):
    """A request to the supervisor."""

    def __call__(self, op: str) -> Awaitable[Answer]: ...


class Unavailable(Struct, frozen=True):
    """Bytes of `layer` can't be had, and the process `pid` (0: unknown) waits for them."""

    layer: str
    pid: int
    cause: str


class LazyReader:
    """Mounts lazily kept layers. `start` is not needed before use; `close` leaves the reader running.

    Args:
        state_dir: The node's; holds the reader's socket, log and cache.
        ask: Sends a request to the supervisor.
        on_unavailable: Must see to it that whoever waits for those bytes does not run again, before it returns.
    """

    def __init__(
        self,
        state_dir: Path,
        ask: Ask,
        on_unavailable: Callable[[Unavailable], None],
        settings: ReaderSettings,
    ) -> None:
        self._state_dir = state_dir
        self._cache = state_dir / "cache"
        self._socket = state_dir / "reader.sock"
        self._ask = ask
        self._on_unavailable = on_unavailable
        self._settings = settings
        self._mounted: set[str] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[SupervisorClient] = asyncio.get_running_loop().create_future()
        self._acknowledging: set[asyncio.Task[None]] = set()

    def start(self, mounted: Iterable[str]) -> None:
        """Take over what a node before has mounted, and its reader. `mounted`: any layers; others are passed over."""
        self._mounted |= {digest for digest in mounted if (self._cache / f"{digest}.lazy").exists()}
        if self._mounted:
            self._keep()

    @property
    def known(self) -> set[str]:
        """Layers of which something is kept here, mounted or not."""
        return self.served | {path.stem for path in self._cache.glob("*.data")}

    @property
    def served(self) -> set[str]:
        """Those that a reader serves, or did when it died."""
        return {path.stem for path in self._cache.glob("*.lazy")}

    async def mount(self, digest: str, path: Path) -> int:
        """A descriptor of the layer's file system, mounted nowhere; the caller closes it.

        Args:
            path: The file that stands for the layer.

        Raises:
            BlobUnavailable: What a mount needs could not be had in time.
            RequirementMissing: The host has no FUSE, or the reader can't be started.
        """
        for left in reversed(range(MOUNT_TRIES)):
            try:
                answer = await self._mount(digest, path)
                break
            except ConnectionLost:
                if not left:
                    raise
        self._mounted.add(digest)
        return answer.fds.pop()

    async def _mount(self, digest: str, path: Path) -> Answer:
        client = await self._client()
        _, directory = await self._fuse()
        timeout_s = MOUNT_WAITS * self._settings.wait_s
        try:
            async with asyncio.timeout(timeout_s):
                answer = await client.request(
                    "mount", fds=[directory], timeout_s=timeout_s + MARGIN_S, layer=digest, path=os.fspath(path)
                )
        except TimeoutError as error:  # the reader goes on: the next try finds what has come
            raise BlobUnavailable(
                f"the metadata of layer {digest[:12]} did not come within {timeout_s:g} s: its store is too slow"
            ) from error
        finally:
            os.close(directory)
        if len(answer.fds) != 1:
            answer.close()
            raise BackendError(f"the reader sent no mount of layer {digest}")
        return answer

    async def drop(self, digest: str, *, keeps_data: bool = False) -> None:
        """The layer is mounted no more; what is cached of it goes, too, or may stay until room is needed."""
        self._mounted.discard(digest)
        if self._keeper is not None:
            await self._request("drop", layer=digest, data="keep" if keeps_data else "remove")

    async def prefetch(self, digest: str, chunks: Iterable[int]) -> None:
        """Have those chunks of a mounted layer fetched and kept, in that order."""
        await self._request("prefetch", layer=digest, chunks=",".join(map(str, chunks)))

    async def start_record(self, digest: str) -> None:
        """Begin to note which chunks of a mounted layer are read first."""
        await self._request("record", layer=digest, state="start")

    async def stop_record(self, digest: str) -> list[int]:
        """The chunks that were read since, in the order of their first touch."""
        message = await self._request("record", layer=digest, state="stop")
        return [int(word) for word in message.get("chunks").split(",") if word]

    async def statistics(self) -> dict[str, int]:
        """The reader's counters, by name: bytes_fetched, requests, bytes_cached, hits, evictions and others."""
        message = await self._request("stats")
        return {key: int(value) for key, value in message.pairs if key != "tag"}

    async def waited(self, group: str, within_s: float) -> tuple[float, float]:
        """For how many of the last `within_s` reads of a control group have waited, and for how long one does now."""
        message = await self._request("waits", group=group, ms=int(within_s * 1000))
        return message.number("waited_ms") / 1000, message.number("waiting_ms") / 1000

    async def close(self) -> None:
        """Let go; the reader serves on."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, *self._acknowledging, return_exceptions=True)
        if self._connected.done() and not self._connected.exception():
            self._connected.result().close()

    def removed(self) -> None:
        """The file system is gone, and the reader ends. One that was killed has left its socket."""
        self._socket.unlink(missing_ok=True)

    async def _request(self, op: str, **keys: Any) -> wire.Message:
        answer = await (await self._client()).request(op, **keys)
        answer.close()
        return answer.message

    # the process and the connection to it

    async def _client(self) -> SupervisorClient:
        self._keep()
        while True:
            client = await asyncio.shield(self._connected)
            if not client.lost.done():
                return client
            await asyncio.sleep(0)  # its keeper is about to see that

    def _keep(self) -> None:
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._stay_connected())

    async def _stay_connected(self) -> None:
        """As long as this node lives: connect, and when the reader dies start another."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                client = await self._connect()
            except (BarchanError, OSError) as error:
                failure = error if isinstance(error, BarchanError) else BackendError(f"no reader: {error}")
                self._connected.set_exception(failure)
                self._connected.exception()  # somebody may wait for it, or nobody
                self._connected = loop.create_future()
                if not self._mounted:
                    return
                await asyncio.sleep(RESTART_PAUSE_S)
                continue
            self._connected.set_result(client)
            await asyncio.shield(client.lost)
            self._connected = loop.create_future()

    async def _connect(self) -> SupervisorClient:
        device, directory = await self._fuse()
        os.close(directory)
        try:
            try:
                client = self._open()
            except OSError:
                await self._spawn()
                client = self._open()
            try:
                (await client.request("hello", fds=[device], version=VERSION)).close()
                for digest in sorted(self._mounted):
                    await self._hold(client, digest)
            except BaseException:
                client.close()
                raise
            return client
        finally:
            os.close(device)

    async def _hold(self, client: SupervisorClient, digest: str) -> None:
        """One layer that can't be served keeps nobody from the others: reads of it will be reported."""
        try:
            path = os.fspath(self._cache / f"{digest}.lazy")
            (await client.request("hold", layer=digest, path=path)).close()
        except (BackendError, BlobUnavailable, NotFound) as error:
            asyncio.get_running_loop().call_exception_handler(
                {"message": f"the reader can't serve layer {digest[:12]}", "exception": error}
            )

    def _open(self) -> SupervisorClient:
        return SupervisorClient.connect(self._socket, self._event, "reader", _failure)

    async def _fuse(self) -> tuple[int, int]:
        """The device and the file system that the supervisor holds; the caller closes both."""
        try:
            answer = await self._ask("fuse")
        except BackendError as error:
            if error.details.get("errno") not in (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.EACCES, errno.ENXIO):
                raise
            raise RequirementMissing(
                f"an image that is read on demand needs FUSE, which this host refuses: {error} "
                "(try: modprobe fuse, or fetch the image whole: barchan image pull)"
            ) from error
        if len(answer.fds) != 2:
            answer.close()
            raise BackendError("the supervisor did not hand its FUSE file system over")
        return answer.fds[0], answer.fds[1]

    async def _spawn(self) -> None:
        """Start a reader and wait until it listens."""
        mib = self._settings.cache_mib
        if mib is None:
            free_mib = shutil.disk_usage(self._state_dir).free >> 20
            mib = min(CACHE_MIB_MAX, max(CACHE_MIB_MIN, int(free_mib * CACHE_SHARE)))
        with (self._state_dir / "reader.log").open("ab") as log:
            line = await background.start(
                (
                    *(sys.executable, "-m", "barchan.image.lazy"),
                    *("--cache-dir", self._cache),
                    *("--socket", self._socket),
                    *("--budget-mib", str(mib)),
                    *("--wait-s", str(self._settings.wait_s)),
                ),
                log,
            )
        if line != "ready":
            raise RequirementMissing(f"the reader of images did not start: {line}; see {self._state_dir}/reader.log")

    def _event(self, message: wire.Message) -> None:
        if message.word != "unavailable":
            return
        self._on_unavailable(Unavailable(message.get("layer"), message.number("pid"), message.get("cause")))
        task = asyncio.get_running_loop().create_task(self._acknowledge(message.number("report")))
        self._acknowledging.add(task)
        task.add_done_callback(self._acknowledging.discard)

    async def _acknowledge(self, report: int) -> None:
        with suppress(ConnectionLost):  # the next reader is asked for the same bytes again
            await self._request("ended", report=report)


def _failure(op: str, message: wire.Message) -> Exception:
    code, number = message.get("stage", "?"), message.number("errno", 0)
    text = message.get("message", "") or os.strerror(number)
    error = from_wire(code, f"the reader of images failed at {op}: {text}", {"errno": number} if number else {})
    return error if isinstance(error, BackendError | BlobUnavailable | NotFound) else BackendError(str(error))
