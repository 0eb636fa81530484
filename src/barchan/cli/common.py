"""What every command shares: global options, output, errors on one line, exit codes."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Group, Parameter

from barchan.errors import BarchanError, CallerError, Denied, InvalidSpec, NotFound, Preempted, RunStopped
from barchan.sdk.endpoint import default_state_dir
from barchan.wire.api import error_body

OK, FAILED, USAGE, PLATFORM, STOPPED, PREEMPTED, NOT_THE_GUEST, INTERRUPTED = 0, 1, 2, 3, 4, 5, 125, 130
# The exit code of these commands is that of the program in the sandbox; every failure of ours is NOT_THE_GUEST.
GUEST_COMMANDS = ("run", "exec", "call")
GLOBAL_GROUP = Group("Global options", sort_key=100)

Json = Annotated[bool, Parameter(help="Print one JSON value on the last line of stdout.")]
StateDir = Annotated[Path | None, Parameter(help="Where the node keeps its state (environment: BARCHAN_STATE_DIR).")]
Url = Annotated[
    str | None, Parameter(help="The node to use: http://HOST:PORT or unix:///PATH (environment: BARCHAN_URL).")
]
TokenFile = Annotated[
    Path | None, Parameter(help="A file with the token for --url (or environment BARCHAN_TOKEN: the token itself).")
]


@Parameter(name="*", group=GLOBAL_GROUP)
@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command; they may also stand before it."""

    json: Json = False
    state_dir: StateDir = None
    url: Url = None
    token_file: TokenFile = None

    @property
    def local_state_dir(self) -> Path:
        """The state directory on this machine."""
        return self.state_dir.absolute() if self.state_dir is not None else default_state_dir()

    @property
    def node_url(self) -> str | None:
        """The address asked for; None: this machine's own node. Options win over the environment."""
        if self.url is not None and self.state_dir is not None:
            raise InvalidSpec("give --url or --state-dir, not both")
        if self.state_dir is not None:
            return None
        return self.url or os.environ.get("BARCHAN_URL") or None

    @property
    def token(self) -> str | None:
        if self.token_file is None:
            return os.environ.get("BARCHAN_TOKEN") or None
        try:
            return self.token_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpec(f"the token file {self.token_file} can't be read: {error}") from error

    @property
    def connection(self) -> dict[str, Any]:
        """Arguments of `barchan.connect`."""
        url = self.node_url
        if url is not None:
            return {"url": url, "token": self.token}
        store = os.environ.get("BARCHAN_STORE")
        return {"state_dir": self.local_state_dir, **({"store": store} if store else {})}


DEFAULTS = Common()
GLOBAL_FLAGS = ("--json",)
GLOBAL_VALUES = ("--state-dir", "--url", "--token-file")


def hoist_globals(arguments: Sequence[str]) -> list[str]:
    """Move global options that stand before the command behind its own words, where they are parsed."""
    rest, leading = list(arguments), []
    while rest:
        name, has_value, _ = rest[0].partition("=")
        if rest[0] in GLOBAL_FLAGS or (has_value and name in GLOBAL_VALUES):
            leading.append(rest.pop(0))
        elif rest[0] in GLOBAL_VALUES and len(rest) > 1:
            leading += [rest.pop(0), rest.pop(0)]
        else:
            break
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *leading, *rest[end:]]


def print_json(value: Any) -> None:
    """One line that holds the whole answer."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def one_line(text: str) -> str:
    """Text fit for one line of a terminal: a guest's message must not steer it."""
    return " ".join(_printable(text).split())


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def print_error(message: str, hint: str = "") -> None:
    line = one_line(message)
    if hint and "(try: " not in line:
        line += f" (try: {hint})"
    sys.stderr.write(f"error: {line}\n")


def report(error: BarchanError, *, command: str, as_json: bool) -> int:
    """Say what went wrong, and what it makes the exit code."""
    print_error(str(error), hint_of(error, command))
    if as_json:
        print_json({"error": error_body(error)})
    if command.partition(" ")[0] in GUEST_COMMANDS:
        return NOT_THE_GUEST
    if isinstance(error, InvalidSpec):
        return USAGE
    if isinstance(error, RunStopped | Preempted):
        return STOPPED if isinstance(error, RunStopped) else PREEMPTED
    return FAILED if isinstance(error, CallerError) or error.fault in ("policy", "task") else PLATFORM


MISSING = {
    "sandbox_id": "barchan ps",
    "snapshot_id": "barchan snapshot list",
    "template": "barchan image list",
    "process_id": "another process",
}
HINTS = {
    "capacity": "again in a moment, or barchan ps to see what runs",
    "sandbox_expired": "barchan run",
    "requirement_missing": "barchan doctor",
    "connect_timeout": "barchan up, or another --url",
    "connection_lost": "barchan up, or another --url; a node's log is node.log in its state directory",
    "conflict": "another name or id",
    "blob_corrupt": "another copy of it; barchan image verify tells what is damaged here",
}
DEFAULT_HINT = "barchan doctor; the node's own log is node.log in its state directory"


def hint_of(error: BarchanError, command: str) -> str:
    """The next step for an error whose message does not name one; `command` with its own subcommand."""
    if isinstance(error, InvalidSpec):
        return f"barchan {command} --help".replace("  ", " ")
    if isinstance(error, NotFound):
        return next((hint for detail, hint in MISSING.items() if detail in error.details), "another path")
    if isinstance(error, Denied):
        if "errno" in error.details:  # the guest's kernel, about a file
            return "another path, or --user root"
        return "BARCHAN_TOKEN or --token-file" if "token" in str(error) else "--state-dir with a directory of yours"
    return HINTS.get(error.code, "" if error.fault in ("policy", "task") else DEFAULT_HINT)


def key_values(pairs: Iterable[str], option: str) -> dict[str, str]:
    """`KEY=VALUE` words as a mapping."""
    found = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise InvalidSpec(f"{option} {pair}: give KEY=VALUE")
        found[key] = value
    return found


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Rows in columns, one line each; what does not fit a terminal is cut, a pipe gets everything. Spaces stay, for
    some columns draw with them.
    """
    if not rows:
        sys.stdout.write(f"{empty}\n")
        return
    cells = [list(columns), *([_printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    width = terminal_width()
    for row in cells:
        line = "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        sys.stdout.write((line if width is None or len(line) <= width else line[: width - 1] + "…") + "\n")


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None if it is none."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):
        return None


def human_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def human_age(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BYTES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def seconds_of(text: str, option: str) -> float:
    """A duration as people write it: 90s, 15m, 12h, 7d, 2w."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", text)
    if match is None:
        raise InvalidSpec(f"{option} {text}: give a number with s, m, h, d or w, as 7d")
    return float(match[1]) * _SECONDS[match[2]]


def bytes_of(text: str, option: str) -> int:
    """A size as people write it: 500MiB, 20GiB, or plain bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?((?:[KMGT]iB)?)", text)
    if match is None:
        raise InvalidSpec(f"{option} {text}: give a number with KiB, MiB, GiB or TiB, as 20GiB")
    return int(float(match[1]) * _BYTES[match[2]])
