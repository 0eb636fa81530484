"""Room on the node's disk: what goes of its images, and what there is of each layer."""

import asyncio

from barchan.core.finished import finished
from barchan.image.local import layer_infos
from barchan.model.gc import GcReport, GcRequest
from barchan.model.node import LayerInfo
from barchan.node import kept_machines
from barchan.node.sandboxes import Sandboxes


async def collect(sandboxes: Sandboxes, asked: GcRequest) -> GcReport:
    """Remove left-over layers and the images that were asked for, but none that a sandbox here is made of.

    Raises:
        BlobCorrupt: A template can't be read, so that nobody knows which layers it names. Nothing was removed.
    """
    await sandboxes.holds.settle(sandboxes.unmount)
    # Those that still wait for their start are known by their create id only.
    users = (*sandboxes.live.values(), *sandboxes.by_create.values())
    busy = {layer.digest for live in users for layer in live.template.layers}
    report = await finished(asyncio.to_thread(sandboxes.images.collect, asked, busy))
    if not asked.dry_run:
        await sandboxes.unmount()
        await kept_machines.tidy(sandboxes)
    return report


async def layers(sandboxes: Sandboxes) -> list[LayerInfo]:
    """Every layer that an image here names, and how much of it is on this disk."""
    return await asyncio.to_thread(layer_infos, sandboxes.images)
