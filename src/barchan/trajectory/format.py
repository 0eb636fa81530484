"""One line of a trajectory log: its fields and its hash, as docs/formats/trajectory.md describes them."""

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from barchan.errors import InvalidSpec

FORMAT = "barchan.trajectory/1"
SUFFIX = ".trajectory.jsonl"
FOLDER = "trajectories"
GENESIS = "0" * 64

Kind = Literal[
    "message",
    "model_call",
    "sandbox",
    "step",
    "turn",
    "observation",
    "tool_call",
    "exec",
    "file_write",
    "file_read",
    "snapshot",
    "restore",
    "hand_in",
    "artifact",
    "grade",
    "verdict",
    "cancel",
    "note",
]
Part = Literal["header", "intent", "result", "entry"]

# What a rollout goes on from is written whole, however long it is; of what it gave, head and tail do.
_WHOLE = frozenset({"model_call", "step", "turn", "tool_call", "artifact"})
_WHOLE_INTENTS = frozenset({"exec", "file_write"})

_HASH = b',"hash":"'
_SEAL_BYTES = len(_HASH) + 64 + len(b'"}')


class Header(Struct, frozen=True, kw_only=True):
    """Whose log it is; the first line, and again whenever a later writer takes the log over.

    Attributes:
        group_index: The task's place in the run; `sample_index` is the attempt's place in its group.
        epoch: Fencing: whoever takes the log over has a higher one, and the older writer can't append any more.
        policy: Name of the policy, for people and exports.
    """

    rollout_id: str
    run_id: str
    task_id: str
    group_index: int
    sample_index: int
    epoch: int
    created_unix_s: float
    barchan_version: str
    policy: str = ""
    format: str = FORMAT


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One line, without its hash. `prev_hash` is the last field, so that the hash can follow it.

    Attributes:
        kind: None for a header only.
        of: The intent that a result belongs to.
        op_id: The client's own id of an operation, the same in every retry.
        mono_ns: CLOCK_MONOTONIC; comparable between a header and the next one.
    """

    seq: int
    part: Part
    kind: Kind | None = None
    of: int | None = None
    op_id: str | None = None
    epoch: int
    unix_ns: int
    mono_ns: int
    body: dict[str, Any]
    prev_hash: str


class BadLine(ValueError):
    """A line that is not what was written, or not where it was written."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


def is_whole(part: Part, kind: Kind | None) -> bool:
    """Whether long values of an entry are kept whole."""
    return kind in _WHOLE or (part == "intent" and kind in _WHOLE_INTENTS)


def seal(entry: Entry) -> tuple[bytes, str]:
    """A line's bytes and its hash: sha256 of the JSON object as it would be without the `hash` member."""
    plain = _encoder.encode(entry)
    digest = hashlib.sha256(plain).hexdigest()
    return b"".join((plain[:-1], _HASH, digest.encode(), b'"}\n')), digest


def unseal(line: bytes) -> tuple[Entry, str]:
    """The entry of a line (with its newline) and its hash.

    Raises:
        BadLine: A byte of it is not as it was written, or it is no line of this format.
    """
    line = line[:-1]
    end = len(line) - _SEAL_BYTES
    if end <= 0 or not line.startswith(_HASH, end) or not line.endswith(b'"}'):
        raise BadLine("the line does not end in a hash")
    plain = line[:end] + b"}"
    digest = hashlib.sha256(plain).hexdigest()
    if line[end + len(_HASH) : -2] != digest.encode():
        raise BadLine("the hash does not match the line")
    try:
        return _decoder.decode(plain), digest
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"the line is no entry: {error}") from error


def log_path(run_folder: Path, rollout_id: str) -> Path:
    """Where a rollout's log lies in a run's folder.

    Raises:
        InvalidSpec: The id is no file name.
    """
    if not rollout_id or "/" in rollout_id or "\0" in rollout_id:
        raise InvalidSpec(f"the rollout id {rollout_id!r} can't name a file")
    return run_folder / FOLDER / f"{rollout_id}{SUFFIX}"


def log_files(path: Path) -> list[Path]:
    """The log that a path is, or every log below it."""
    return sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
