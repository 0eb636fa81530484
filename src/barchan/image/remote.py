"""Images in a blob store: sent there, found there by name, made usable here without their data, or with all of it.

    store.json               says that this is such a store, and of which format
    images/NAME.json         names a manifest; NAME percent-encoded; also under sha256:TEMPLATE_DIGEST
    manifests/SHA256.json    a template: its settings, and its layers with the digests of their indexes
    layers/LAYER/INDEX.*     a layer in chunks, as `stored` has it
    hot/TEMPLATE.json        what is read first, as `hot` has it

Only the pointer from a name is believed; everything else is verified by the digest that led to it. The pointer is
written last, so what can be found is complete.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from barchan.core.finished import finished
from barchan.errors import BarchanError, BlobCorrupt, ConnectionLost, InvalidSpec, NotFound
from barchan.image.blobs import BlobStore, no_room
from barchan.image.chunks import LAYER_BYTES_MAX, ChunkIndex, encode_layer, is_index_of
from barchan.image.download import Downloads
from barchan.image.erofs import Erofs
from barchan.image.store import ImageStore, NewLayer
from barchan.image.stored import data_key, index_key, layer_prefix, read_index, read_lazy, write_lazy
from barchan.image.template import LAYERS_MAX, Disk, Layer, LayerKind, Template, TemplateConfig, template_digest
from barchan.model.sandbox import Need

FORMAT = 1
MANIFEST_BYTES_MAX = 4 << 20
INDEXES_AT_ONCE = 8
_POINTER_BYTES_MAX = 64 << 10
_ENCODINGS_MAX = 8  # of one layer that are looked at
_STORE_KEY = "store.json"

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with what goes on, bytes done and bytes in all; from any thread."""

_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
T = TypeVar("T", "_Pointer", "Manifest")


class _StoreMark(Struct, frozen=True):
    format: int = FORMAT


class _Pointer(Struct, frozen=True, kw_only=True):
    manifest: _Digest
    format: int = FORMAT


class StoredLayer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A layer of a manifest: its digest, that of its index, and its sizes in bytes, whole and in the store."""

    digest: _Digest
    index: _Digest
    raw_bytes: Annotated[int, Meta(gt=0, le=LAYER_BYTES_MAX)]
    stored_bytes: Annotated[int, Meta(ge=0, le=LAYER_BYTES_MAX)]


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A template as a store has it; it bears no name, so equal templates are one manifest. Layers: topmost first."""

    template: _Digest
    user: str
    workdir: str
    env: dict[str, str]
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    source: str
    base_layers: int
    layers: Annotated[tuple[StoredLayer, ...], Meta(min_length=1, max_length=LAYERS_MAX)]
    disk: Disk | UnsetType = UNSET  # left out where there is none, so that releases without disks read all others
    needs: tuple[Need, ...] | UnsetType = UNSET  # likewise
    format: int = FORMAT

    def config(self, name: str) -> TemplateConfig:
        return TemplateConfig(
            name=name,
            user=self.user,
            workdir=self.workdir,
            env=self.env,
            entrypoint=self.entrypoint,
            cmd=self.cmd,
            source=self.source,
            base_layers=self.base_layers,
            disk=self.disk or None,
            needs=self.needs or (),
        )


class Pushed(Struct, frozen=True, kw_only=True):
    """What a push did: bytes and layers that it sent, and those the store had."""

    manifest: str
    layers_sent: int
    layers_there: int
    bytes_sent: int


async def push(images: ImageStore, name: str, store: BlobStore, progress: Progress) -> Pushed:
    """Put an image into a store under its name. Repeating it sends nothing; killed half-way, it left nothing in use.

    Raises:
        NotFound: No such image here.
        InvalidSpec: A layer is kept in a way that can't be sent, or the store can only be read.
        RequirementMissing: A layer is compressed, as earlier releases made them.
        BlobCorrupt: A layer is damaged here.
        CapacityError, Denied, TransportError: As `BlobStore.put`.
    """
    template = images.resolve(name)
    await store.make()
    await _put_if_other(store, _STORE_KEY, msgspec.json.encode(_StoreMark()))
    layers, sent, bytes_sent = [], 0, 0
    for layer in template.layers:
        found = await _known_index(images, layer, store)
        if found is None:
            found = await _send_layer(images, layer, store, progress)
            sent, bytes_sent = sent + 1, bytes_sent + found.stored_bytes
        layers.append(
            StoredLayer(
                digest=layer.digest, index=found.digest, raw_bytes=found.raw_bytes, stored_bytes=found.stored_bytes
            )
        )
    manifest = Manifest(
        template=template.digest,
        user=template.user,
        workdir=template.workdir,
        env=dict(sorted(template.env.items())),
        entrypoint=template.entrypoint,
        cmd=template.cmd,
        source=template.source,
        base_layers=template.base_layers,
        layers=tuple(layers),
        disk=template.disk or UNSET,
        needs=template.needs or UNSET,
    )
    data = msgspec.json.encode(manifest)
    digest = hashlib.sha256(data).hexdigest()
    await _put_if_other(store, _manifest_key(digest), data)
    pointer = msgspec.json.encode(_Pointer(manifest=digest))
    for key in (_image_key(f"sha256:{template.digest}"), _image_key(template.name)):
        await _put_if_other(store, key, pointer)
    return Pushed(manifest=digest, layers_sent=sent, layers_there=len(layers) - sent, bytes_sent=bytes_sent)


async def fetch(images: ImageStore, name: str, store: BlobStore, *, local_name: str | None = None) -> Template:
    """Make an image of a store usable here without its data: layers that are not here become lazily kept ones.

    Args:
        name: Its name there, or a whole digest.
        local_name: What it is called here; None: the same (a digest gives `sha256-` and 16 digits).

    Raises:
        NotFound: The store has no such image.
        BlobCorrupt: What it has is damaged or absurd.
        Denied, TransportError: As `BlobStore.get`; also if there is no such store at that address.
    """
    manifest = await read_manifest(store, name)
    return await _commit(images, manifest, local_name or local_name_of(name), _LazyLayers(images, store))


async def pull(
    images: ImageStore, name: str, store: BlobStore, progress: Progress, *, local_name: str | None = None
) -> Template:
    """As `fetch`, with all data: each chunk is verified, and each layer as a whole; it needs no store afterwards.

    Raises:
        CapacityError: No room on the disk.
    """
    manifest = await read_manifest(store, name)
    return await _commit(
        images, manifest, local_name or local_name_of(name), _WholeLayers(images, store, manifest, progress)
    )


async def read_manifest(store: BlobStore, name: str) -> Manifest:
    """What a store has under a name or whole digest. Raises as `fetch`."""
    pointer = await _read_pointer(store, name)
    key = _manifest_key(pointer.manifest)
    try:
        data = await store.get(key, MANIFEST_BYTES_MAX)
    except NotFound as error:
        raise BlobCorrupt(f"{store.url} lacks {key}, which image {name!r} needs (try: push it again)") from error
    if hashlib.sha256(data).hexdigest() != pointer.manifest:
        raise BlobCorrupt(f"{key} in {store.url} is damaged: its sha256 is another (try: remove it, and push again)")
    manifest = _decoded(store, key, data, Manifest)
    config = manifest.config(local_name_of(name))
    try:
        config.check()
    except InvalidSpec as error:
        raise BlobCorrupt(f"{key} in {store.url}: {error}") from error
    digest = template_digest(config, tuple(Layer(layer.digest, "erofs") for layer in manifest.layers))
    wanted = _digest_of(name)
    if digest != manifest.template or (wanted is not None and digest != wanted):
        raise BlobCorrupt(f"{key} in {store.url} describes the template {digest}, and claims to be another")
    if len({layer.digest for layer in manifest.layers}) != len(manifest.layers):
        raise BlobCorrupt(f"{key} in {store.url} has a layer twice")
    if not 0 <= manifest.base_layers <= len(manifest.layers):
        raise BlobCorrupt(f"{key} in {store.url}: {manifest.base_layers} of {len(manifest.layers)} layers are its base")
    return manifest


def local_name_of(name: str) -> str:
    """What an image that was asked for by `name` is called here."""
    digest = _digest_of(name)
    return name if digest is None else f"sha256-{digest[:16]}"


async def _read_pointer(store: BlobStore, name: str) -> _Pointer:
    digest = _digest_of(name)
    key = _image_key(name if digest is None else f"sha256:{digest}")
    try:
        data = await store.get(key, _POINTER_BYTES_MAX)
    except NotFound as error:
        if not await store.exists(_STORE_KEY):  # an unmounted file system is an empty directory
            raise ConnectionLost(
                f"{store.url} holds no images at all: is it mounted, and the right address?"
            ) from error
        raise NotFound(f"no image {name!r} in {store.url}", template=name) from error
    return _decoded(store, key, data, _Pointer)


async def _known_index(images: ImageStore, layer: Layer, store: BlobStore) -> ChunkIndex | None:
    """The index of a layer that the store has whole; damaged ones count as missing, and are sent again.

    Whoever can write there may have left an index of other data under this layer's name: it is compared with the layer.
    """
    size = await asyncio.to_thread(_raw_bytes, images, layer)
    keys = [key for key in await store.keys(layer_prefix(layer.digest)) if key.endswith(".index")]
    for key in keys[:_ENCODINGS_MAX]:
        try:
            index, _ = await read_index(store, layer.digest, Path(key).stem)
        except BlobCorrupt:
            continue
        if index.raw_bytes != size or await store.size(data_key(index)) != index.stored_bytes:
            continue
        if await finished(asyncio.to_thread(_is_same, images, layer, index)):
            return index
    return None


def _raw_bytes(images: ImageStore, layer: Layer) -> int:
    path = images.layer_path(layer)
    try:
        if layer.kind == "lazy":
            return read_lazy(path).index.raw_bytes
        if layer.kind == "erofs":
            return path.stat().st_size
    except FileNotFoundError:
        raise NotFound(f"layer {layer.digest} is not here any more: its image was removed") from None
    raise InvalidSpec(
        f"layer {layer.digest} is kept as a directory here, and only EROFS files can be sent "
        "(try: push from a machine that mounts EROFS)"
    )


def _is_same(images: ImageStore, layer: Layer, index: ChunkIndex) -> bool:
    path = images.layer_path(layer)
    try:
        return read_lazy(path).index.describes(index) if layer.kind == "lazy" else is_index_of(index, path)
    except FileNotFoundError:
        raise NotFound(f"layer {layer.digest} is not here any more: its image was removed") from None


def _encode(source: Path, layer: str, data: Path) -> tuple[ChunkIndex, bytes]:
    Erofs.open(source).close()  # whoever gets one that can't be looked into refuses it
    return encode_layer(source, layer, data)


async def _send_layer(images: ImageStore, layer: Layer, store: BlobStore, progress: Progress) -> ChunkIndex:
    if layer.kind == "lazy":
        raise InvalidSpec(
            f"the data of layer {layer.digest} is in another store only (try: barchan image pull, then push again)"
        )
    what = f"layer {layer.digest[:12]}"
    with ExitStack() as entered:
        workspace = await finished(asyncio.to_thread(entered.enter_context, images.workspace()))
        try:
            data = workspace / "data"
            progress(f"{what}: packing", 0, 0)
            try:
                encoding = asyncio.to_thread(_encode, images.layer_path(layer), layer.digest, data)
                index, stored = await finished(encoding)
            except FileNotFoundError:
                raise NotFound(f"layer {layer.digest} is not here any more: its image was removed") from None
            except OSError as error:
                raise no_room(error, f"packing {what}") from error

            def say(done: int) -> None:
                progress(f"{what}: sending", done, index.stored_bytes)

            await store.put_file(data_key(index), data, say)
            await store.put(index_key(layer.digest, index.digest), stored)
        finally:
            await finished(asyncio.to_thread(entered.close))
    return index


class _LazyLayers:
    """Layers of a manifest as this store may keep them without their data."""

    def __init__(self, images: ImageStore, store: BlobStore) -> None:
        self._images, self._store = images, store
        self._at_once = asyncio.Semaphore(INDEXES_AT_ONCE)

    async def bring(self, layer: StoredLayer, workspace: Path) -> NewLayer | Layer:
        kept = await asyncio.to_thread(_kept, self._images, layer.digest)
        if kept is not None:
            return kept
        async with self._at_once:
            _, stored = await _checked_index(self._store, layer)
        path = workspace / f"{layer.digest}.lazy"
        try:
            await finished(asyncio.to_thread(write_lazy, path, self._store.url, layer.index, stored))
        except OSError as error:
            raise no_room(error, f"the index of layer {layer.digest}") from error
        return NewLayer(Layer(layer.digest, "lazy"), path)


class _WholeLayers:
    """Layers of a manifest with all their data."""

    def __init__(self, images: ImageStore, store: BlobStore, manifest: Manifest, progress: Progress) -> None:
        self._images, self._store = images, store
        self._downloads = Downloads(store, progress)

    async def bring(self, layer: StoredLayer, workspace: Path) -> NewLayer | Layer:
        kept = await asyncio.to_thread(_kept, self._images, layer.digest)
        if kept is not None and kept.kind != "lazy" and not await asyncio.to_thread(self._images.is_damaged, kept):
            return kept
        index, _ = await _checked_index(self._store, layer)
        path = workspace / f"{layer.digest}.erofs"
        await self._downloads.layer(index, path)
        return NewLayer(Layer(layer.digest, "erofs"), path)


async def _checked_index(store: BlobStore, layer: StoredLayer) -> tuple[ChunkIndex, bytes]:
    try:
        index, stored = await read_index(store, layer.digest, layer.index)
    except NotFound as error:
        raise BlobCorrupt(f"{store.url} lacks the index of layer {layer.digest} (try: push the image again)") from error
    if (index.raw_bytes, index.stored_bytes) != (layer.raw_bytes, layer.stored_bytes):
        raise BlobCorrupt(f"chunk index {layer.index} in {store.url} has other sizes than the manifest says")
    return index, stored


async def _commit(images: ImageStore, manifest: Manifest, name: str, layers: "_LazyLayers | _WholeLayers") -> Template:
    config = manifest.config(name)
    config.check()
    with ExitStack() as entered:
        workspace = await finished(asyncio.to_thread(entered.enter_context, images.workspace()))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(layers.bring(layer, workspace)) for layer in manifest.layers]
            return await finished(asyncio.to_thread(images.commit, config, tuple(task.result() for task in tasks)))
        except BaseExceptionGroup as failed:
            raise leading(failed) from failed
        finally:
            await finished(asyncio.to_thread(entered.close))


def _kept(images: ImageStore, digest: str) -> Layer | None:
    """How a layer is kept here already, the best way first."""
    kinds: tuple[LayerKind, ...] = ("erofs", "dir", "lazy")
    return next((found for kind in kinds if images.layer_path(found := Layer(digest, kind)).exists()), None)


def leading(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error that says most: a judgement of ours before what may follow from it."""
    flat = [
        leaf
        for error in group.exceptions
        for leaf in ([leading(error)] if isinstance(error, BaseExceptionGroup) else [error])
    ]
    return min(flat, key=lambda error: not isinstance(error, BarchanError))


async def _put_if_other(store: BlobStore, key: str, data: bytes) -> None:
    try:
        if await store.get(key, len(data)) == data:
            return
    except (NotFound, BlobCorrupt):  # missing, or longer: in any case another
        pass
    await store.put(key, data)


def _decoded(store: BlobStore, key: str, data: bytes, form: type[T]) -> T:
    try:
        found = msgspec.json.decode(data, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BlobCorrupt(f"{key} in {store.url} can't be read: {error} (try: push the image again)") from error
    if found.format != FORMAT:
        raise BlobCorrupt(f"{key} in {store.url} has format {found.format}; this release reads {FORMAT}")
    return found


def _digest_of(name: str) -> str | None:
    """The digest, if `name` is a whole one."""
    digest = name.removeprefix("sha256:")
    return digest if re.fullmatch(r"[0-9a-f]{64}", digest) else None


def _image_key(name: str) -> str:
    return f"images/{quote(name, safe='@+:')}.json"


def _manifest_key(digest: str) -> str:
    return f"manifests/{digest}.json"
