"""The seed: a small disk from which a guest with cloud-init gets our agent, at its first start and at every later one.

It is the same for all machines, which are told apart later; so it is made once, and lies in a layer of the host.
"""

import hashlib
import os
import secrets
import shutil
from pathlib import Path

from barchan.backends.hosted.outer import HostLayer
from barchan.image import agent
from barchan.image.fat import file_system
from barchan.image.template import Disk

FILE = f"{Disk.FOLDER}/seed"
LABEL = "CIDATA"  # by which cloud-init finds it
USER_DATA = f"""#cloud-config
bootcmd:
  - [sh, -c, "mkdir -p /run/barchan-seed && mount -o ro -t vfat LABEL={LABEL} /run/barchan-seed && sh /run/barchan-seed/start /run/barchan-seed; umount /run/barchan-seed"]
"""  # noqa: E501 - one line of YAML


def seed_bytes(program: bytes) -> bytes:
    """The disk, whole."""
    files = {
        "user-data": USER_DATA.encode(),
        "start": agent.START.encode(),
        "launch": agent.LAUNCH.encode(),
        "agent": program,
    }
    instance = hashlib.sha256(b"\0".join(files.values())).hexdigest()[:16]
    return file_system(LABEL, {"meta-data": f"instance-id: barchan-{instance}\n".encode(), **files})


def seed_layer(folder: Path) -> HostLayer:
    """The layer with the seed of this release, made where it is not there. Blocking.

    Args:
        folder: Of the backend, on this node.
    """
    data = seed_bytes(agent.PROGRAM.read_bytes())
    name = f"vm-seed-{hashlib.sha256(data).hexdigest()[:16]}"
    target = folder / name
    if not target.exists():
        beside = folder / f"{name}.{secrets.token_hex(4)}"
        file = beside / FILE
        file.parent.mkdir(parents=True)
        file.write_bytes(data)
        for path in (beside, file.parent):
            path.chmod(0o755)
        file.chmod(0o444)
        try:
            beside.rename(target)
        except OSError:  # another one was faster
            shutil.rmtree(beside)
            if not os.path.isdir(target):
                raise
    return HostLayer(name, target)
