"""What the backends of machines have in the state directory, where nobody has used them since the node began: then
nobody else looks for what goes with its image, or was left by an earlier node.
"""

import asyncio
from typing import TYPE_CHECKING, cast

from barchan import backends
from barchan.errors import BarchanError

if TYPE_CHECKING:
    from barchan.backends.qemu.backend import MachineBackend
    from barchan.node.sandboxes import Sandboxes

MACHINES = ("microvm", "vm")


async def tidy(sandboxes: "Sandboxes") -> None:
    """Remove what no image and no sandbox needs; a backend that runs does so by itself. Not before the node has found
    its sandboxes.
    """
    for name in MACHINES:
        if not (sandboxes.state_dir / name).is_dir():
            continue
        async with sandboxes.backend_turns[name]:
            if sandboxes.running_backend(name) is None:
                try:
                    await cast("MachineBackend", backends.load(name, sandboxes)).tidy()
                except (BarchanError, OSError) as error:  # by the next node, or when it is used
                    asyncio.get_running_loop().call_exception_handler(
                        {"message": f"what the {name} backend keeps was not looked through", "exception": error}
                    )
