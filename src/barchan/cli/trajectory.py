"""`barchan trajectory`."""

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import App, Parameter
from msgspec import Struct
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
from barchan.errors import BackendError, BlobCorrupt, InvalidSpec, NotFound
from barchan.rollout.shared import Lines
from barchan.rollout.store import ROLLOUTS
from barchan.trajectory.atif import atif
from barchan.trajectory.chrome import chrome_trace
from barchan.trajectory.format import SUFFIX, log_files, log_path
from barchan.trajectory.reader import Trajectory, Verification, load, read, verify
from barchan.trajectory.spans import plain
from barchan.trajectory.story import Account, Line, account, story
from barchan.trajectory.story import follow as followed

app = App(name="trajectory", help_format="plaintext")
app.command("barchan.cli.trajectory_replay:replay_", name="replay", help="Carry a rollout's operations out again.")

FOLLOW_PAUSE_S = 0.1
LINES_MAX = 12  # of an output in `show`, half of them from its end
GONE = Verification(ok=False, entries=0, why="it is gone, and the results of its run know it")
Logs = Annotated[Path, Parameter(help="A log, or a folder with logs in it, such as a run's.")]


def _logs(path: Path) -> list[Path]:
    found = log_files(path)
    if not found:
        raise NotFound(f"there is no trajectory log below {path} (try: a run's folder)")
    return found


@app.command
def show(source: Logs, /, *, full: bool = False, follow: bool = False, common: Common = DEFAULTS) -> int:
    """Tell what happened in a rollout, turn by turn; of a folder, one line per rollout.

    Exit code 1 if a log of the folder can't be read; the others are told of.

    For example:

        barchan trajectory show runs/a/trajectories/a-000003.trajectory.jsonl
        barchan trajectory show runs/a/trajectories/a-000003.trajectory.jsonl --follow
        barchan trajectory show runs/a

    Args:
        full: Show whole outputs; otherwise a few lines of each.
        follow: Of one log: go on as it is written, until its verdict.
    """
    if follow:
        return _follow(source, full=full, as_json=common.json)
    if source.is_dir():
        return _show_folder(source, as_json=common.json)
    if common.json:
        print_json([account(load(path)) for path in _logs(source)])
    else:
        _tell(load(source), full=full)
    return OK


def _show_folder(folder: Path, *, as_json: bool) -> int:
    told, broken = [], False
    for path in _logs(folder):
        try:
            told.append(account(load(path)))
        except BlobCorrupt as error:
            broken = True
            print_error(str(error))
    if as_json:
        print_json(told)
    else:
        columns = ("ROLLOUT", "TASK", "TURNS", "TOOLS", "EXECS", "TOKENS", "SECONDS", "STATUS", "REWARD", "CAUSE")
        print_table(columns, [_row(one) for one in told], empty="no logs")
    return FAILED if broken else OK


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
        _print_line(console, line, full=full)
    if told.open_intents:
        console.print(Text(f"no result in the log for: {', '.join(map(str, told.open_intents))}", "red"))
    if told.torn_bytes:
        console.print(Text(f"the writer was killed in an entry: {told.torn_bytes} bytes of it are left", "red"))


def _print_line(console: Console, line: Line, *, full: bool) -> None:
    indent, style = "    " if line.nested else "  ", "" if line.good else "red"
    first, *more = _cut(line.text.splitlines() or [""], full=full)
    console.print(Text(f"{line.seq:>5} {line.at_s:>9.3f} s {indent}{_printable(first)}", style))
    for text in more:  # of a command with several lines, each with its own indentation
        console.print(Text(f"{'':>18}{indent}  {_printable(text)}", style))
    for text in _cut(line.detail.splitlines(), full=full):
        console.print(Text(f"{'':>18}{indent}| {_printable(text)}", "dim"))


def _follow(source: Path, *, full: bool, as_json: bool) -> int:
    if source.is_dir():
        raise InvalidSpec("--follow is of one log, and this is a folder: name a file below its trajectories/")
    console = Console(highlight=False, soft_wrap=True)
    for line in followed(source, lambda: time.sleep(FOLLOW_PAUSE_S)):
        if as_json:
            print_json(line)
        else:
            _print_line(console, line, full=full)
    return OK


def _cut(lines: list[str], *, full: bool) -> list[str]:
    if full or len(lines) <= LINES_MAX:
        return lines
    half = LINES_MAX // 2
    return [*lines[:half], f"... {len(lines) - 2 * half} lines more ...", *lines[-half:]]


def _printable(text: str) -> str:
    """A guest's output must not steer the terminal; its spaces stay, unlike in `one_line`."""
    return "".join(char if char.isprintable() else " " for char in text)


class _Head(Struct, frozen=True):
    """What is read of a line of a run's results."""

    rollout_id: str = ""
    head_hash: str = ""


@app.command(name="verify")
def verify_(source: Logs, /, *, common: Common = DEFAULTS) -> int:
    """Check that logs are as they were written: nothing changed, removed, reordered or repeated.

    In a run's folder they are held to its results, too, which know the last
    entry of each rollout that is over: so a log that was cut at its end, or
    is gone, is found. Of one without a line there, that can't be seen.

    Exit code 1 if one is broken. A last entry that its writer was killed in is
    no break.

    For example:

        barchan trajectory verify runs/a
    """
    logs = _logs(source)
    heads = _heads({path.parent.parent for path in logs})
    checked = [(path, verify(path, head_hash=heads.get(path))) for path in logs]
    if source.is_dir():
        checked += [(path, GONE) for path in heads if not path.exists()]
    if common.json:
        print_json([{"path": str(path), **msgspec.structs.asdict(found)} for path, found in checked])
    broken = [(path, found) for path, found in checked if not found.ok]
    for path, found in broken:
        place = "" if found.bad_seq is None else f"entry {found.bad_seq}: "
        print_error(f"{path}: {place}{found.why}")
    if not common.json:
        entries = sum(found.entries for _, found in checked)
        torn = sum(found.torn_bytes > 0 for _, found in checked)
        pending = sum(len(found.open_intents) for _, found in checked)
        sys.stdout.write(
            f"{len(checked)} logs, {entries} entries: {len(broken)} broken, {torn} torn at the end, "
            f"{pending} intents without a result\n"
        )
    return FAILED if broken else OK


def _heads(folders: Iterable[Path]) -> dict[Path, str]:
    """The hash of each log's last entry, as the results of these runs have it."""
    found: dict[Path, str] = {}
    for folder in folders:
        if (folder / ROLLOUTS).exists():  # else it is no run's
            rows = Lines(folder / ROLLOUTS, _Head).new()
            found |= {log_path(folder, row.rollout_id): row.head_hash for row in rows if row.head_hash}
    return found


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
            # By its own name: what a log says of itself, which may be anybody's, names no file.
            _write(out / f"{path.name.removesuffix(SUFFIX)}.json", [_json(atif(load(path)))])
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
