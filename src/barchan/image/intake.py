"""Images from elsewhere become layers and templates of a store: fetched, verified, unpacked to nothing but a layer.

A layer goes through in one stream: bytes as they were sent -> sha256 -> gunzip or zstd -> sha256 -> the packer.
Nothing is committed before both sums are those that the image's manifest and config name.
"""

import asyncio
import hashlib
import io
import os
import re
import secrets
import threading
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast

import msgspec
from msgspec import Struct

from barchan.errors import BackendError, BlobCorrupt, InvalidSpec, RequirementMissing
from barchan.image.diff_tar import merge
from barchan.image.erofs import Erofs
from barchan.image.implied import restore
from barchan.image.oci import Descriptor, Found
from barchan.image.pack import Limits, keep_as, pack_tar, pack_tree
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import LAYERS_MAX, Layer, LayerKind, TemplateConfig
from barchan.image.tools import Progress

LAYERS_AT_ONCE = 3  # more only makes the waits longer: a layer keeps a core busy
PIECE_BYTES = 256 << 10
ZSTD_WINDOW_BYTES = 128 << 20
PADDING_BYTES_MAX = 1 << 20  # of zeros between and behind gzip streams, as tapes have them
REST_BYTES_MAX = 64 << 20  # that is read only to learn whose fault it is that a layer can't be
Result = TypeVar("Result")


class ImageSource(Protocol):
    """Where one image can be read."""

    async def image(self) -> Found: ...

    def open(self, position: int, stop: threading.Event) -> BinaryIO:
        """The bytes of a layer, by its place in the manifest.

        Called and read in a thread; a read that waits raises `Stopped` once `stop` is set.
        """
        ...


class Known(Struct, frozen=True):
    """What `ROOT/known/DIFF_ID` says: the layer that was made of a diff. A hint, since layers may be removed."""

    layer: str


class Stopped(Exception):
    """The one who waits for a layer does so no longer."""


class Damaged(Exception):
    """Bytes that can't be decompressed."""


class Budget:
    """How many bytes may still be read, by all the threads that share it.

    Args:
        over: What is said when there are more.
    """

    def __init__(self, bytes_max: int, over: str) -> None:
        self._left, self._over = bytes_max, over
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            self._left -= count
            if self._left < 0:
                raise InvalidSpec(self._over)


class _Counted(io.RawIOBase):
    """What is read of a stream, counted and hashed, until it is stopped."""

    def __init__(self, source: BinaryIO, budget: Budget, stop: threading.Event) -> None:
        self._source, self._budget, self._stop = source, budget, stop
        self._sum = hashlib.sha256()
        self.count = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._sum.hexdigest()}"

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._stop.is_set():
            raise Stopped
        try:
            data = self._source.read(len(buffer))
        except OSError as error:
            raise BackendError(f"reading a layer failed: {error} (try: again)") from error
        self._sum.update(data)
        self.count += len(data)
        self._budget.take(len(data))
        buffer[: len(data)] = data
        return len(data)

    def drain(self) -> None:
        while self.read(PIECE_BYTES):
            pass


class _LayerJob(NamedTuple):
    """One layer to make, in a thread."""

    source: ImageSource
    position: int
    blob: Descriptor
    diff_id: str
    target: Path
    kind: LayerKind
    limits: Limits
    budget: Budget
    what: str

    def run(self, stop: threading.Event) -> NewLayer:
        """Make the layer.

        Raises:
            BackendError: Its bytes can't be read.
            BlobCorrupt: The bytes are not those that were promised, whatever else is wrong with them.
            InvalidSpec: They hold what no layer can, or more than the limits allow.
        """
        if self.blob.size > self.limits.bytes_max:
            raise InvalidSpec(f"{self.what} has {self.blob.size} bytes, of at most {self.limits.bytes_max}")
        with self.source.open(self.position, stop) as raw:
            sent_max = self.blob.size if self.blob.digest else self.limits.bytes_max
            sent = _Counted(raw, Budget(sent_max, f"{self.what} has more than {sent_max} bytes"), stop)
            try:
                plain = _Counted(decompressed(sent), self.budget, stop)
                digest = pack_tar(cast(BinaryIO, plain), self.target, limits=self.limits)
                plain.drain()  # the sums are of all that was sent, also of what follows the last entry
                sent.drain()
            except Damaged as error:
                self._check_refused(sent)
                raise BlobCorrupt(f"{self.what} can't be decompressed: {error}") from error
            except InvalidSpec:
                self._check_refused(sent)  # what a damaged blob seems to hold is not its maker's fault
                raise
            self._check_sent(sent)
        if plain.digest != self.diff_id:
            raise BlobCorrupt(f"{self.what} unpacks to {plain.digest}, not to its diff_id {self.diff_id}")
        return keep_as(self.target, digest, self.target.parent, self.kind)

    def _check_refused(self, sent: _Counted) -> None:
        if self.blob.size - sent.count <= REST_BYTES_MAX:
            self._check_sent(sent)

    def _check_sent(self, sent: _Counted) -> None:
        if self.blob.digest == "":  # archives of `docker save` have diff_ids only
            return
        if sent.count <= self.blob.size:
            sent.drain()
        if (sent.digest, sent.count) != (self.blob.digest, self.blob.size):
            raise BlobCorrupt(f"{self.what}: what was sent is {sent.digest}, of at least {sent.count} bytes")


async def take_in(
    store: ImageStore,
    source: ImageSource,
    found: Found,
    config: TemplateConfig,
    workspace: Path,
    *,
    kind: LayerKind,
    limits: Limits,
    progress: Progress,
) -> tuple[NewLayer | Layer, ...]:
    """Make the layers of an image in a workspace of the store, topmost first; those that are known are not fetched.

    Raises:
        BlobCorrupt: Some bytes are not those that the image names; nothing of it is kept.
    """
    bounded = asyncio.Semaphore(LAYERS_AT_ONCE)
    budget = Budget(limits.bytes_max, f"the layers of {config.source} unpack to more than {limits.bytes_max} bytes")
    diff_ids = found.config.rootfs.diff_ids or ()
    made: dict[str, NewLayer | Layer] = {}
    total = len(set(diff_ids))

    async def one(position: int, diff_id: str) -> None:
        async with bounded:
            known = known_layer(store, diff_id)
            if known is not None and not await in_thread(lambda stop: store.is_damaged(known)):
                made[diff_id] = known
            else:
                blob = found.manifest.layers[position]
                what = f"layer {blob.digest or diff_id} of {config.source}"
                target = workspace / f"{position}.erofs"
                job = _LayerJob(source, position, blob, diff_id, target, kind, limits, budget, what)
                made[diff_id] = await in_thread(job.run)
            progress(f"{len(made)} of {total} layers")

    first = {diff_id: position for position, diff_id in reversed(tuple(enumerate(diff_ids)))}
    try:
        async with asyncio.TaskGroup() as group:
            for diff_id, position in sorted(first.items(), key=lambda item: item[1]):
                group.create_task(one(position, diff_id))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    stack: dict[str, NewLayer | Layer] = {}
    for diff_id in reversed(diff_ids):  # equal content on top makes the lower one redundant, and overlays refuse it
        item = made[diff_id]
        digest = (item.layer if isinstance(item, NewLayer) else item).digest
        stack.setdefault(digest, item)
        remember(store, diff_id, digest)
    layers = tuple(stack.values())
    if len(layers) > 1:
        said = await in_thread(lambda stop: _restored(store, layers, workspace, kind, limits, stop))
        layers = layers if said is None else (said, *layers)
    if len(layers) <= LAYERS_MAX:
        return layers
    progress(f"merging {len(layers) - LAYERS_MAX + 1} layers into one")
    lowest = layers[LAYERS_MAX - 1 :]
    return (*layers[: LAYERS_MAX - 1], await in_thread(lambda stop: _merged(store, lowest, workspace, kind, limits)))


def _restored(
    store: ImageStore,
    layers: tuple[NewLayer | Layer, ...],
    workspace: Path,
    kind: LayerKind,
    limits: Limits,
    stop: threading.Event,
) -> NewLayer | None:
    """What the layers below say about directories that those above have entries in, and no entry for."""
    target = workspace / "directories.erofs"

    def go_on() -> None:
        if stop.is_set():
            raise Stopped

    with ExitStack() as exits:
        opened = [exits.enter_context(open_layer(store, layer, workspace)) for layer in layers]
        digest = restore(opened, target, limits=limits, go_on=go_on)
    return None if digest is None else keep_as(target, digest, workspace, kind)


def _merged(
    store: ImageStore, layers: tuple[NewLayer | Layer, ...], workspace: Path, kind: LayerKind, limits: Limits
) -> NewLayer:
    """The bottom of a stack as one layer: a sandbox can have only so many."""
    target = workspace / "merged.erofs"
    with ExitStack() as exits:
        opened = [exits.enter_context(open_layer(store, layer, workspace)) for layer in layers]
        digest = merge(opened, target, is_bottom=True, limits=limits)
    return keep_as(target, digest, workspace, kind)


def open_layer(store: ImageStore, layer: NewLayer | Layer, workspace: Path) -> Erofs:
    """A layer, to be read; one that is kept as a directory is packed in the workspace for that.

    Raises:
        InvalidSpec: Its data is elsewhere.
    """
    if isinstance(layer, NewLayer):
        path, layer = layer.path, layer.layer
    else:
        path = store.layer_path(layer)
    if layer.kind == "lazy":
        raise InvalidSpec(f"the data of layer {layer.digest} is in its store only (try: barchan image pull)")
    if layer.kind == "dir":
        packed = workspace / f"{secrets.token_hex(8)}.erofs"
        pack_tree(path, packed)
        path = packed
    return Erofs.open(path)


def decompressed(source: io.RawIOBase) -> BinaryIO:
    """A stream unpacked by what it begins with, for what an image says of that is often wrong.

    Reading it raises `Damaged` where that can't be done.

    Raises:
        RequirementMissing: It needs zstandard.
    """
    buffered = io.BufferedReader(source, PIECE_BYTES)
    begin = buffered.peek(4)[:4]
    if begin.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, _Gunzip(buffered))
    if begin == b"\x28\xb5\x2f\xfd" or (begin[1:] == b"\x2a\x4d\x18" and begin[0] & 0xF0 == 0x50):
        return cast(BinaryIO, _Unzstd(buffered))
    return buffered


class _Gunzip(io.RawIOBase):
    """Gzip streams one behind the other, unpacked."""

    def __init__(self, source: "io.BufferedReader[Any]") -> None:
        self._source, self._rest = source, b""
        self._stream: Any = None  # none between streams
        self._padding_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._rest or (data := self._source.read1(PIECE_BYTES)):
            if not self._rest:
                self._rest = data
            if self._stream is None:
                self._skip_padding()
            else:
                unpacked = self._unpack(len(buffer))
                buffer[: len(unpacked)] = unpacked
                if unpacked:
                    return len(unpacked)
        if self._stream is not None:
            raise Damaged("it ends within a gzip stream")
        return 0

    def _skip_padding(self) -> None:
        before, self._rest = len(self._rest), self._rest.lstrip(b"\0")
        self._padding_bytes += before - len(self._rest)
        if self._padding_bytes > PADDING_BYTES_MAX:
            raise Damaged(f"more than {PADDING_BYTES_MAX} zeros follow its gzip streams")
        if self._rest:
            self._stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    def _unpack(self, bytes_max: int) -> bytes:
        try:
            data: bytes = self._stream.decompress(self._rest, bytes_max)
        except zlib.error as error:
            raise Damaged(str(error)) from error
        self._rest = self._stream.unconsumed_tail
        if self._stream.eof:
            self._rest, self._stream = self._stream.unused_data, None
        return data


class _Unzstd(io.RawIOBase):
    """Zstandard frames one behind the other, unpacked."""

    def __init__(self, source: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise RequirementMissing("layers packed with zstd need zstandard: pip install 'barchan[images]'") from error
        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
        self._stream = decompressor.stream_reader(source, read_across_frames=True)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._stream.readinto(buffer)
        except self._error as error:
            raise Damaged(str(error)) from error


async def in_thread(work: Callable[[threading.Event], Result]) -> Result:
    """Run blocking work; when it is no longer waited for it is told to stop, and has stopped before this returns."""
    stop = threading.Event()
    running = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # seen: whatever it was, the work is given up
        raise


def known_layer(store: ImageStore, diff_id: str) -> Layer | None:
    """The layer of a diff that was taken in before, if it is still here.

    One that is kept lazily is not: its bytes may be had only as long as its blob store can be asked.
    """
    try:
        known = msgspec.json.decode(_known_path(store, diff_id).read_bytes(), type=Known)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None  # a hint that can't be read is none
    if not re.fullmatch(r"[0-9a-f]{64}", known.layer):
        return None
    kept = (Layer(known.layer, "erofs"), Layer(known.layer, "dir"))
    return next((layer for layer in kept if store.layer_path(layer).exists()), None)


def remember(store: ImageStore, diff_id: str, digest: str) -> None:
    """Note which layer a diff became."""
    write_hint(_known_path(store, diff_id), msgspec.json.encode(Known(digest)))


def write_hint(path: Path, data: bytes) -> None:
    """Write a file of `ROOT/known`: whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    beside.write_bytes(data)
    beside.rename(path)


def _known_path(store: ImageStore, diff_id: str) -> Path:
    return store.root / "known" / diff_id.removeprefix("sha256:")
