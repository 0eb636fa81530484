"""`barchan doctor`."""

import sys

from barchan.backends.container.probe import requirements, usable
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, print_json, terminal_width
from barchan.model.node import Requirement


def doctor(*, common: Common = DEFAULTS) -> int:
    """Check what Barchan needs of this machine by trying it.

    Nothing is left behind. The exit code is 0 when the container backend is
    usable, else 1.

    For example:

        barchan doctor
        sudo barchan doctor --json
    """
    checked = requirements(common.local_state_dir)
    if common.json:
        print_json(checked)
    else:
        _print(checked)
    return OK if usable(checked) else FAILED


def _print(checked: list[Requirement]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("requirement", "holds", "needed for", "found", "remedy"):
        table.add_column(column, overflow="fold")
    for item in checked:
        holds = Text("yes", "green") if item.ok else Text("no", "bold red")
        table.add_row(Text(item.name), holds, Text(item.needed_for), Text(item.found), Text(item.remedy))
    Console(file=sys.stdout, width=terminal_width() or 160, highlight=False).print(table)
    failed = [item.name for item in checked if not item.ok and item.needed_for == "container"]
    if failed:
        sys.stdout.write(f"\nThe container backend can't run here: {', '.join(failed)}.\n")
    else:
        sys.stdout.write("\nThe container backend can run here.\n")
