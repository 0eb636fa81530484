"""A layer as the one EROFS file that it is, however a store keeps it: for those who can read nothing else."""

import asyncio
import errno
import hashlib
import os
from pathlib import Path

from barchan.errors import BlobCorrupt, BlobUnavailable, Denied, InvalidSpec, NotFound, TransportError
from barchan.image.blobs import BlobStore
from barchan.image.chunks import ChunkIndex
from barchan.image.download import Downloads
from barchan.image.erofs import IDENTITY_AT, IDENTITY_BYTES
from barchan.image.pack import pack_tree
from barchan.image.remote import leading
from barchan.image.store import ImageStore
from barchan.image.stored import read_lazy
from barchan.image.template import Layer
from barchan.image.unpack import IDENTITY

AGAIN = "(try: remove its images, then build or pull them again)"


def whole_file(store: ImageStore, layer: Layer, workspace: Path) -> Path:
    """Its file: that of the store, or one that is made in `workspace`. Blocking, in a thread without an event loop: a
    directory is packed again, and one that is kept without its data is fetched from its blob store, all of it.

    Raises:
        FileNotFoundError: It is not in the store.
        BlobUnavailable: Its blob store can't be reached, or has it no more. BlobCorrupt: It is damaged.
        CapacityError: The disk is full. RequirementMissing: There is no packer.
    """
    path = store.layer_path(layer)
    if layer.kind == "erofs":
        return path
    target = workspace / f"{layer.digest}.whole"
    if layer.kind == "lazy":
        lazy = read_lazy(path)
        asyncio.run(_fetched(lazy.url, lazy.index, target))
    elif (found := packed_again(path, target)) != layer.digest and identity_of(path):
        raise BlobCorrupt(f"{path.name} is damaged: packed again its sha256 is {found}, not {layer.digest} {AGAIN}")
    return target


def identity_of(tree: Path) -> bytes:
    """What a layer that is kept as a directory says it is; empty if it was made otherwise than by `image.unpack`."""
    try:
        return os.getxattr(tree, IDENTITY)[:IDENTITY_BYTES]
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.ENOTSUP):
            raise
        return b""


def packed_again(tree: Path, target: Path) -> str:
    """Pack a layer that is kept as a directory; returns the sha256 of the file, in hex: that of the layer, unless it is
    damaged or does not say what it is.

    Raises:
        BlobCorrupt: It holds what no layer does. CapacityError: The disk is full.
        RequirementMissing: There is no packer.
    """
    identity = identity_of(tree)
    try:
        pack_tree(tree, target)
    except InvalidSpec as error:
        raise BlobCorrupt(f"{tree.name} is damaged: {error} {AGAIN}") from error
    with target.open("r+b") as file:
        if identity:
            os.pwrite(file.fileno(), identity, IDENTITY_AT)
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _fetched(url: str, index: ChunkIndex, target: Path) -> None:
    try:
        await Downloads(BlobStore.open(url), lambda what, done, total: None).layer(index, target)
    except BaseExceptionGroup as failed:
        error = leading(failed)
        if isinstance(error, TransportError | Denied | NotFound):
            raise BlobUnavailable(f"layer {index.layer[:12]} can't be fetched from {url}: {error}") from failed
        raise error from failed
