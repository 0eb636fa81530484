"""What a call is asked to be, and what it gave."""

from typing import Annotated, Any, Self

from msgspec import Meta, Struct, field

from barchan.errors import ExecFailed, ExecTimeout, GuestOutOfMemory, OutputLimitExceeded
from barchan.model.sandbox import ModuleName, Name, Usage

DEFAULT_CALL_TIMEOUT_S = 10.0
CALL_TIMEOUT_S_MAX = 3600.0


class CallSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What calls of one kind run in: a node has workers for each.

    Attributes:
        template: Name or digest of an image the node has.
        imports: Modules that are imported before the first call, and shared by all.
        python: The interpreter, found along PATH; 3.8 or newer with ctypes.
        memory_mib: Limit of a call with all that it starts, and of what it writes to files.
        pids_max: Processes and threads of a call at once.
        disk_mib: What a call may write to files, which are below /tmp and in memory.
    """

    template: Name = "debian"
    imports: tuple[ModuleName, ...] = ()
    python: Annotated[str, Meta(min_length=1, max_length=1024)] = "python3"
    memory_mib: Annotated[int, Meta(ge=16, le=1 << 20)] = 256
    pids_max: Annotated[int, Meta(ge=8, le=1 << 15)] = 64
    disk_mib: Annotated[int, Meta(ge=1, le=1 << 20)] = 64


class CallResult(Struct, frozen=True, kw_only=True):
    """What a call did. Nothing here is an error; `check()` and `value` make one of it on request.

    Attributes:
        exit_code: 0..255; 128 + n after signal n.
        signal: Number of the signal that ended it, or None.
        timed_out: The deadline passed and the platform killed it; the output is what there was.
        oom_killed: The kernel's counter of the call's memory limit rose while it ran and it died by SIGKILL.
        truncated: Bytes between head and tail were left out; `stdout_bytes` and `stderr_bytes` count what was written.
        usage: Of the call and all that it started; `wall_s` from the moment it was given its work.
        error: Of a function that raised: the exception's type and message, as the call says.
    """

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
    error: tuple[str, str] | None = None
    returned: bool = False
    given: Any = None

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

    @property
    def value(self) -> Any:
        """What the function returned.

        Raises:
            GuestError: It returned nothing: it raised, or what was called is no function. Or it was ended or failed
                later: nothing says then that the value is the function's.
        """
        self._check_end()
        if self.returned:
            return self.given
        raise ExecFailed(f"exit code {self.exit_code}, and no value was returned", exit_code=self.exit_code)

    def check(self) -> Self:
        """Return itself, or raise the `GuestError` that says how the call failed."""
        self._check_end()
        if self.truncated:
            raise OutputLimitExceeded("the output did not fit max_output_bytes")
        return self

    def _check_end(self) -> None:
        if self.timed_out:
            raise ExecTimeout("the call ran out of time")
        if self.oom_killed:
            raise GuestOutOfMemory("the call hit the memory limit")
        if self.error is not None:
            raise ExecFailed(f"{self.error[0]}: {self.error[1]}", exit_code=self.exit_code)
        if self.exit_code != 0:
            raise ExecFailed(f"exit code {self.exit_code}: {self.error_text.strip()[-400:]}", exit_code=self.exit_code)


class CallsInfo(Struct, frozen=True, kw_only=True):
    """A node's calls: what is there now, and what became of all so far.

    Attributes:
        workers: Sandboxes that can run one each; `running` of them do, `idle` could.
        broken_total: Workers that had to be replaced.
    """

    workers: int
    workers_max: int
    starting: int
    idle: int
    running: int
    queued: int
    queued_max: int
    calls_total: int
    refused_total: int
    broken_total: int
