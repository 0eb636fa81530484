"""What a supervisor's last words come to: what passes is asked of it again, what never will is the host's lack."""

import asyncio
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from barchan.backends.container import background, supervisor
from barchan.errors import BarchanError, BootFailed, CapacityError, RequirementMissing


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("error pool: No space left on device", CapacityError),
        ("error pool: Input/output error", BootFailed),
        ("error cgroup: Operation not permitted", RequirementMissing),
        ("error pool: No such file or directory", RequirementMissing),
    ],
)
def test_last_words(line: str, kind: type[BarchanError]) -> None:
    """A full disk and a passing lack are told from what this host will never have."""
    refusal = supervisor._refusal(line, Path("supervisor.log"))
    assert type(refusal) is kind
    assert "supervisor.log" in str(refusal)


@pytest.mark.parametrize(("ready_at", "starts"), [(2, 2), (9, 3)])
async def test_one_that_was_killed_is_started_again(
    ready_at: int, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times at most; it has no last words."""
    binary, count = tmp_path / "barchan-supervisor", tmp_path / "starts"
    binary.write_text(f"#!/bin/sh\necho >> {count}; [ $(wc -l < {count}) -ge {ready_at} ] && echo ready\n")
    binary.chmod(0o755)
    monkeypatch.setattr(supervisor, "BINARIES", tmp_path)
    monkeypatch.setattr(supervisor, "TRY_AGAIN_S", 0.01)
    with nullcontext() if ready_at == starts else pytest.raises(BootFailed):
        await supervisor.spawn(tmp_path, "n1", ())
    assert count.read_text().count("\n") == starts


async def test_one_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its child, since nobody would ever hear of them again."""
    monkeypatch.setattr(background, "START_TIMEOUT_S", 0.3)
    pid = tmp_path / "pid"
    with pytest.raises(BootFailed, match=r"not up in 0\.3 s"):
        await background.start(("sh", "-c", f"sleep 60 & echo $! > {pid}; wait"))
    stat = Path(f"/proc/{pid.read_text().strip()}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        async with asyncio.timeout(10):
            while stat.read_text().rpartition(")")[2].split()[0] != "Z":
                await asyncio.sleep(0.01)


async def test_what_stays_behind_may_hold_the_pipe() -> None:
    """Its start is told by then."""
    began = time.monotonic()
    assert await background.start(("sh", "-c", "sleep 5 & echo ready")) == "ready"
    assert time.monotonic() - began < 4
