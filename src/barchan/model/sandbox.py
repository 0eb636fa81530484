"""What a sandbox is asked to be, what it is, and what running something in it gave."""

from typing import Annotated, Literal, Self

from msgspec import Meta, Struct, field

from barchan.errors import ExecFailed, ExecTimeout, GuestOutOfMemory, OutputLimitExceeded
from barchan.model.tiers import Tier, Waiting

Phase = Literal["pending", "booting", "ready", "paused", "hibernated", "stopped", "lost"]
Network = Literal["none", "open", "allow"]
Root = Literal["plain", "capable"]
CpuClass = Literal["latency", "batch"]
# What an image or a caller can ask of a sandbox's backend: see `backends.base.Capabilities`.
Need = Literal["own_kernel", "memory_snapshot", "fork", "screen"]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$")]
BackendName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
ProcessId = Annotated[str, Meta(min_length=1, max_length=128)]
DURATION_S_MAX = 31_536_000.0  # a year
# No `=` in a label's name: queries write `name=value`.
Label = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[^=]+$")]
ModuleName = Annotated[str, Meta(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$", max_length=256)]
EnvName = Annotated[str, Meta(pattern=r"^[^=\x00]+$")]
Env = dict[EnvName, str]
Seconds = Annotated[float, Meta(gt=0, le=DURATION_S_MAX)]
Limit = Annotated[int, Meta(ge=-1, le=2**63 - 1)]  # of a resource; -1: none

DEFAULT_OUTPUT_BYTES = 1 << 20
DEFAULT_EXEC_TIMEOUT_S = 300.0
DEFAULT_USER = "agent"


class Zygote(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A warm interpreter: a Python of the template that has imported these modules, and forks into each sandbox.

    `python`: the program, found along PATH; 3.8 or newer with ctypes.
    """

    imports: tuple[ModuleName, ...] = ()
    python: Annotated[str, Meta(min_length=1, max_length=1024)] = "python3"


class SandboxSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a caller asks for.

    Attributes:
        template: Name or digest of an image the node has (`barchan image list`).
        layers: Images whose own layers go above the template's, the last one topmost.
        backend: How isolation is done: the name of one that the node has (`barchan doctor`). `auto`: the strongest that
            the image and the host allow and that has what is asked for here.
        start_within_s: With `auto`: none that takes longer to start, as far as the node knows.
        needs: What the backend must have, beside what the image needs of it.
        memory_mib: Limit of the guest's memory; reaching it kills inside the guest, with evidence.
        cpus: CPU time per wall time.
        cpu_class: `batch` runs only when no sandbox of class `latency` wants the processor.
        pids_max: Processes and threads at once.
        disk_mib: Size of the writable layer; the guest sees EDQUOT beyond it.
        network: `none` (loopback only), `open`, or `allow` (HTTP and HTTPS to `allow_hosts`, by name).
        allow_hosts: Host names; `*.example.org` matches every name below example.org.
        ttl_s: Life from creation; then the sandbox ends as `SandboxExpired`. None: no bound of its own.
        idle_timeout_s: Ends after this long with no request and no running process.
        user: Default user of execs: `NAME`, `UID` or either with `:GROUP`; `root` is the guest's.
        root: `plain`: guest root has no power over other users' files. `capable`: it has, and may become them, as
            installers need it; what that costs is in docs/threat-model.md.
        setup: A shell script that the sandbox's user runs in it before the create returns. If it fails, so does the
            create. Forks of the sandbox don't run it again.
        create_id: Repeating a create with the same id gives the same sandbox.
        detach: The sandbox outlives its creator and ends by `ttl_s`, `idle_timeout_s` or kill.
        zygote: The sandbox has a warm interpreter, for `python()`, that shares the memory of what it has imported with
            all others of this kind on the node.
        waiting: What the node may do by itself with the sandbox while nobody asks anything of it. `ttl_s`, deadlines
            and a lease's seconds stand still while it is asleep.
    """

    template: Name
    layers: tuple[Name, ...] = ()
    backend: BackendName = "container"
    start_within_s: Seconds | None = None
    needs: tuple[Need, ...] = ()
    memory_mib: Annotated[int, Meta(ge=16, le=1 << 20)] = 512
    cpus: Annotated[float, Meta(gt=0, le=1024)] = 1.0
    cpu_class: CpuClass = "latency"
    pids_max: Annotated[int, Meta(ge=8, le=1 << 16)] = 512
    disk_mib: Annotated[int, Meta(ge=1, le=1 << 24)] = 1024
    network: Network = "none"
    allow_hosts: tuple[str, ...] = ()
    ttl_s: Seconds | None = None
    idle_timeout_s: Seconds | None = None
    env: Env = {}
    labels: dict[Label, str] = {}
    user: str | None = None
    root: Root = "plain"
    workdir: str | None = None
    hostname: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,63}$")] = "sandbox"
    setup: Annotated[str, Meta(min_length=1, max_length=1 << 20)] | None = None
    setup_timeout_s: Seconds = 100.0
    create_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    lease_id: str | None = None
    detach: bool = False
    zygote: Zygote | None = None
    waiting: Waiting = Waiting()


class SandboxInfo(Struct, frozen=True, kw_only=True):
    """What a node says of one of its sandboxes. Times are seconds; `*_unix_s` on the wall clock, for people.

    Attributes:
        tier: How far down it is; phase `paused` is `paused` or `paged_out`.
        memory_freed_bytes: What it takes less than when it was last running.
        stays_paused: Why it is not as far down as it was asked to be; empty: it is.
        awake_s: Since it last woke, or its node began to serve it; 0 while it sleeps, None for one that has ended.
        backend_reason: Why `auto` came to the backend in `spec`; empty where one was named, and when the node that
            chose has ended.
    """

    sandbox_id: str
    node_id: str
    phase: Phase
    template: str
    template_digest: str
    spec: SandboxSpec
    created_unix_s: float
    age_s: float
    idle_s: float
    create_ms: float
    processes_running: int
    end_cause: str | None = None
    tier: Tier = "running"
    memory_freed_bytes: int = 0
    stays_paused: str = ""
    awake_s: float | None = None
    backend_reason: str = ""


class Usage(Struct, frozen=True, kw_only=True):
    """Resources one process used, from its wait status: CPU and wall seconds, peak resident KiB."""

    user_s: float = 0.0
    system_s: float = 0.0
    max_rss_kib: int = 0
    wall_s: float = 0.0


class ExecRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program to run in a sandbox: exactly one of `argv` and `shell`, or `python`.

    Attributes:
        python: Source for the sandbox's warm interpreter (`SandboxSpec.zygote`), which runs it in a fork of itself, as
            the sandbox's user. `argv` are its arguments then.
        process_id: Chosen by the client; repeating it never runs the program twice.
        timeout_s: Wall time in the guest; then every process of this exec is killed.
        max_output_bytes: Per stream; beyond it the head and the tail are kept, half each.
        stdin: Given whole, then end of file.
        platform: Run outside the guest's own memory and process limits, in a small leaf of the platform.
        restrained: Neither it nor what it starts can have the kernel send it a SIGKILL, but by a limit. One that it
            gets, without `oom_killed` or a hard processor limit, came from elsewhere: another user's program, or from
            outside the sandbox. It gains no privileges, traces nothing, has no timers that send signals, and keeps its
            processor limit. For programs of users that are not root.
    """

    argv: tuple[str, ...] | None = None
    shell: str | None = None
    python: str | None = None
    process_id: ProcessId | None = None
    timeout_s: Seconds = DEFAULT_EXEC_TIMEOUT_S
    max_output_bytes: Annotated[int, Meta(ge=0, le=1 << 30)] = DEFAULT_OUTPUT_BYTES
    stdin: bytes = b""
    env: Env = {}
    cwd: str | None = None
    user: str | None = None
    rlimits: dict[str, tuple[Limit, Limit]] = {}
    merge_stderr: bool = False
    platform: bool = False
    restrained: bool = False


class StartRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program to start in the background; like `ExecRequest`, with a pty or an open stdin on demand.

    `timeout_s` None: it runs until it ends, is killed, or the sandbox ends. `overflow`: what happens when nobody reads
    and `spool_bytes` are full: `drop` the oldest bytes, or `block` the process, which has 512 KiB at least.
    """

    argv: tuple[str, ...] | None = None
    shell: str | None = None
    python: str | None = None
    process_id: ProcessId | None = None
    timeout_s: Seconds | None = None
    stdin: bytes = b""
    stdin_open: bool = True
    env: Env = {}
    cwd: str | None = None
    user: str | None = None
    rlimits: dict[str, tuple[Limit, Limit]] = {}
    merge_stderr: bool = False
    platform: bool = False
    restrained: bool = False
    pty: bool = False
    rows: Annotated[int, Meta(ge=1, le=1000)] = 24
    cols: Annotated[int, Meta(ge=1, le=1000)] = 80
    overflow: Literal["drop", "block"] = "drop"
    spool_bytes: Annotated[int, Meta(ge=4096, le=1 << 30)] = 16 << 20


class ExecResult(Struct, frozen=True, kw_only=True):
    """What a program did. Nothing here is an error; `check()` makes one of it on request.

    Attributes:
        exit_code: 0..255; 128 + n after signal n; 127 not found, 126 not executable.
        signal: Number of the signal that ended it, or None.
        timed_out: The deadline passed and the platform killed it; the output is what there was.
        oom_killed: The kernel's counter of this sandbox's memory limit rose while it ran and it died by SIGKILL.
        truncated: Bytes between head and tail were left out; `stdout_bytes` and `stderr_bytes` count what was written.
    """

    process_id: str
    exit_code: int
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    usage: Usage = field(default_factory=Usage)

    @property
    def ok(self) -> bool:
        """Exit code 0, in time."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """stdout as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """stderr as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stderr.decode("utf-8", "replace")

    def check(self) -> Self:
        """Return itself, or raise the `GuestError` that says how the program failed."""
        if self.timed_out:
            raise ExecTimeout(f"process {self.process_id} ran out of time", process_id=self.process_id)
        if self.oom_killed:
            raise GuestOutOfMemory(f"process {self.process_id} hit the memory limit", process_id=self.process_id)
        if self.exit_code != 0:
            tail = self.error_text.strip()[-400:]
            raise ExecFailed(f"exit code {self.exit_code}: {tail}", exit_code=self.exit_code)
        if self.truncated:
            raise OutputLimitExceeded("the output did not fit max_output_bytes", process_id=self.process_id)
        return self


class ProcessInfo(Struct, frozen=True, kw_only=True):
    """One process the platform started. `exit_code` is None while it runs."""

    process_id: str
    pid: int
    running: bool
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    oom_killed: bool = False
    usage: Usage = field(default_factory=Usage)


class OutputChunk(Struct, frozen=True, array_like=True):
    """A piece of a process's output. A jump in `offset` says bytes were lost to the spool's bound.

    `stream`: `stdout`, `stderr`, `exit` (data is a JSON `ProcessInfo`) or `end` (nothing more will come).
    """

    stream: Literal["stdout", "stderr", "exit", "end"]
    offset: int
    data: bytes


class FileInfo(Struct, frozen=True, kw_only=True):
    """One directory entry. `kind`: file, directory, symlink, device, fifo or socket; `mode` without the type bits."""

    path: str
    kind: Literal["file", "directory", "symlink", "device", "fifo", "socket"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime_unix_s: float
    target: str = ""


class FileChange(Struct, frozen=True, kw_only=True):
    """Something that happened below a watched directory; `overflow` says that changes were missed."""

    kind: Literal["created", "modified", "removed", "moved", "overflow"]
    path: str


class SandboxStats(Struct, frozen=True, kw_only=True):
    """Kernel counters of one sandbox.

    Attributes:
        memory_peak_bytes, oom_kills, cpu_s: Since it was made, or came from another node; some of what it takes to
            come back from disk is in them.
    """

    memory_bytes: int
    memory_peak_bytes: int
    oom_kills: int
    cpu_s: float
    pids: int
