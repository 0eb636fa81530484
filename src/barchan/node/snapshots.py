"""Images made of live sandboxes, and their removal."""

import asyncio
import errno
import secrets
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from barchan.core.finished import finished
from barchan.errors import BackendError, BarchanError, CapacityError, NotFound, RequirementMissing
from barchan.image.pack import make_distinct
from barchan.image.store import NewLayer, image_info
from barchan.image.template import LAYERS_MAX, Layer, Template, TemplateConfig
from barchan.model.image import FRESH_PREFIX
from barchan.model.node import ImageInfo, SnapshotRequest
from barchan.node.images import NodeImages
from barchan.node.live import Live

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

RETRY_AFTER_MS = 1000
Pack = Callable[[Path], Awaitable[None]]


def fresh_name() -> str:
    """For an image that nobody has named."""
    return f"{FRESH_PREFIX}{secrets.token_hex(6)}"


async def snapshot(
    sandboxes: "Sandboxes", live: Live, asked: SnapshotRequest, pack: Pack, *, is_named: bool
) -> Template:
    """Make an image of a sandbox's files: its template's layers below, what it has written above.

    Args:
        pack: Writes the layer of what it has written.
        is_named: Somebody chose the image's name, and may ask for it though this is cancelled.

    Raises:
        InvalidSpec: The wish itself.
        NotFound: A layer that the sandbox was made of is not in the store any more.
        CapacityError: No room on a disk. GuestWrecked: The guest's files can't be a layer.

    Cancellation: Nothing is left, but an image that was asked for by name may have been made.
    """
    config = _config(live, asked)
    try:
        # Those below are merged first, where the new one would be one too many: the sandbox needn't wait for that.
        below, base_layers = await sandboxes.templates.fitted(live.template.layers, config.base_layers, LAYERS_MAX - 1)
        config = replace(config, base_layers=base_layers)
        return await _snapshot(sandboxes.templates, pack, config, below, is_named=is_named)
    except (BarchanError, OSError) as error:
        if live.ending is not None or not live.is_here:
            sandboxes.get(live.sandbox_id)  # says how it ended
        if isinstance(error, BarchanError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(f"no room for the image: {error}", retry_after_ms=RETRY_AFTER_MS) from error
        raise BackendError(f"the image can't be stored: {error}") from error


async def remove_image(sandboxes: "Sandboxes", name: str) -> ImageInfo:
    """Forget an image, and let go of the layers that no other one has, nor a live sandbox."""
    await sandboxes.holds.settle(sandboxes.unmount)
    template = await finished(asyncio.to_thread(sandboxes.images.remove, name))
    await sandboxes.unmount([layer.digest for layer in template.layers])
    return image_info(template)


def _config(live: Live, asked: SnapshotRequest) -> TemplateConfig:
    below = live.template
    base_layers = below.base_layers if asked.base_layers == "same" else asked.base_layers
    if base_layers is None:  # what a sandbox wrote before it was hibernated is its own
        base_layers = len(below.layers) - live.rest.own_layers
    config = TemplateConfig(
        name=asked.name or fresh_name(),
        user=below.user if asked.user is None else asked.user,
        workdir=below.workdir if asked.workdir is None else asked.workdir,
        env=below.env if asked.env is None else asked.env,
        entrypoint=below.entrypoint,
        cmd=below.cmd,
        base_layers=min(base_layers, len(below.layers)),
        needs=below.needs,
        disk=None if below.disk is None else below.disk.above(live.spec.disk_mib),
        source=f"snapshot of {live.sandbox_id}, from {' + '.join((below.name, *live.spec.layers))}",
    )
    config.check()
    if any(layer.kind == "dir" for layer in below.layers):
        raise RequirementMissing(
            "a snapshot needs layers that are EROFS files, and this host can't mount them "
            "(try: a kernel with CONFIG_EROFS_FS_BACKED_BY_FILE, and the image built again)"
        )
    return config


async def _snapshot(
    images: NodeImages, pack: Pack, config: TemplateConfig, below: tuple[Layer, ...], *, is_named: bool
) -> Template:
    with_workspace = ExitStack()
    try:
        workspace = await finished(asyncio.to_thread(with_workspace.enter_context, images.store.workspace()))
        packed = workspace / "layer.erofs"
        await pack(packed)
        try:
            return await finished(asyncio.to_thread(_commit, images, config, packed, below))
        except asyncio.CancelledError:
            if not is_named:  # nobody would ever ask for it
                with suppress(NotFound):
                    await finished(asyncio.to_thread(images.store.remove, config.name))
            raise
    finally:
        await finished(asyncio.to_thread(with_workspace.close))


def _commit(images: NodeImages, config: TemplateConfig, packed: Path, below: tuple[Layer, ...]) -> Template:
    images.drop_needless_opaque(packed, below)
    digest = make_distinct(packed, {layer.digest for layer in below})
    return images.store.commit(config, (NewLayer(Layer(digest, "erofs"), packed), *below))
