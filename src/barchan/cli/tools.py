"""`barchan tools`: programs of other projects that Barchan uses, kept in its own directory."""

import sys
from typing import Literal

from cyclopts import App

from barchan.cli.common import DEFAULTS, OK, Common, print_json
from barchan.cli.progress import progress

app = App(name="tools", help_format="plaintext")


@app.command
def install(tool: Literal["criu"], *, common: Common = DEFAULTS) -> int:
    """Install a program that is not in every distribution, or not in a version that runs here.

    Needs root and a Debian mirror in reach, and takes about 20 seconds; where it
    is installed already, it does nothing.

    For example:

        sudo barchan tools install criu

    Args:
        tool: criu: stores the memory of sandboxes, for hibernation and forks.
    """
    from barchan.backends.container import criu, criu_install

    directory = common.local_state_dir / criu.TOOL
    with progress(f"installing {tool}") as say:
        found = criu_install.install(directory, say)
    if common.json:
        print_json({"tool": tool, "version": found.version, "path": str(directory / tool)})
    else:
        sys.stdout.write(f"{tool} {found.version} in {directory}\n")
    return OK
