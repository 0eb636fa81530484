"""What is asked and told of forks."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from barchan.model.sandbox import SandboxInfo

ForkKind = Literal["fs", "memory"]
FORK_MAX = 1024


class ForkRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make `n` sandboxes that start as this one is at one moment.

    Attributes:
        kind: `fs`: its files, and no processes. `memory`: its processes too, with their memory.
        fork_id: Chosen by the client; repeating it finds the same children. Their `create_id` is FORK_ID-INDEX.
        changes: Fields of `SandboxSpec` in which the children differ from it. `labels` and `env` are added to its own.
            What its files and processes were made with can't change: its template, and for `memory` its network.
    """

    n: Annotated[int, Meta(ge=1, le=FORK_MAX)] = 1
    kind: ForkKind = "fs"
    fork_id: Annotated[str, Meta(min_length=1, max_length=120)]
    changes: dict[str, Any] = {}


class Forked(Struct, frozen=True, kw_only=True):
    """What became of one child: a sandbox, or the error (by its code, as in every failed request) that it ended in."""

    index: int
    sandbox: SandboxInfo | None = None
    code: str = ""
    message: str = ""
    details: dict[str, str | int] = {}
