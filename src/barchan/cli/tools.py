"""`barchan tools`: programs of other projects that Barchan uses, kept in its own directory."""

import sys
from importlib import import_module
from typing import Literal

from cyclopts import App

from barchan.cli.common import DEFAULTS, OK, Common, print_json
from barchan.cli.progress import progress

INSTALLERS = {
    "criu": "barchan.backends.container.criu_install",
    "qemu": "barchan.backends.qemu.install",
    "runsc": "barchan.backends.gvisor.install",
}

app = App(name="tools", help_format="plaintext")


@app.command
def install(tool: Literal["criu", "qemu", "runsc"], *, common: Common = DEFAULTS) -> int:
    """Install a program that is not in every distribution, or not in a version that runs here.

    Needs root and a Debian mirror in reach, and takes half a minute or so; where
    it is installed already, it does nothing.

    For example:

        sudo barchan tools install criu

    Args:
        tool: criu: stores the memory of sandboxes, for hibernation and forks.
            qemu: runs microVMs and full machines.
            runsc: runs sandboxes of gVisor.
    """
    from barchan.backends import tools

    with progress(f"installing {tool}") as say:
        found: tools.Installed = import_module(INSTALLERS[tool]).install(
            common.local_state_dir / tools.FOLDER / tool, say
        )
    if common.json:
        print_json({"tool": tool, "version": found.version, "path": str(found.path)})
    else:
        sys.stdout.write(f"{tool} {found.version} in {found.path}\n")
    return OK
