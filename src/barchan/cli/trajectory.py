"""`barchan trajectory`."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.text import Text

from barchan.cli.common import (
    DEFAULTS,
    FAILED,
    OK,
    Common,
    one_line,
    print_error,
    print_json,
    print_table,
)
from barchan.errors import BackendError, InvalidSpec, NotFound
from barchan.trajectory.atif import atif
from barchan.trajectory.chrome import chrome_trace
from barchan.trajectory.format import log_files
from barchan.trajectory.reader import Trajectory, load, read, verify
from barchan.trajectory.spans import plain
from barchan.trajectory.story import Account, account, story

app = App(name="trajectory", help_format="plaintext")

LINES_MAX = 12  # of an output in `show`, half of them from its end
Logs = Annotated[Path, Parameter(help="A log, or a folder with logs in it, such as a run's.")]


def _logs(path: Path) -> list[Path]:
    found = log_files(path)
    if not found:
        raise NotFound(f"there is no trajectory log below {path} (try: a run's folder)")
    return found


@app.command
def show(source: Logs, /, *, full: bool = False, common: Common = DEFAULTS) -> int:
    """Tell what happened in a rollout, turn by turn; of a folder, one line per rollout.

    For example:

        barchan trajectory show runs/a/trajectories/a-000003.trajectory.jsonl
        barchan trajectory show runs/a

    Args:
        full: Show whole outputs; otherwise a few lines of each.
    """
    logs = _logs(source)
    if common.json:
        print_json([account(load(path)) for path in logs])
    elif source.is_dir():
        columns = ("ROLLOUT", "TASK", "TURNS", "TOOLS", "EXECS", "TOKENS", "SECONDS", "STATUS", "REWARD", "CAUSE")
        print_table(columns, [_row(account(load(path))) for path in logs], empty="no logs")
    else:
        _tell(load(source), full=full)
    return OK


def _row(told: Account) -> list[str]:
    return [
        told.rollout_id,
        told.task_id,
        str(told.turns),
        str(told.tool_calls),
        str(told.execs),
        f"{told.prompt_tokens}+{told.completion_tokens}",
        f"{told.seconds:.1f}",
        told.status,
        "-" if told.reward is None else f"{told.reward:g}",
        told.cause,
    ]


def _tell(log: Trajectory, *, full: bool) -> None:
    told = account(log)
    console = Console(highlight=False, soft_wrap=True)
    policy = f", policy {told.policy}" if told.policy else ""
    console.print(Text(one_line(f"{told.rollout_id}: task {told.task_id}, run {told.run_id}{policy}"), "bold"))
    for line in story(log):
        indent = "    " if line.nested else "  "
        console.print(
            Text(f"{line.seq:>5} {line.at_s:>9.3f} s {indent}{one_line(line.text)}", "" if line.good else "red")
        )
        for text in _cut(line.detail.splitlines(), full=full):
            console.print(Text(f"{'':>18}{indent}| {_printable(text)}", "dim"))
    if told.open_intents:
        console.print(Text(f"no result in the log for: {', '.join(map(str, told.open_intents))}", "red"))
    if told.torn_bytes:
        console.print(Text(f"the writer was killed in an entry: {told.torn_bytes} bytes of it are left", "red"))


def _cut(lines: list[str], *, full: bool) -> list[str]:
    if full or len(lines) <= LINES_MAX:
        return lines
    half = LINES_MAX // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} lines more ...", *lines[-half:]]


def _printable(text: str) -> str:
    """A guest's output must not steer the terminal; its spaces stay, unlike in `one_line`."""
    return "".join(char if char.isprintable() else " " for char in text)


@app.command(name="verify")
def verify_(source: Logs, /, *, common: Common = DEFAULTS) -> int:
    """Check that logs are as they were written: nothing changed, removed, reordered or repeated.

    Exit code 1 if one is broken. A last entry that its writer was killed in is
    no break; whole entries missing at a log's end can't be seen from the log.

    For example:

        barchan trajectory verify runs/a
    """
    checked = [(path, verify(path)) for path in _logs(source)]
    if common.json:
        print_json([{"path": str(path), **msgspec.structs.asdict(found)} for path, found in checked])
    broken = [(path, found) for path, found in checked if not found.ok]
    for path, found in broken:
        print_error(f"{path}: entry {found.bad_seq}: {found.why}")
    if not common.json:
        entries = sum(found.entries for _, found in checked)
        torn = sum(found.torn_bytes > 0 for _, found in checked)
        pending = sum(len(found.open_intents) for _, found in checked)
        sys.stdout.write(
            f"{len(checked)} logs, {entries} entries: {len(broken)} broken, {torn} torn at the end, "
            f"{pending} intents without a result\n"
        )
    return FAILED if broken else OK


@app.command
def export(
    source: Logs,
    /,
    *,
    format: Literal["jsonl", "atif", "chrome"],
    out: Path | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Write logs in another format.

    jsonl: one line per entry, without hashes, every value readable.
    atif: Harbor's trajectory format; of a folder, one file per rollout.
    chrome: a trace for Perfetto or chrome://tracing, one row per rollout.

    For example:

        barchan trajectory export runs/a --format chrome --out trace.json
        barchan trajectory export runs/a --format atif --out atif/

    Args:
        format: What to write.
        out: Where to: a file, or a folder for atif of a folder. Default: stdout.
    """
    logs = _logs(source)
    if format == "atif" and source.is_dir():
        if out is None:
            raise InvalidSpec("atif of a folder is one file per rollout: give --out FOLDER")
        for path in logs:
            log = load(path)
            _write(out / f"{log.header.rollout_id}.json", [_json(atif(log))])
    elif format == "atif":
        _write(out, [_json(atif(load(source)))])
    elif format == "chrome":
        _write(out, [_json(chrome_trace(load(path) for path in logs))])
    else:
        _write(out, (line for path in logs for line in _flat(path)))
    if common.json:
        print_json({"logs": len(logs), "format": format, "out": None if out is None else str(out)})
    return OK


def _flat(path: Path) -> Iterator[bytes]:
    rollout_id = ""
    for entry in read(path):
        rollout_id = entry.body.get("rollout_id", "") if entry.part == "header" else rollout_id
        fields = {name: value for name, value in msgspec.structs.asdict(entry).items() if value is not None}
        del fields["prev_hash"]
        yield _json({"rollout_id": rollout_id, **fields, "body": plain(entry.body)})


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _write(out: Path | None, lines: Iterable[bytes]) -> None:
    if out is None:
        for line in lines:
            sys.stdout.write(line.decode())
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("wb") as file:
            file.writelines(lines)
    except OSError as error:
        raise BackendError(f"{out} can't be written: {error.strerror}") from error
