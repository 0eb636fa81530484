"""Images back to where others can run them: every layer as a diff of an OCI image, with a config and a manifest."""

import asyncio
import gzip
import hashlib
import io
import threading
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import msgspec
from msgspec import Struct

from barchan.errors import InvalidSpec, RequirementMissing
from barchan.image.archives import LayoutSink, write_archive
from barchan.image.diff_tar import diff_tar
from barchan.image.erofs import Erofs
from barchan.image.intake import LAYERS_AT_ONCE, in_thread, open_layer, write_hint
from barchan.image.oci import CONFIG, LAYER_GZIP, LAYER_ZSTD, Descriptor, image_config, image_manifest, sha256
from barchan.image.pack import pack_tree
from barchan.image.registry_image import RegistryImage, RegistrySink
from barchan.image.registry_rules import new_session
from barchan.image.sources import DEFAULT_REGISTRIES, FileImage, RegistryOptions, open_registry, parse
from barchan.image.store import ImageStore
from barchan.image.template import Layer, Template
from barchan.image.tools import Progress

Compression = Literal["gzip", "zstd"]
GZIP_LEVEL = 6
ZSTD_LEVEL = 3


PIECE_BYTES = 1 << 20


class Sink(Protocol):
    """Where an image is written to."""

    async def has(self, blob: Descriptor) -> bool: ...
    async def put(self, path: Path, blob: Descriptor) -> None: ...
    async def finish(self, manifest: bytes) -> None: ...


class Pushed(Struct, frozen=True):
    """The manifest's digest, and how many bytes of blobs were not there before."""

    digest: str
    blobs_bytes: int


class Diff(Struct, frozen=True):
    """A layer in OCI form; `ROOT/known/KEY.KIND` remembers it, so that what is there already is not made again."""

    diff_id: str
    blob: Descriptor


async def push(
    store: ImageStore,
    name: str,
    destination: str,
    *,
    progress: Progress,
    compression: Compression = "gzip",
    registries: RegistryOptions = DEFAULT_REGISTRIES,
) -> Pushed:
    """Write an image to a registry, a layout or an archive. Equal images give equal bytes.

    For an event loop that serves nothing else: it waits for the store's lock.

    Raises:
        InvalidSpec: The destination's text is none, or a layer can't be said in OCI's terms.
        NotFound: There is no such image here.
        Denied: The registry wants (other) credentials.
        TransportError: The registry can't be reached, or fails.
    """
    place = parse(destination)
    template = store.resolve(name)
    async with AsyncExitStack() as exits:
        workspace = exits.enter_context(store.workspace())
        sink: Sink
        archive: Path | None = None
        if isinstance(place, RegistryImage):
            session = await exits.enter_async_context(new_session())
            if ":" in place.reference:
                raise InvalidSpec(f"{destination!r} names a digest, which comes of what is pushed: give a tag")
            sink = RegistrySink(place, open_registry(place.host, session, registries))
        elif isinstance(place, FileImage) and place.kind == "oci":
            sink = LayoutSink(place.path, place.tag)
        elif isinstance(place, FileImage) and place.kind == "oci-archive":
            archive = place.path
            sink = LayoutSink(workspace / "layout", place.tag)
        else:
            raise InvalidSpec(f"{destination!r} can't be pushed to (try: docker://..., oci:... or oci-archive:...)")
        pushed = await _push(store, template, sink, workspace, compression, progress)
        if archive is not None:
            progress("writing the archive")
            await in_thread(lambda stop: write_archive(workspace / "layout", archive))
        return pushed


async def _push(
    store: ImageStore, template: Template, sink: Sink, workspace: Path, compression: Compression, progress: Progress
) -> Pushed:
    bounded = asyncio.Semaphore(LAYERS_AT_ONCE)
    opener = _Opener(store, workspace)
    done: dict[int, Diff] = {}
    brought = 0

    async def bring(path: Path, blob: Descriptor) -> None:
        nonlocal brought
        if not await sink.has(blob):
            await sink.put(path, blob)
            brought += blob.size
        await asyncio.to_thread(path.unlink)  # room for the next one

    async def one(position: int) -> None:
        async with bounded:
            stack = template.layers[position:]
            known = _known(store, stack, compression)
            if known is None or not await sink.has(known.blob):
                path = workspace / f"{position}.tar"
                known = await in_thread(lambda stop: _write_diff(opener, stack, path, compression))
                _remember(store, stack, compression, known)
                await bring(path, known.blob)
            done[position] = known
            progress(f"{len(done)} of {len(template.layers)} layers")

    try:
        async with asyncio.TaskGroup() as group:
            for position in reversed(range(len(template.layers))):
                group.create_task(one(position))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    diffs = [done[position] for position in reversed(range(len(template.layers)))]
    config = image_config(template, [diff.diff_id for diff in diffs])
    path = workspace / "config"
    await asyncio.to_thread(path.write_bytes, config)
    await bring(path, Descriptor(CONFIG, sha256(config), len(config)))
    manifest = image_manifest(config, [diff.blob for diff in diffs])
    await sink.finish(manifest)
    return Pushed(sha256(manifest), brought)


class _Opener:
    """Opens the layers of an image, from several threads; one that is kept as a directory is packed once for that."""

    def __init__(self, store: ImageStore, workspace: Path) -> None:
        self._store, self._workspace = store, workspace
        self._packing = threading.Lock()

    def open(self, layer: Layer) -> Erofs:
        if layer.kind != "dir":
            return open_layer(self._store, layer, self._workspace)
        packed = self._workspace / f"{layer.digest}.erofs"
        with self._packing:
            if not packed.exists():
                pack_tree(self._store.layer_path(layer), packed)
        return Erofs.open(packed)


def _write_diff(opener: _Opener, stack: tuple[Layer, ...], target: Path, compression: Compression) -> Diff:
    """Write the uppermost layer of a stack as a compressed tar; the others say what a renamed folder of it holds."""
    with ExitStack() as exits:
        layers = [exits.enter_context(opener.open(layer)) for layer in stack]
        file = exits.enter_context(target.open("wb"))
        packed = _Sum(file)
        writer = _compressor(packed, compression)
        plain = _Sum(writer)
        with io.BufferedWriter(plain, PIECE_BYTES) as out:
            diff_tar(layers[:1], below=layers[1:], out=cast(BinaryIO, out), is_bottom=len(layers) == 1)
        writer.close()
    media_type = LAYER_GZIP if compression == "gzip" else LAYER_ZSTD
    return Diff(plain.digest, Descriptor(media_type, packed.digest, packed.count))


class _Sum(io.RawIOBase):
    """Passes on what is written, with its sum. Closing it leaves what it writes to open."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self._sum = hashlib.sha256()
        self.count = 0

    @property
    def digest(self) -> str:
        return f"sha256:{self._sum.hexdigest()}"

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._sum.update(data)
        self.count += len(data)
        self._out.write(data)
        return len(data)


def _compressor(out: _Sum, compression: Compression) -> Any:
    """A writer whose bytes depend on nothing but what is written to it."""
    if compression == "gzip":
        return gzip.GzipFile(filename="", fileobj=cast(BinaryIO, out), mode="wb", compresslevel=GZIP_LEVEL, mtime=0)
    try:
        import zstandard
    except ImportError as error:
        raise RequirementMissing("zstd needs zstandard: pip install 'barchan[images]'") from error
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(cast(BinaryIO, out), closefd=False)


def _known_path(store: ImageStore, stack: tuple[Layer, ...], compression: Compression) -> Path:
    """By all layers, since a renamed folder is written with what those below have in it."""
    key = hashlib.sha256(" ".join(layer.digest for layer in stack).encode()).hexdigest()
    return store.root / "known" / f"{key}.{compression}"


def _known(store: ImageStore, stack: tuple[Layer, ...], compression: Compression) -> Diff | None:
    try:
        return msgspec.json.decode(_known_path(store, stack, compression).read_bytes(), type=Diff)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None  # a hint that can't be read is none


def _remember(store: ImageStore, stack: tuple[Layer, ...], compression: Compression, diff: Diff) -> None:
    write_hint(_known_path(store, stack, compression), msgspec.json.encode(diff))
