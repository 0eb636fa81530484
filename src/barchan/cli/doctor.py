"""`barchan doctor`."""

import sys

from barchan.backends.container.probe import usable
from barchan.cli.backend_checks import BackendCheck, Report, examine, with_boots
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, print_json, terminal_width
from barchan.cli.progress import progress
from barchan.model.node import Requirement

CONTAINER = "container"


def doctor(*, quick: bool = False, common: Common = DEFAULTS) -> int:
    """Check what Barchan needs of this machine, and each backend by a real boot.

    Requirements are tried, not asked for. Then this user's node starts a
    sandbox of each backend and runs a program in it. Nothing is left behind
    but the node, which ends by itself. The exit code is 0 when the container
    backend runs here, else 1.

    For example:

        barchan doctor
        sudo barchan doctor --json
        barchan doctor --quick

    Args:
        quick: Start nothing: say what is missing, and take what has all it needs for good.
    """
    with progress("trying what is needed") as say:
        report = examine(common.local_state_dir)
        if not quick:
            report = with_boots(report, common.local_state_dir, say)
    if common.json:
        print_json(report)
    else:
        _print(report)
    return OK if usable(report.requirements) and _runs(report, CONTAINER) else FAILED


def _runs(report: Report, name: str) -> bool:
    return any(check.name == name and check.ok for check in report.backends)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, width=terminal_width() or 160, highlight=False)

    def show(columns: tuple[str, ...], rows: list[list[Text]]) -> None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def holds(ok: bool) -> Text:
        return Text("yes", "green") if ok else Text("no", "bold red")

    def needed(item: Requirement) -> list[Text]:
        remedy = "" if item.ok else item.remedy
        return [Text(item.name), holds(item.ok), Text(item.needed_for), Text(item.found), Text(remedy)]

    def tried(check: BackendCheck) -> list[Text]:
        times = [Text("" if ms is None else f"{ms:.1f}") for ms in (check.first_ms, check.again_ms, check.exec_ms)]
        return [Text(check.name), holds(check.ok), Text(check.isolation), *times, Text(check.why), Text(check.remedy)]

    show(("requirement", "holds", "needed for", "found", "remedy"), [needed(item) for item in report.requirements])
    sys.stdout.write("\n")
    columns = ("backend", "runs", "isolation", "first start, ms", "next, ms", "exec, ms", "why not", "remedy")
    show(columns, [tried(check) for check in report.backends])
    failed = [item.name for item in report.requirements if not item.ok and item.needed_for == CONTAINER]
    if failed:
        sys.stdout.write(f"\nThe container backend can't run here: {', '.join(failed)}.\n")
    elif not _runs(report, CONTAINER):
        sys.stdout.write("\nThe container backend does not run here.\n")
    else:
        sys.stdout.write("\nThe container backend can run here.\n")
