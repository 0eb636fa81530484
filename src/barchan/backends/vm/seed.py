"""The seed: a small disk from which a guest with cloud-init gets our agent, and what the image's owner tells it.

It is the same for all machines of an image, which are told apart later; so it is made once, and lies in a layer of the
host.
"""

import base64
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
# Apart from the owner's, so that it is run whatever kind theirs is, before it, and at each start.
HOOK = f"""#cloud-boothook
#!/bin/sh
mkdir -p /run/barchan-seed && mount -o ro -t vfat LABEL={LABEL} /run/barchan-seed && sh /run/barchan-seed/start /run/barchan-seed
umount /run/barchan-seed
"""  # noqa: E501 - one line of a program
# cloud-init finds out from its first line what a part of type text/plain is.
_PARTS = """Content-Type: multipart/mixed; boundary="{boundary}"
MIME-Version: 1.0

--{boundary}
Content-Type: text/cloud-boothook; charset="utf-8"
Content-Transfer-Encoding: base64

{hook}
--{boundary}
Content-Type: text/plain; charset="utf-8"
Content-Transfer-Encoding: base64

{own}
--{boundary}--
"""


def user_data(own: str) -> str:
    """What cloud-init is told: to start our agent, and what the owner of the image wants, if anything."""
    if not own:
        return HOOK
    hook, added = (base64.encodebytes(text.encode()).decode().strip() for text in (HOOK, own))
    return _PARTS.format(boundary="====barchan====", hook=hook, own=added)  # no line of base64 is like that


def seed_bytes(program: bytes, own: str = "") -> bytes:
    """The disk, whole."""
    files = {
        "user-data": user_data(own).encode(),
        "start": agent.START.encode(),
        "launch": agent.LAUNCH.encode(),
        "agent": program,
    }
    instance = hashlib.sha256(b"\0".join(files.values())).hexdigest()[:16]
    return file_system(LABEL, {"meta-data": f"instance-id: barchan-{instance}\n".encode(), **files})


def seed_layer(folder: Path, own: str = "") -> HostLayer:
    """The layer with the seed of this release, made where it is not there. Blocking.

    Args:
        folder: Of the backend, on this node.
        own: What the owner of the image wants cloud-init to do.
    """
    data = seed_bytes(agent.PROGRAM.read_bytes(), own)
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
