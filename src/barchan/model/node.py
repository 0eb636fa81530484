"""What a node says about itself."""

from msgspec import Struct


class NodeInfo(Struct, frozen=True, kw_only=True):
    """A node's identity and load."""

    node_id: str
    version: str
    pid: int
    uptime_s: float
    sandboxes_running: int
    sandboxes_starting: int
    sandboxes_queued: int
    running_max: int
    starting_max: int
    leases: int
    creates_total: int
    create_failures_total: int
    memory_available_mib: int
    backends: tuple[str, ...]


class LeaseRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Open or re-open a lease; `grace_s` is how long its sandboxes live after its last connection went."""

    lease_id: str | None = None
    grace_s: float = 10.0


class LeaseInfo(Struct, frozen=True, kw_only=True):
    lease_id: str
    grace_s: float


class ImageInfo(Struct, frozen=True, kw_only=True):
    """A template as this node's store has it. Layers are digests, topmost first; sizes are bytes on disk."""

    name: str
    digest: str
    layers: tuple[str, ...]
    size_bytes: int
    created_unix_s: float
    user: str
    workdir: str
    env: dict[str, str]


class Killed(Struct, frozen=True, kw_only=True):
    """How many sandboxes a kill ended."""

    killed: int


class Requirement(Struct, frozen=True, kw_only=True):
    """One thing a backend needs of the host: whether it holds, what was seen, and what to do if not."""

    name: str
    ok: bool
    needed_for: str
    found: str
    remedy: str = ""
