"""What inspect_ai is told, by what Barchan was told."""

import errno

import pytest

from barchan.compat.inspect_ai.outcome import Ended, TooLong, ended, file_error, is_unavailable
from barchan.errors import BY_CODE, BarchanError, Denied, GuestError, GuestWrecked, InitDied, InvalidSpec, NotFound
from barchan.model.sandbox import ExecResult

LIMIT = 64


def result(
    exit_code: int = 0, stdout: bytes = b"", stderr: bytes = b"", *, timed_out: bool = False, oom_killed: bool = False
) -> ExecResult:
    return ExecResult(
        process_id="p",
        exit_code=exit_code,
        stdout=stdout,
        stderr=stderr,
        timed_out=timed_out,
        oom_killed=oom_killed,
        stdout_bytes=len(stdout),
        stderr_bytes=len(stderr),
    )


def test_an_exit_code_is_a_result() -> None:
    """Whatever a program exits with is no exception, and 143 after a SIGTERM is no time-out."""
    assert ended(result(143, "é".encode(), b"oh"), LIMIT, 30) == Ended(143, "é", "oh")


def test_a_time_out_is_an_exception() -> None:
    """Only the platform's own time-out is one."""
    with pytest.raises(TimeoutError, match="30 seconds"):
        ended(result(137, timed_out=True), LIMIT, 30)


def test_a_program_that_may_not_run() -> None:
    """Exit code 126 with the kernel's refusal is a PermissionError; without it, as of an unknown user, a result."""
    with pytest.raises(PermissionError, match="/etc/passwd"):
        ended(result(126, stderr=b"barchan: cannot run /etc/passwd: Permission denied\n"), LIMIT, None)
    unknown = b"barchan: user nobody-here: there is no such user\n"
    assert ended(result(126, stderr=unknown), LIMIT, None) == Ended(126, "", unknown.decode())


def test_too_much_output() -> None:
    """Either stream over the limit is told, with what was kept of both, whatever bytes it was cut between."""
    whole = "é".encode() * LIMIT
    cut = ExecResult(
        process_id="p", exit_code=0, stdout=whole[: LIMIT - 1], stderr=b"e", stdout_bytes=len(whole), stderr_bytes=1
    )
    found = ended(cut, LIMIT, None)
    assert isinstance(found, TooLong)
    assert found.kept.endswith("\ufffde")


def test_bytes_that_are_no_text() -> None:
    """Whole output that is not UTF-8 is told as such, not mended."""
    with pytest.raises(UnicodeDecodeError):
        ended(result(0, b"\xc3("), LIMIT, None)


def test_out_of_memory_is_said() -> None:
    """A model that reads exit code 137 is told why."""
    found = ended(result(137, oom_killed=True), LIMIT, None)
    assert isinstance(found, Ended)
    assert "memory_mib" in found.stderr


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotFound("no", errno=errno.ENOENT), FileNotFoundError),
        (Denied("no", errno=errno.EACCES), PermissionError),
        (InvalidSpec("no", errno=errno.EISDIR), IsADirectoryError),
        (NotFound("no sandbox", sandbox_id="sb"), type(None)),
    ],
)
def test_failed_file_operations(error: BarchanError, expected: type) -> None:
    """The guest's errno decides, and the path as it was asked for is in the message."""
    found = file_error(error, "a/b")
    assert type(found) is expected
    assert found is None or "a/b" in str(found)


def test_whose_fault_it_is() -> None:
    """What the platform did wrong is kept apart from what the caller or the guest did."""
    assert is_unavailable(InitDied("gone"))
    assert not any(is_unavailable(error("no")) for error in (InvalidSpec, GuestWrecked))
    for error in BY_CODE.values():
        if issubclass(error, GuestError):
            assert not is_unavailable(error("no"))
