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
# With and without systemd; an agent that runs already keeps the line, and this one ends.
START = f"""#!/bin/sh
mkdir -p /usr/local/sbin
cp "$1/agent" {agent.PATH}.new && chmod 755 {agent.PATH}.new && mv {agent.PATH}.new {agent.PATH}
modprobe virtio_console 2>/dev/null
if [ -d /run/systemd/system ]; then
    systemd-run --quiet --collect --unit barchan-agent \\
        {" ".join(f"--property {item}" for item in agent.PROPERTIES)} {agent.COMMAND}
else
    mkdir -p -m 700 {agent.SPOOL_DIR}
    setsid {agent.COMMAND} </dev/null >/dev/null 2>&1 &
fi
"""
USER_DATA = f"""#cloud-config
bootcmd:
  - [sh, -c, "mkdir -p /run/barchan-seed && mount -o ro -t vfat LABEL={LABEL} /run/barchan-seed && sh /run/barchan-seed/start /run/barchan-seed; umount /run/barchan-seed"]
"""  # noqa: E501 - one line of YAML


def seed_bytes(program: bytes) -> bytes:
    """The disk, whole."""
    instance = hashlib.sha256(program + START.encode() + USER_DATA.encode()).hexdigest()[:16]
    files = {
        "meta-data": f"instance-id: barchan-{instance}\n".encode(),
        "user-data": USER_DATA.encode(),
        "start": START.encode(),
        "agent": program,
    }
    return file_system(LABEL, files)


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
