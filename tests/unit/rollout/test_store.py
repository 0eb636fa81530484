"""A run's folder: what it keeps, who may write to it, and when it can be gone on with."""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from barchan.errors import BackendError, Conflict, InvalidSpec, NotFound
from barchan.rollout.attempt import Job
from barchan.rollout.store import (
    ROLLOUTS,
    RUN,
    TASKS,
    RunFolder,
    RunInfo,
    artifact_path,
    read_rollouts,
    read_run,
    read_tasks,
)
from barchan.rollout.summary import Summary
from barchan.rollout.table import TaskRow
from barchan.rollout.task import Environment, FilesArtifact, PatchArtifact, ScriptGrader, Task
from barchan.rollout.task import TestsGrader as OfTests  # under its own name pytest takes it for tests
from barchan.sdk.recipe import Put, Recipe, Run
from tests.unit.rollout.fakes import task
from tests.unit.rollout.test_summary import ONE, VOID, record, summary_of

pytestmark = pytest.mark.timeout(30)

INFO = RunInfo(
    run_id="run",
    task_set="s",
    policy="p",
    settings={"--group": 4, "--model": None},
    barchan_version="0",
    started_unix_s=1.0,
)
TASKS_OF_ALL_KINDS = [
    task(0),
    task(
        1,
        artifact=FilesArtifact(paths=("/out",)),
        grader=ScriptGrader(command="x", files=(Put(path="/t", data=b"\0"),)),
    ),
    task(
        2,
        artifact=PatchArtifact(repo="/r", base="HEAD"),
        grader=OfTests(test_patch="", command="t", fail_to_pass=("a::b",)),
        environment=Environment(recipe=Recipe(base=Recipe(base="debian", steps=(Run(command="true"),)))),
    ),
]


def folder_at(path: Path, tasks: Sequence[Task] = (), info: RunInfo = INFO) -> RunFolder:
    return RunFolder.create(path, info, tasks)


def test_each_rollout_is_kept_as_it_comes(tmp_path: Path) -> None:
    """A line is on disk before the next rollout; a line that a crash cut short is left out when reading."""
    with folder_at(tmp_path / "r") as folder:
        folder.add(record(ONE))
        assert [item.verdict for item in read_rollouts(folder.path)] == [ONE]
        folder.add(record(VOID))
        folder.finish(summary_of(record(ONE)), [])
    assert [item.verdict.status for item in read_rollouts(folder.path)] == ["scored", "void"]
    with (folder.path / ROLLOUTS).open("ab") as file:
        file.write(b'{"run_id": "cut sh')
    assert len(read_rollouts(folder.path)) == 2
    assert msgspec.json.decode((folder.path / "summary.json").read_bytes(), type=Summary).scored == 1
    assert msgspec.json.decode((folder.path / "tasks.json").read_bytes(), type=list[TaskRow]) == []


def test_tasks_of_every_kind_come_back(tmp_path: Path) -> None:
    """What a run attempted can be read from its folder, whatever its environments and graders."""
    with folder_at(tmp_path, TASKS_OF_ALL_KINDS):
        assert read_tasks(tmp_path) == TASKS_OF_ALL_KINDS
        assert (tmp_path / TASKS).stat().st_mode & 0o077 == 0  # they may hold variables of the caller's environment
        assert read_run(tmp_path) == INFO


def test_an_artifact_that_is_no_text_has_a_file_of_its_own(tmp_path: Path) -> None:
    """By the rollout's id."""
    with folder_at(tmp_path) as folder:
        folder.add_artifact("run-0", b"\0tar")
    assert artifact_path(tmp_path, "run-0").read_bytes() == b"\0tar"


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that can't be written is an error, not a silent gap, and leaves no part of it."""
    with folder_at(tmp_path) as folder:
        folder.add(record(ONE))
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:10]))
        with pytest.raises(BackendError, match="--resume"):
            folder.add(record(ONE))
        monkeypatch.undo()
        folder.add(record(ONE))
    assert len(read_rollouts(tmp_path)) == 2


def test_a_run_that_was_refused_leaves_its_folder_free(tmp_path: Path) -> None:
    """What is raised before a rollout began removes what was made for it; what lay there and any result stay."""
    path = tmp_path / "r"
    with pytest.raises(NotFound), folder_at(path):
        raise NotFound("no image")
    assert not path.exists()
    path.mkdir()
    (path / "notes").write_text("mine")
    with pytest.raises(NotFound), folder_at(path):
        raise NotFound("no image")
    assert [item.name for item in path.iterdir()] == ["notes"]
    with pytest.raises(NotFound), folder_at(path) as folder:
        folder.add(record(ONE))
        raise NotFound("no room")
    assert len(read_rollouts(path)) == 1


def test_an_earlier_run_is_never_written_over(tmp_path: Path) -> None:
    """A folder that already holds a run is refused, and so is a path that can't be a folder."""
    with folder_at(tmp_path):
        pass
    with pytest.raises(InvalidSpec, match="holds a run already"):
        folder_at(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSpec, match="file"):
        folder_at(tmp_path / "file")


def test_a_run_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Its id stays, its records are known, the torn line is gone, and new lines follow the whole ones."""
    with folder_at(tmp_path, [task()]) as folder:
        folder.add(record(ONE))
    with (tmp_path / ROLLOUTS).open("ab") as file:
        file.write(b'{"run_id": "cut sh')
    asked = replace(INFO, run_id="another", started_unix_s=2.0, barchan_version="1")
    with RunFolder.resume(tmp_path, asked, [task()]) as folder:
        assert folder.info == INFO
        assert [item.verdict for item in folder.earlier] == [ONE]
        folder.add(record(VOID))
    assert [item.verdict for item in read_rollouts(tmp_path)] == [ONE, VOID]


async def test_ids_that_were_used_are_known(tmp_path: Path) -> None:
    """Those of finished rollouts. One of which only a log was left goes on by that, and whoever wrote it can't."""
    with folder_at(tmp_path, [task()]) as folder:
        folder.add(record(ONE))
        (await folder.open_log(Job("run-5", task(), 0))).close()
    with RunFolder.resume(tmp_path, INFO, [task()]) as folder:
        assert folder.rollout_ids == {record(ONE).rollout_id}
        log = await folder.open_log(Job("run-5", task(), 0))
        assert (log.is_begun, log.header.epoch) == (True, 1)
        log.close()


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    """While one has the folder, a second one is refused, and nothing is changed."""
    with folder_at(tmp_path, [task()]) as folder:
        with pytest.raises(Conflict, match="another process"):
            RunFolder.resume(tmp_path, INFO, [task()])
        folder.add(record(ONE))
    with RunFolder.resume(tmp_path, INFO, [task()]) as folder:
        assert len(folder.earlier) == 1


@pytest.mark.parametrize(
    ("asked", "tasks", "told"),
    [
        (replace(INFO, policy="q"), [task(0), task(1)], "its policy is p, and q is asked"),
        (replace(INFO, task_set="t"), [task(0), task(1)], "its task set is s, and t is asked"),
        (
            replace(INFO, settings={"--group": 8, "--model": None}),
            [task(0), task(1)],
            "its --group is 4, and 8 is asked",
        ),
        (INFO, [task(0)], "it has 2 tasks, and 1 are asked"),
        (INFO, [task(1), task(0)], "its task Fake/0 is Fake/1 now"),
        (INFO, [task(0), task(1, instruction="other")], "task Fake/1 has changed"),
    ],
)
def test_another_run_is_not_gone_on_with(tmp_path: Path, asked: RunInfo, tasks: list[Task], told: str) -> None:
    """What differs is named, and the folder can still be resumed by who asks for the same."""
    with folder_at(tmp_path, [task(0), task(1)]):
        pass
    with pytest.raises(InvalidSpec) as refused:
        RunFolder.resume(tmp_path, asked, tasks)
    assert told in str(refused.value)
    with RunFolder.resume(tmp_path, INFO, [task(0), task(1)]) as folder:
        assert folder.earlier == []


def test_a_folder_without_a_run_can_not_be_resumed(tmp_path: Path) -> None:
    """Nothing there, a file of another format, and a line that is broken in the middle: each is named."""
    with pytest.raises(NotFound, match="holds no run"):
        RunFolder.resume(tmp_path, INFO, [])
    with folder_at(tmp_path):
        pass
    (tmp_path / ROLLOUTS).write_bytes(b"broken\n{}\n")
    with pytest.raises(InvalidSpec, match=f"{ROLLOUTS}:1"):
        RunFolder.resume(tmp_path, INFO, [])
    (tmp_path / TASKS).write_bytes(b"{}\n")
    with pytest.raises(InvalidSpec, match=f"{TASKS}:1"):
        RunFolder.resume(tmp_path, INFO, [])
    (tmp_path / RUN).write_bytes(msgspec.json.encode(replace(INFO, format="barchan.run/9")))
    with pytest.raises(InvalidSpec, match="run/9"):
        RunFolder.resume(tmp_path, INFO, [])
