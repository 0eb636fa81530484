"""Whether what is stored is what was stored: every layer, template and cached chunk against its digest."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from msgspec import Struct

from barchan.errors import BlobCorrupt, NotFound
from barchan.image.compose import config_of
from barchan.image.index import SUFFIX, layer_file
from barchan.image.lazy.cache import PRESENT, read_notes
from barchan.image.local import CACHE
from barchan.image.store import ImageStore
from barchan.image.template import Layer, Template, template_digest
from barchan.image.whole import AGAIN, identity_of, packed_again

Progress = Callable[[str], None]


class Damage(Struct, frozen=True, kw_only=True):
    """Something that is not what its digest says. `images`: those that can't be trusted because of it."""

    what: str
    cause: str
    images: tuple[str, ...]


class VerifyReport(Struct, frozen=True, kw_only=True):
    """What was looked at, and what was found. `bytes_read`: of layers and cached chunks."""

    images: int
    layers: int
    bytes_read: int
    damages: tuple[Damage, ...]


def verify(store: ImageStore, names: Sequence[str], progress: Progress) -> VerifyReport:
    """Read everything that these images need (none given: all of the store). It blocks for as long as that takes.

    A layer that is a directory is packed again, for which there must be room; of one that doesn't say which layer it
    is, only the presence is checked.

    Raises:
        NotFound: There is no image of one of the names. CapacityError: The disk is full.
    """
    damages: list[Damage] = []
    templates: list[Template] = []
    for name in dict.fromkeys(names) if names else _every_name(store):
        try:
            templates.append(store.resolve(name))
        except BlobCorrupt as error:
            damages.append(Damage(what=f"template {name}", cause=str(error), images=(name,)))
        except NotFound:
            if names:  # else it has just been removed
                raise
    damages += [_template_damage(template) for template in templates if _digest(template) != template.digest]
    users: dict[Layer, list[str]] = {}
    for template in templates:
        for layer in template.layers:
            users.setdefault(layer, []).append(template.name)
    bytes_read = 0
    for number, (layer, images) in enumerate(users.items(), 1):
        progress(f"layer {number} of {len(users)}, {layer.digest[:12]}")
        try:
            bytes_read += _check(store, layer)
        except (BlobCorrupt, NotFound) as error:
            still = tuple(name for name in images if _names(store, name, layer))
            if still:
                damages.append(Damage(what=f"layer {layer_file(layer)}", cause=str(error), images=still))
    return VerifyReport(images=len(templates), layers=len(users), bytes_read=bytes_read, damages=tuple(damages))


def _every_name(store: ImageStore) -> list[str]:
    return sorted(unquote(path.name.removesuffix(SUFFIX)) for path in (store.root / "templates").glob(f"*{SUFFIX}"))


def _digest(template: Template) -> str:
    return template_digest(config_of(template), template.layers)


def _template_damage(template: Template) -> Damage:
    remedy = f"(try: barchan image remove {template.name}, then build or pull it again)"
    cause = f"its digest is {_digest(template)}, not {template.digest} {remedy}"
    return Damage(what=f"template {template.name}", cause=cause, images=(template.name,))


def _names(store: ImageStore, name: str, layer: Layer) -> bool:
    """Whether an image still needs a layer: it may have been removed while everything was read."""
    with suppress(NotFound):
        return layer in store.resolve(name).layers
    return False


def _check(store: ImageStore, layer: Layer) -> int:
    """Bytes that were read and are right. Raises `BlobCorrupt` or `NotFound`."""
    from barchan.image.erofs import verify_layer

    path = store.layer_path(layer)
    try:
        if layer.kind == "dir":
            return _check_directory(store, path, layer.digest)
        if layer.kind == "lazy":
            return _check_cached(path, store.root.parent / CACHE, layer.digest)
        verify_layer(path, layer.digest)
        return path.stat().st_size
    except FileNotFoundError:
        raise NotFound(f"{path.name} is missing {AGAIN}") from None


def _check_directory(store: ImageStore, tree: Path, digest: str) -> int:
    """Bytes of the layer that a directory packs to, if it does; 0: it was made otherwise than by `image.unpack`."""
    if not identity_of(tree):
        return 0
    with store.workspace() as workspace:
        packed = workspace / "layer.erofs"
        found = packed_again(tree, packed)
        if found != digest:
            raise BlobCorrupt(f"{tree.name} is damaged: packed again its sha256 is {found}, not {digest} {AGAIN}")
        return packed.stat().st_size


def _check_cached(path: Path, cache: Path, digest: str) -> int:
    """The index of a lazily kept layer, and those of its chunks that the reader would give without asking the store."""
    from barchan.image.stored import read_lazy  # which not every store needs

    index = read_lazy(path).index
    notes = read_notes(cache, digest, index.count)
    if not notes:
        return 0
    try:
        data = (cache / f"{digest}.data").open("rb")
    except FileNotFoundError:
        return 0  # its last sandbox has ended meanwhile
    bytes_read = 0
    with data:
        for chunk in (chunk for chunk in range(index.count) if notes[chunk] == PRESENT):
            raw = os.pread(data.fileno(), index.size(chunk), chunk * index.chunk_bytes)
            if hashlib.sha256(raw).digest() != index.sha256(chunk):
                now = read_notes(cache, digest, index.count)
                if now and now[chunk] == PRESENT:  # else it was evicted meanwhile
                    raise BlobCorrupt(
                        f"chunk {chunk} of {digest} is damaged in the cache "
                        f"(try: end its sandboxes, remove {cache}/{digest}.*)"
                    )
            bytes_read += len(raw)
    return bytes_read
