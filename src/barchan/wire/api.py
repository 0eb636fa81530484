"""The node's HTTP interface as one table, read by the server, the SDK and the OpenAPI description.

Bodies are JSON (bytes fields in base64) or, with `Content-Type`/`Accept: application/msgpack`, MessagePack of the same
types. Errors come as `ErrorBody` with the status of `http_status`. Streams are NDJSON, or, asked for as
`application/msgpack`, records of u32 length (little endian) + MessagePack.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from barchan.errors import (
    BarchanError,
    CallerError,
    CapacityError,
    Conflict,
    Denied,
    NotFound,
    Preempted,
    SandboxExpired,
    from_wire,
)
from barchan.model.calls import CallsInfo
from barchan.model.denials import Denials
from barchan.model.fork import Forked, ForkRequest
from barchan.model.gc import GcReport, GcRequest
from barchan.model.image import NameRequest, Rebased, RebaseRequest
from barchan.model.lease import LeaseBeat, PreemptRequest
from barchan.model.node import ImageInfo, Killed, LayerInfo, LeaseInfo, LeaseRequest, NodeInfo, SnapshotRequest, Stopped
from barchan.model.pool import PoolInfo, PoolRequest
from barchan.model.sandbox import (
    ExecRequest,
    ExecResult,
    FileChange,
    FileInfo,
    OutputChunk,
    ProcessInfo,
    SandboxInfo,
    SandboxSpec,
    SandboxStats,
    StartRequest,
)
from barchan.model.screen import KeyRequest, PointerRequest, ScreenSize, TypeRequest
from barchan.model.snapshot_info import SnapshotInfo, SnapshotPull, SnapshotPush
from barchan.model.tiers import AdoptRequest, TierChange, TierRequest

MSGPACK = "application/msgpack"
JSON = "application/json"
BODY_BYTES_MAX = 80 << 20  # an exec may carry 64 MiB of stdin, in base64 a third more
STDIN_INLINE_BYTES_MAX = 64 << 20

BodyKind = Literal["none", "value", "bytes"]
ReplyKind = Literal["value", "stream", "bytes"]


class ErrorBody(Struct, frozen=True, kw_only=True):
    """An error on the wire: `code` names its class in `barchan.errors.BY_CODE`."""

    code: str
    message: str
    fault: str = "platform"
    retryable: bool = False
    details: dict[str, str | int] = {}


class SignalRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`signal`: a name without SIG, or a number. `scope`: `group`, `process`, `all` (whatever this start left behind), `children` (all but the main process)."""

    signal: str | int = "TERM"
    scope: Literal["group", "process", "all", "children"] = "group"


class Signalled(Struct, frozen=True, kw_only=True):
    signalled: int


class ResizeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rows: Annotated[int, Meta(ge=1, le=1000)]
    cols: Annotated[int, Meta(ge=1, le=1000)]


class StdinWritten(Struct, frozen=True, kw_only=True):
    """`offset`: bytes of stdin that have reached the process since its start."""

    offset: int


class Awake(Struct, frozen=True, kw_only=True):
    """Whether a sandbox is awake, and for how many seconds it has slept before and until now, since its node began."""

    is_awake: bool
    slept_s: float


class MkdirRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    mode: Annotated[int, Meta(ge=0, le=0o7777)] = 0o755
    parents: bool = True
    user: str | None = None


class MoveRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    target: str
    user: str | None = None


class RemoveRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    recursive: bool = False
    user: str | None = None


class Empty(Struct, frozen=True):
    """Nothing to say: it was done."""


class Route(Struct, frozen=True):
    """One operation. `query` maps parameter names to their types; all are optional unless in `required`."""

    name: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    reply: Any
    reply_kind: ReplyKind = "value"
    body: Any = None
    body_kind: BodyKind = "none"
    query: dict[str, type] = {}
    required: tuple[str, ...] = ()
    summary: str = ""


_SB = "/v1/sandboxes/{sandbox_id}"
_PROC = _SB + "/processes/{process_id}"

# fmt: off
ROUTES: tuple[Route, ...] = (
    Route("node_info", "GET", "/v1/node", NodeInfo, summary="What this node is and how loaded."),
    Route("node_shutdown", "POST", "/v1/node/shutdown", Stopped, query={"keep": bool},
          summary="End every sandbox and the node; `keep`: those on disk stay there for the next node, as snapshots do in any case."),
    Route("lease_hold", "POST", "/v1/leases", LeaseInfo, "stream", LeaseRequest, "value",
          summary="Hold a lease for as long as this response is read: its first record, then one every 5 s. With `holder`, beats are awaited, too."),
    Route("lease_list", "GET", "/v1/leases", list[LeaseInfo], query={"ended": bool},
          summary="The leases: their terms, what is used of them, who holds them. `ended`: those that ended within a day, too, first."),
    Route("lease_beat", "POST", "/v1/leases/{lease_id}/beat", LeaseInfo, body=LeaseBeat, body_kind="value",
          summary="Say that a holder is alive, and what it has used; 30 s without one, and it does not count as a holder."),
    Route("lease_preempt", "POST", "/v1/leases/{lease_id}/preempt", TierChange, "stream", PreemptRequest, "value",
          summary="Put a lease's sandboxes aside: a record of each as it stands still, and one as it is on disk or can't be. It goes on if the response is closed."),
    Route("lease_end", "DELETE", "/v1/leases/{lease_id}", Killed, summary="End a lease and its sandboxes now."),
    Route("image_list", "GET", "/v1/images", list[ImageInfo], summary="Templates this node can start."),
    Route("image", "GET", "/v1/images/{name}", ImageInfo,
          summary="One image by name or digest (a `/` as %2F); what is not here is had from the node's blob store."),
    Route("image_remove", "DELETE", "/v1/images/{name}", ImageInfo,
          summary="Forget an image (a `/` in its name as %2F); sandboxes that run keep their files."),
    Route("image_gc", "POST", "/v1/images/gc", GcReport, body=GcRequest, body_kind="value",
          summary="Remove layers that no image names, and images by age or budget; none that a sandbox or another image needs."),
    Route("layer_list", "GET", "/v1/layers", list[LayerInfo], summary="The layers of this node's images, and how much of each is on its disk."),
    Route("image_name", "POST", "/v1/images/name", ImageInfo, body=NameRequest, body_kind="value",
          summary="Give an image one more name; an image that has it gives way."),
    Route("image_rebase", "POST", "/v1/images/rebase", Rebased, "stream", RebaseRequest, "value",
          summary="Put images that were built on one image on another one: a record for each, as it is done or refused."),
    Route("pool", "GET", "/v1/pool", PoolInfo, summary="The warm pool: what is ready, and what became of it so far."),
    Route("pool_set", "PUT", "/v1/pool", PoolInfo, body=PoolRequest, body_kind="value", summary="Keep so many slots ready from now on."),
    Route("call_info", "GET", "/v1/calls", CallsInfo, summary="Calls: the workers there are, and what became of all so far."),
    Route("create", "POST", "/v1/sandboxes", SandboxInfo, body=SandboxSpec, body_kind="value", summary="Start a sandbox."),
    Route("list", "GET", "/v1/sandboxes", list[SandboxInfo], query={"label": list, "create_id": str},
          summary="Live sandboxes; `label=key=value` repeats and all must match."),
    Route("kill_many", "DELETE", "/v1/sandboxes", Killed, query={"label": list, "create_id": str},
          summary="End the sandboxes that match; with `create_id` also one that is still starting."),
    Route("info", "GET", _SB, SandboxInfo, summary="One sandbox, also for a while after its end."),
    Route("kill", "DELETE", _SB, Killed, summary="End a sandbox; returns when nothing of it is left."),
    Route("stats", "GET", _SB + "/stats", SandboxStats, summary="Kernel counters of a sandbox."),
    Route("denials", "GET", _SB + "/denials", Denials, summary="What it was refused; wakes nothing."),
    Route("snapshot", "POST", _SB + "/snapshot", SnapshotInfo, body=SnapshotRequest, body_kind="value",
          summary="Keep the sandbox's files as they are, as an image, and for kind `memory` its processes; an image of that name gives way."),
    Route("snapshot_list", "GET", "/v1/snapshots", list[SnapshotInfo], query={"metadata": list},
          summary="The node's snapshots, the oldest first; `metadata=key=value` repeats and all must match."),
    Route("snapshot_info", "GET", "/v1/snapshots/{snapshot_id}", SnapshotInfo, summary="One snapshot."),
    Route("snapshot_remove", "DELETE", "/v1/snapshots/{snapshot_id}", SnapshotInfo,
          summary="Forget a snapshot and its image; sandboxes and snapshots that came of it stay."),
    Route("snapshot_push", "POST", "/v1/snapshots/{snapshot_id}/push", SnapshotPush,
          summary="Send a snapshot to the node's blob store, from where other nodes have it; it stays here as well."),
    Route("snapshot_pull", "POST", "/v1/snapshots/{snapshot_id}/pull", SnapshotInfo, body=SnapshotPull, body_kind="value",
          summary="Have a snapshot that a node has sent to the blob store here, too, under the same id."),
    Route("fork", "POST", _SB + "/fork", Forked, "stream", ForkRequest, "value",
          summary="Make sandboxes that start as this one is at one moment: a record for each, as it is ready or has failed."),
    Route("pause", "POST", _SB + "/pause", SandboxInfo,
          summary="Stop its programs; its memory stays, its clocks stand still, and the next request wakes it."),
    Route("page_out", "POST", _SB + "/page-out", SandboxInfo, summary="Pause it, and give its cold memory away, to swap where there is some."),
    Route("hibernate", "POST", _SB + "/hibernate", SandboxInfo,
          summary="Pause it, and put its processes and memory on disk; one that can't be stored says why, and stays paused."),
    Route("push", "POST", _SB + "/push", SandboxInfo,
          summary="Send a hibernated sandbox to the node's blob store, from where another node may take it."),
    Route("adopt", "POST", _SB + "/adopt", SandboxInfo, body=AdoptRequest, body_kind="value",
          summary="Take a sandbox that another node has sent to the blob store; it is hibernated here then."),
    Route("resume", "POST", _SB + "/resume", SandboxInfo, summary="Wake it, from wherever it is."),
    Route("awake", "GET", _SB + "/awake", Awake, "stream", query={"again": bool},
          summary="Wake it, and keep it awake for as long as this is read, but from a sleep that somebody asks for: a record at once, at each change and every 5 s. `again`: it was read before; wakes nothing."),
    Route("tier_many", "POST", "/v1/sandboxes/tier", TierChange, "stream", TierRequest, "value",
          summary="Bring many sandboxes to one tier: a record for each, as it is there or refused. It goes on if the response is closed."),
    Route("fork_end", "DELETE", "/v1/forks/{fork_id}", Killed, summary="End every child of a fork, also of one under way."),
    Route("exec", "POST", _SB + "/exec", ExecResult, body=ExecRequest, body_kind="value", summary="Run a program to its end."),
    Route("start", "POST", _SB + "/processes", ProcessInfo, body=StartRequest, body_kind="value", summary="Start a program in the background."),
    Route("process_list", "GET", _SB + "/processes", list[ProcessInfo], summary="Every process started through the platform."),
    Route("process_info", "GET", _PROC, ProcessInfo, query={"wait_s": float}, summary="A process; with `wait_s`, after its end or that long."),
    Route("output", "GET", _PROC + "/output", OutputChunk, "stream", query={"stdout": int, "stderr": int, "follow": bool, "again": bool, "idle": bool},
          summary="Output from the given offsets on, to the end (`follow`, the default) or what there is now. `again`: it was followed before; wakes nothing. `idle`: nobody waits for it; the sandbox may go to sleep while its programs wait for input."),
    Route("stdin", "POST", _PROC + "/stdin", StdinWritten, body_kind="bytes", query={"offset": int, "eof": bool},
          summary="Write to stdin; bytes below `offset` already written are skipped, so a retry is safe."),
    Route("signal", "POST", _PROC + "/signal", Signalled, body=SignalRequest, body_kind="value", summary="Signal a process."),
    Route("resize", "POST", _PROC + "/resize", Empty, body=ResizeRequest, body_kind="value", summary="Resize its pty."),
    Route("file_read", "GET", _SB + "/files", bytes, "bytes", query={"path": str, "offset": int, "length": int, "user": str}, required=("path",),
          summary="A regular file's bytes."),
    Route("file_write", "PUT", _SB + "/files", Empty, body_kind="bytes", query={"path": str, "mode": int, "parents": bool, "user": str, "lease": str, "epoch": int}, required=("path",),
          summary="Replace a file in one step. `lease`, here and where else files are changed: refused once the sandbox belongs to another; `epoch`: once one of a higher was made."),
    Route("file_stat", "GET", _SB + "/files/stat", FileInfo, query={"path": str, "user": str}, required=("path",), summary="One entry."),
    Route("file_list", "GET", _SB + "/files/list", list[FileInfo], query={"path": str, "user": str}, required=("path",), summary="A directory."),
    Route("file_mkdir", "POST", _SB + "/files/mkdir", Empty, body=MkdirRequest, body_kind="value", query={"lease": str, "epoch": int}, summary="Make a directory."),
    Route("file_move", "POST", _SB + "/files/move", Empty, body=MoveRequest, body_kind="value", query={"lease": str, "epoch": int}, summary="Rename."),
    Route("file_remove", "POST", _SB + "/files/remove", Empty, body=RemoveRequest, body_kind="value", query={"lease": str, "epoch": int}, summary="Remove."),
    Route("tar_read", "GET", _SB + "/files/tar", bytes, "bytes", query={"path": str, "user": str}, required=("path",), summary="A tree or file as a tar stream."),
    Route("tar_write", "PUT", _SB + "/files/tar", Empty, body_kind="bytes", query={"path": str, "user": str, "lease": str, "epoch": int}, required=("path",), summary="Unpack a tar stream below a directory."),
    Route("file_watch", "GET", _SB + "/files/watch", FileChange, "stream", query={"path": str, "recursive": bool, "user": str}, required=("path",),
          summary="Changes below a directory, until the response is closed."),
    Route("screen_png", "GET", _SB + "/screen", bytes, "bytes", summary="The screen as it is now, as a PNG; only of backends with a screen, as are the next four."),
    Route("screen_size", "GET", _SB + "/screen/size", ScreenSize, summary="How large the screen is."),
    Route("screen_type", "POST", _SB + "/screen/type", Empty, body=TypeRequest, body_kind="value", summary="Type a text on its keyboard."),
    Route("screen_key", "POST", _SB + "/screen/key", Empty, body=KeyRequest, body_kind="value", summary="Press keys together."),
    Route("screen_pointer", "POST", _SB + "/screen/pointer", Empty, body=PointerRequest, body_kind="value", summary="Move the mouse, click and scroll."),
)
# fmt: on

ROUTE: dict[str, Route] = {route.name: route for route in ROUTES}


def http_status(error: BarchanError) -> int:
    """The HTTP status an error travels with; the class travels in the body."""
    table: tuple[tuple[type[BarchanError], int], ...] = (
        (NotFound, 404),
        (Conflict, 409),
        (Preempted, 409),
        (Denied, 403),
        (SandboxExpired, 410),
        (CapacityError, 503),
        (CallerError, 400),
    )
    return next((status for cls, status in table if isinstance(error, cls)), 500)


def error_body(error: BarchanError) -> ErrorBody:
    return ErrorBody(
        code=error.code, message=str(error), fault=error.fault, retryable=error.retryable, details=error.details
    )


def error_from_body(body: bytes, content_type: str) -> BarchanError:
    """Rebuild the error of a failed response; a body that is none of ours becomes a `BackendError` quoting it."""
    decoder = msgspec.msgpack if content_type.startswith(MSGPACK) else msgspec.json
    try:
        parsed = decoder.decode(body, type=ErrorBody)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return from_wire("backend", f"the node answered with an unexpected error: {body[:200]!r}", {})
    return from_wire(parsed.code, parsed.message, parsed.details)
