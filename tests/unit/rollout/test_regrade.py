"""Grading again: what is different, what can be graded, and how an artifact comes back from a run's folder."""

from pathlib import Path
from typing import Any

import pytest

from barchan.errors import InvalidSpec, NotFound
from barchan.model.verdict import Cause, Verdict
from barchan.rollout.record import RolloutRecord, Timings
from barchan.rollout.regrade import artifact_of, change_of, ended_of, gradable
from barchan.rollout.store import artifact_path
from barchan.rollout.verdict import cancelled, scored, void

pytestmark = pytest.mark.timeout(30)

ONE, HALF = scored(1.0, "completed", False, ()), scored(0.5, "completed", False, ())
VOID = void("platform", "sandbox_lost", ())


def record(verdict: Verdict = ONE, **fields: Any) -> RolloutRecord:
    return RolloutRecord(
        run_id="r",
        rollout_id="r-0",
        task_id="t",
        sample_index=0,
        policy="p",
        verdict=verdict,
        timings=Timings(),
        started_unix_s=0.0,
        **fields,
    )


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (ONE, ONE, "same"),
        (ONE, scored(1.0, "turn_limit", True, ()), "same"),
        (ONE, HALF, "changed"),
        (HALF, VOID, "newly void"),
        (VOID, HALF, "no longer void"),
        (VOID, void("task", "grader_crash", ()), "same"),
    ],
)
def test_what_is_different(before: Verdict, after: Verdict, change: str) -> None:
    """Rewards are compared, and whether there is one."""
    assert change_of(before, after) == change


def test_what_can_be_graded() -> None:
    """What left an artifact, even where its grading failed; not what was given up, or lived in its sandbox alone."""
    kinds = ("file", "patch", "files", "diff", "shared", None)
    assert [gradable(record(artifact_kind=kind)) for kind in kinds] == [True, True, True, True, False, False]
    assert gradable(record(VOID, artifact_kind="file"))
    assert not gradable(record(cancelled("policy"), artifact_kind="file"))


def test_how_the_policys_part_had_ended() -> None:
    """A limit or a refusal is the attempt's own; what the old grading found is not."""
    causes: tuple[Cause, ...] = ("turn_limit", "agent_timeout", "refusal", "exec_timeout", "guest_wrecked", "completed")
    ended = [ended_of(scored(0.0, cause, False, ())) for cause in causes]
    assert ended == ["turn_limit", "agent_timeout", "refusal", "completed", "completed", "completed"]
    assert ended_of(VOID) == "completed"


def test_artifacts_come_back(tmp_path: Path) -> None:
    """Text from the record, a tar from its file, an image by its name; lost bytes are said to be."""
    artifact = artifact_of(tmp_path, record(artifact_kind="patch", artifact="+ä\n"))
    assert (artifact.kind, artifact.data, artifact.notes) == ("patch", "+ä\n".encode(), ())
    assert artifact_of(tmp_path, record(artifact_kind="file", artifact="a\ufffd")).notes[0].source == "record"
    assert artifact_of(tmp_path, record(artifact_kind="diff", artifact="img")).image == "img"
    path = artifact_path(tmp_path, "r-0")
    path.parent.mkdir()
    path.write_bytes(b"tar")
    assert artifact_of(tmp_path, record(artifact_kind="files")).data == b"tar"


def test_artifacts_that_are_gone(tmp_path: Path) -> None:
    """A missing file names itself; a record without text has nothing to give."""
    with pytest.raises(NotFound, match=r"r-0\.tar: No such file"):
        artifact_of(tmp_path, record(artifact_kind="files"))
    with pytest.raises(InvalidSpec, match="left nothing"):
        artifact_of(tmp_path, record(artifact_kind="file"))
