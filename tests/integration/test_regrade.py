"""`barchan regrade` on a real node, over runs of the example and over a run's folder with every kind of artifact."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from barchan.model.verdict import Verdict
from barchan.rollout.record import RolloutRecord, Timings
from barchan.rollout.store import RunFolder, RunInfo, read_rollouts
from barchan.rollout.task import DiffArtifact, FileArtifact, FilesArtifact, PythonGrader, ScriptGrader, Task
from barchan.rollout.verdict import scored, void
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_tasks.py"


def cli(node: NodeProcess, *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "barchan.cli", *map(str, words), "--state-dir", str(node.state_dir)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def run(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the example, by the oracle."""
    folder = tmp_path_factory.mktemp("run") / "oracle"
    done = cli(node, "rollout", EXAMPLE, "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    assert (told(done)["scored"], told(done)["reward_mean"]) == (2, 1.0)
    return folder


def test_the_example_tells_nothing_from_something(node: NodeProcess, tmp_path: Path) -> None:
    """Of the example's tasks, a policy that does nothing passes none."""
    done = cli(node, "rollout", EXAMPLE, "--policy", "nop", "--out", tmp_path / "nop", "--json")
    assert (told(done)["scored"], told(done)["reward_mean"]) == (2, 0.0), done.stderr


def test_the_same_graders_give_the_same(node: NodeProcess, run: Path) -> None:
    """Nothing is different; the new records are those of the run with new sandboxes, and a second file follows."""
    before = (run / "rollouts.jsonl").read_bytes()
    done = cli(node, "regrade", run, "--json", cwd=EXAMPLE.parent)
    assert done.returncode == 0, done.stderr
    assert (told(done)["graded"], told(done)["same"], told(done)["reward_mean"]) == (2, 2, 1.0)
    assert "every verdict is the same" in done.stdout
    again = Path(told(done)["out"]).read_bytes().splitlines()
    assert {json.loads(line)["verdict"]["reward"] for line in again} == {1.0}
    assert {json.loads(line)["rollout_id"] for line in again} == {record.rollout_id for record in read_rollouts(run)}
    second = cli(node, "regrade", run, "--tasks", EXAMPLE, "--json")
    assert (Path(told(done)["out"]).name, Path(told(second)["out"]).name) == ("regrade-1.jsonl", "regrade-2.jsonl")
    assert (run / "rollouts.jsonl").read_bytes() == before


def test_mended_graders(node: NodeProcess, run: Path, tmp_path: Path) -> None:
    """Graders of another set are used; what they change is told rollout by rollout, a broken one's included."""
    text = EXAMPLE.read_text().replace("echo 1;", "echo 0.25;").replace("my_tasks:", "mended:")
    (tmp_path / "mended.py").write_text(text.replace('"reward": right', '"reward": 1 / 0 * right'))
    done = cli(node, "regrade", run, "--tasks", tmp_path / "mended.py", "--json")
    assert done.returncode == 0, done.stderr
    assert {name: told(done)[name] for name in ("same", "changed", "newly_void")} == {
        "same": 0,
        "changed": 1,
        "newly_void": 1,
    }
    assert (told(done)["reward_mean_before"], told(done)["reward_mean"]) == (1.0, 0.25)
    rows = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("run_")]
    assert rows == [
        ["primes", "1", "void", "newly", "void", "grader_crash"],
        ["count-words", "1", "0.25", "changed", "completed"],
    ]


def test_graders_that_are_not_found(node: NodeProcess, run: Path, tmp_path: Path) -> None:
    """One line says so before anything is graded, and no file is begun."""
    before = sorted(run.iterdir())
    done = cli(node, "regrade", run, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "task primes: grader my_tasks:grade_primes: ModuleNotFoundError" in done.stderr
    assert sorted(run.iterdir()) == before


def info() -> RunInfo:
    return RunInfo(
        run_id="made",
        task_set="made",
        policy="none",
        settings={"--template": "debian", "--memory-mib": 256},
        barchan_version="0",
        started_unix_s=0.0,
    )


def record(task_id: str, verdict: Verdict, **fields: Any) -> RolloutRecord:
    return RolloutRecord(
        run_id="made",
        rollout_id=f"made-{task_id}",
        task_id=task_id,
        sample_index=0,
        policy="none",
        verdict=verdict,
        timings=Timings(),
        started_unix_s=0.0,
        **fields,
    )


def tar_of(name: str, data: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def test_artifacts_of_every_kind(node: NodeProcess, tmp_path: Path) -> None:
    """A tar is taken from its file; an image that is gone is void; a limit the policy ran into stays said; what left
    nothing is left out.
    """
    script = ScriptGrader(command="cat /home/agent/out/a.txt >/logs/verifier/reward.txt", timeout_s=60)
    tasks = [
        Task(task_id="files", instruction="", grader=script, artifact=FilesArtifact(paths=("/home/agent/out",))),
        Task(task_id="diff", instruction="", grader=script, artifact=DiffArtifact()),
        Task(task_id="file", instruction="", grader=PythonGrader(function="builtins:max"), artifact=FileArtifact()),
    ]
    folder = tmp_path / "made"
    with RunFolder.create(folder, info(), tasks) as store:
        store.add(record("files", scored(0.0, "turn_limit", True, ()), artifact_kind="files"))
        store.add_artifact("made-files", tar_of("home/agent/out/a.txt", b"0.5\n"))
        store.add(record("diff", scored(1.0, "completed", False, ()), artifact_kind="diff", artifact="artifact-gone"))
        store.add(record("file", scored(0.0, "completed", False, ())))
    done = cli(node, "regrade", folder, "--json")
    assert done.returncode == 0, done.stderr
    assert {name: told(done)[name] for name in ("graded", "changed", "newly_void", "left_out")} == {
        "graded": 2,
        "changed": 1,
        "newly_void": 1,
        "left_out": 1,
    }, done.stdout
    lines = (json.loads(line) for line in Path(told(done)["out"]).read_bytes().splitlines())
    verdicts = {line["task_id"]: line["verdict"] for line in lines}
    assert (verdicts["files"]["reward"], verdicts["files"]["cause"], verdicts["files"]["truncated"]) == (
        0.5,
        "turn_limit",
        True,
    )
    assert (verdicts["diff"]["status"], verdicts["diff"]["cause"]) == ("void", "image")
    assert "--keep-images" in verdicts["diff"]["evidence"][0]["fact"]


def test_nothing_to_grade(node: NodeProcess, tmp_path: Path) -> None:
    """A run that left nothing, or is none, is told; so is one where every grading failed."""
    tasks = [Task(task_id="t", instruction="", grader=PythonGrader(function="builtins:max"))]
    with RunFolder.create(tmp_path / "none", info(), tasks) as store:
        store.add(record("t", void("platform", "sandbox_lost", ())))
    done = cli(node, "regrade", tmp_path / "none")
    assert (done.returncode, "none of its 1 rollouts left something" in done.stderr) == (1, True), done.stderr
    assert "holds no run" in cli(node, "regrade", tmp_path / "no-such").stderr
    with RunFolder.create(tmp_path / "all", info(), tasks) as store:
        store.add(record("t", scored(0.0, "completed", False, ()), artifact_kind="file", artifact="x"))
    done = cli(node, "regrade", tmp_path / "all", "--json")
    assert (done.returncode, told(done)["newly_void"]) == (1, 1), done.stderr
