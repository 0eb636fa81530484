"""What inspect_ai is told of a program's end and of a failed file operation. Pure, and nothing of inspect_ai in it."""

import os
from typing import NamedTuple

from barchan.errors import (
    BackendError,
    BarchanError,
    CapacityError,
    ProtocolError,
    SandboxExpired,
    SandboxLost,
    TransportError,
)
from barchan.model.sandbox import ExecResult

CANNOT_RUN = 126  # a program that is there and can't be executed


class Ended(NamedTuple):
    """A program's end as inspect_ai has it: text, and the exit code."""

    exit_code: int
    stdout: str
    stderr: str


class TooLong(NamedTuple):
    """A stream was longer than the limit; what was kept of both."""

    kept: str


def ended(result: ExecResult, output_bytes_max: int, timeout_s: float | None) -> Ended | TooLong:
    """What an exec came to.

    Raises:
        TimeoutError: Its time was over.
        PermissionError: It may not be executed.
        UnicodeDecodeError: A stream is not UTF-8.
    """
    if result.timed_out:
        raise TimeoutError(f"the command ran out of its {timeout_s:g} seconds")
    if max(result.stdout_bytes, result.stderr_bytes) > output_bytes_max:
        return TooLong(result.text + result.error_text)
    stdout, stderr = result.stdout.decode(), result.stderr.decode()
    if result.exit_code == CANNOT_RUN and "permission denied" in stderr.lower():
        raise PermissionError(stderr.strip())
    if result.oom_killed:
        stderr += "killed: out of memory (the sandbox's memory_mib)\n"
    return Ended(result.exit_code, stdout, stderr)


def file_error(error: BarchanError, path: str) -> OSError | None:
    """The operating system's own error behind it; None: there is none, the fault is the platform's or ours."""
    number = error.details.get("errno")
    return OSError(number, os.strerror(number), path) if isinstance(number, int) and number > 0 else None


def is_unavailable(error: BarchanError) -> bool:
    """The sandbox can't be used, through no fault of what was asked of it."""
    lost = (SandboxLost, SandboxExpired, TransportError, ProtocolError, CapacityError, BackendError)
    return isinstance(error, lost)
