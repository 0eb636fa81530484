"""How much of each layer is on this disk: all of most, and of one that is read on demand what was read of it."""

import functools
from pathlib import Path

from barchan.image.store import ImageStore
from barchan.image.template import Layer
from barchan.model.node import LayerInfo

CACHE = "cache"  # beside the image store: what the node's reader keeps of lazily kept layers
BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own are


def layer_info(store: ImageStore, layer: Layer) -> LayerInfo:
    """One layer of the store; it blocks.

    Raises:
        BlobCorrupt: It is lazily kept, and its index is damaged.
        FileNotFoundError: It is lazily kept, and its image was just removed.
    """
    local = store.layer_bytes(layer)
    size = local
    if layer.kind == "lazy":
        size = _whole_bytes(store.layer_path(layer))
        local = _cached_bytes(store.root.parent / CACHE / f"{layer.digest}.data")
    return LayerInfo(digest=layer.digest, kind=layer.kind, size_bytes=size, local_bytes=min(local, size))


def layer_infos(store: ImageStore) -> list[LayerInfo]:
    """Every layer that a template of the store names; it blocks."""
    named = sorted({layer for template in store.templates() for layer in template.layers})
    return [layer_info(store, layer) for layer in named if store.layer_path(layer).exists()]


@functools.lru_cache(maxsize=1 << 16)
def _whole_bytes(path: Path) -> int:
    from barchan.image.stored import read_lazy  # which few nodes need

    return read_lazy(path).index.raw_bytes


def _cached_bytes(data: Path) -> int:
    """The reader writes chunks into a sparse file."""
    try:
        return data.stat().st_blocks * BLOCK_BYTES
    except FileNotFoundError:
        return 0
