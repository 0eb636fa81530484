"""SWE rows: what is read of them, what is refused with its place, and what the agent's repository holds."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import TaskError
from barchan.rollout.task import PatchArtifact, Task
from barchan.rollout.task import TestsGrader as Spec
from barchan.rollout.tasksets import swe_git
from barchan.rollout.tasksets.swe import load_swe
from barchan.rollout.tasksets.swe_rows import SCRIPT_FILE, TEST_COMMAND, parse_row
from barchan.sdk.recipe import Put, Run

OLD, FIXED, LATER = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n", "# a secret of later\n"
TEST = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "safe.directory=*", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


class Origin:
    """A repository `ann/calc` whose second commit is the base; the fix, a branch, a tag and a remote come later."""

    def __init__(self, folder: Path) -> None:
        self.repos = folder / "repos"
        work = folder / "work"
        work.mkdir()
        git(work, "init", "--quiet", "--initial-branch=main")
        commits = []
        for files in (
            {"README": "calc\n"},
            {"calc.py": OLD, ".gitignore": "*.log\n", "kept.log": "tracked though ignored\n"},
            {"calc.py": FIXED},
            {"test_calc.py": TEST, "later.py": LATER},
        ):
            for name, text in files.items():
                (work / name).write_text(text)
            git(work, "add", "--all", "--force")
            git(work, "commit", "--quiet", "-m", "a change")
            commits.append(git(work, "rev-parse", "HEAD").strip())
        git(work, "tag", "v2")
        self.base = commits[1]
        self.later = commits[3]
        self.patch = git(work, "diff", commits[1], commits[2])
        self.test_patch = git(work, "diff", commits[2], commits[3], "--", "test_calc.py")
        self.mirror = self.repos / "ann__calc.git"
        git(folder, "clone", "--quiet", "--bare", str(work), str(self.mirror))

    def row(self, **changes: Any) -> dict[str, Any]:
        row = {
            "instance_id": "ann__calc-1",
            "repo": "ann/calc",
            "base_commit": self.base,
            "problem_statement": "add subtracts",
            "patch": self.patch,
            "test_patch": self.test_patch,
            "FAIL_TO_PASS": ["test_calc.py::test_add"],
            "PASS_TO_PASS": "[]",
            "version": "1.0",
            "environment": {"base": "debian-dev", "install": ["true"], "env": {"A": "1"}, "network": "open"},
            **changes,
        }
        return {name: value for name, value in row.items() if value is not ...}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Origin:
    return Origin(tmp_path_factory.mktemp("origin"))


def load(folder: Path, origin: Origin, *rows: Mapping[str, Any] | str) -> list[Task]:
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return load_swe(path, repos=origin.repos)


def test_a_row_becomes_a_task(origin: Origin, tmp_path: Path) -> None:
    """Instruction, artifact, grader and recipe say what the row says; installs have its network; nobody but the oracle
    has the gold patch.
    """
    (task,) = load(tmp_path, origin, origin.row())
    assert (task.task_id, task.labels) == ("ann__calc-1", {"repo": "ann/calc", "version": "1.0"})
    assert "add subtracts" in task.instruction and "/testbed" in task.instruction
    assert isinstance(task.grader, Spec) and isinstance(task.artifact, PatchArtifact)
    assert task.grader.fail_to_pass == ("test_calc.py::test_add",) and task.grader.pass_to_pass == ()
    assert (task.grader.command, task.grader.reference) == (TEST_COMMAND, origin.patch)
    assert (task.grader.user, task.environment.user, task.environment.network) == ("agent", "agent", "none")
    assert [put.data for put in task.oracle_files] == [origin.patch.encode()]
    recipe = task.environment.recipe
    assert recipe is not None and (recipe.base, recipe.workdir, recipe.env) == ("debian-dev", "/testbed", {"A": "1"})
    (source,) = (step.source for step in recipe.steps if isinstance(step, Put))
    assert source == str(origin.repos / "workspaces" / f"ann__calc-{origin.base}")
    assert {step.network for step in recipe.steps if isinstance(step, Run)} == {"open"}
    assert task.artifact == PatchArtifact(repo="/testbed", base=git(Path(source), "rev-parse", "HEAD").strip())


def test_a_workspace_holds_the_base_commits_tree_and_nothing_else(origin: Origin, tmp_path: Path) -> None:
    """One commit on one branch; every object in it is reachable from there; no remote, tag, reflog or later file."""
    workspace = tmp_path / "workspace"
    swe_git.make_workspace(origin.mirror, origin.base, workspace)
    assert git(workspace, "rev-parse", "HEAD^{tree}") == git(origin.mirror, "rev-parse", f"{origin.base}^{{tree}}")
    assert git(workspace, "for-each-ref", "--format=%(refname)").split() == ["refs/heads/main"]
    assert git(workspace, "log", "--all", "--format=%s").splitlines() == [swe_git.MESSAGE]
    objects = git(workspace, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    reachable = git(workspace, "rev-list", "--objects", "--all", "--no-object-names").split()
    assert sorted(objects) == sorted(reachable) and origin.later not in objects
    assert git(workspace, "remote") == ""
    assert not (workspace / ".git/logs").exists() and not (workspace / ".git/objects/info").exists()
    git(workspace, "reset", "--quiet")
    assert git(workspace, "status", "--short") == ""
    assert not (workspace / "later.py").exists() and (workspace / "kept.log").exists()


def test_a_partial_clone_gives_no_more_of_its_objects(origin: Origin, tmp_path: Path) -> None:
    """Also of a mirror whose objects came from a promisor, only those of the one commit are in the workspace."""
    mirror, workspace = tmp_path / "partial.git", tmp_path / "workspace"
    git(origin.mirror, "config", "uploadpack.allowFilter", "true")
    source = f"file://{origin.mirror}"
    git(tmp_path, "clone", "--quiet", "--bare", "--filter=blob:limit=1g", source, str(mirror))
    assert list(mirror.glob("objects/pack/*.promisor"))
    swe_git.make_workspace(mirror, origin.base, workspace)
    objects = git(workspace, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    assert sorted(objects) == sorted(git(workspace, "rev-list", "--objects", "HEAD", "--no-object-names").split())


def test_equal_commits_make_equal_workspaces(origin: Origin, tmp_path: Path) -> None:
    """The same files with the same bytes, so that the image made of them is the same one."""
    contents = []
    for name in ("one", "two"):
        swe_git.make_workspace(origin.mirror, origin.base, tmp_path / name)
        files = [path for path in sorted((tmp_path / name).rglob("*")) if path.is_file()]
        contents.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert contents[0] == contents[1]


def test_a_workspace_is_made_once(origin: Origin, tmp_path: Path) -> None:
    """The second load finds it; one that somebody else made meanwhile is taken as it is."""
    load(tmp_path, origin, origin.row())
    workspace = origin.repos / "workspaces" / f"ann__calc-{origin.base}"
    before = workspace.stat().st_ino
    load(tmp_path, origin, origin.row())
    swe_git.make_workspace(origin.mirror, origin.base, workspace)
    assert workspace.stat().st_ino == before
    assert [path.name for path in workspace.parent.iterdir()] == [workspace.name]


def test_an_abbreviated_commit_will_do(origin: Origin, tmp_path: Path) -> None:
    """Seven digits name the same commit and so the same workspace."""
    (full,), (short,) = (
        load(tmp_path, origin, origin.row(base_commit=commit)) for commit in (origin.base, origin.base[:7])
    )
    assert full.artifact == short.artifact and full.environment == short.environment


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"instance_id": ...}, "instance_id", "is missing"),
        ({"instance_id": 7}, "instance_id", "is text, not int"),
        ({"repo": "calc"}, "repo", "is not OWNER/NAME"),
        ({"repo": "ann/other"}, "repo", "there is no "),
        ({"repo": "../../etc"}, "repo", "is not OWNER/NAME"),
        ({"base_commit": ...}, "base_commit", "is missing"),
        ({"base_commit": "main"}, "base_commit", "is no commit"),
        ({"base_commit": "abc123"}, "base_commit", "is no commit"),
        ({"base_commit": "0" * 40}, "base_commit", "is no commit of"),
        ({"problem_statement": ""}, "problem_statement", "is empty"),
        ({"patch": ...}, "patch", "is missing"),
        ({"patch": "nothing of the kind\n"}, "patch", "is no patch"),
        ({"patch": "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,9 @@\n+x\n"}, "patch", "is no patch"),
        ({"test_patch": "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n"}, "test_patch", "does not fit"),
        ({"FAIL_TO_PASS": ...}, "FAIL_TO_PASS", "is missing"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS", "is empty"),
        ({"FAIL_TO_PASS": "test_calc.py::test_add"}, "FAIL_TO_PASS", "holds no list"),
        ({"PASS_TO_PASS": {"a": 1}}, "PASS_TO_PASS", "is a list"),
        ({"environment": ...}, "environment", "is missing, and so is image"),
        ({"environment": {}}, "environment", "`base` is missing"),
        ({"environment": {"base": "debian-dev", "pip": []}}, "environment", "unknown field `pip`"),
        ({"environment": {"base": "debian-dev", "network": "some"}}, "environment", "network"),
        ({"environment": {"base": "debian-dev", "test_command": "make"}}, "test_command", "has no {junit}"),
        ({"environment": {"base": "b", "files": [{"path": "/x", "source": "no"}]}}, "environment.files", "there is no"),
        ({"image": "debian"}, "image", "not both"),
        ({"environment": ..., "image": "no name"}, "image", "is no name of an image"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(
    origin: Origin, tmp_path: Path, changes: dict[str, Any], field: str, says: str
) -> None:
    """A TaskError names file, line, field and what is wrong with it."""
    with pytest.raises(TaskError) as caught:
        load(tmp_path, origin, origin.row(), "", origin.row(**{"instance_id": "other", **changes}))
    assert str(caught.value).startswith(f"{tmp_path / 'rows.jsonl'}:3: {field}: ")
    assert says in str(caught.value)


def test_rows_that_are_none_are_refused(origin: Origin, tmp_path: Path) -> None:
    """Broken JSON, another value, an id seen before, an empty file and a missing one each have their words."""
    for rows, says in (
        (["{"], "rows.jsonl:1: no JSON"),
        (["[]"], "rows.jsonl:1: a row is an object"),
        ([origin.row(), origin.row()], "rows.jsonl:2: instance_id: ann__calc-1 is already on line 1"),
        ([], "there is no row"),
    ):
        with pytest.raises(TaskError, match=says):
            load(tmp_path, origin, *rows)
    with pytest.raises(TaskError, match="No such file"):
        load_swe(tmp_path / "gone.jsonl", repos=None)


def test_a_repository_has_to_be_there_for_an_environment(origin: Origin, tmp_path: Path) -> None:
    """Without a folder of repositories, a row with an environment is refused, and one with an image is not."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(origin.row()))
    with pytest.raises(TaskError, match=r"environment: needs the repository ann__calc\.git"):
        load_swe(path, repos=None)
    path.write_text(json.dumps(origin.row(environment=..., image="calc:1")))
    (task,) = load_swe(path, repos=None)
    assert task.environment.recipe is not None and task.environment.recipe.base == "calc:1"
    assert (task.environment.user, task.environment.workdir) == ("root", "/testbed")


def parsed(origin: Origin, **changes: Any) -> Any:
    return parse_row(json.dumps(origin.row(**changes)).encode(), "rows.jsonl:1")


def test_published_image_fields_are_understood(origin: Origin) -> None:
    """Each data set's name for the image, its lists in JSON or Python text, and its lower-case keys."""
    for name in ("image_name", "image_url", "image_ref"):
        row = parsed(origin, environment=..., **{name: "docker.io/x/calc:1"}, workdir="/workspace/calc")
        assert (row.image, row.workdir, row.environment) == ("docker.io/x/calc:1", "/workspace/calc", None)
    ids = "['test_calc.py::test_add', \"test_calc.py::test_it's\"]"
    row = parsed(origin, FAIL_TO_PASS=..., PASS_TO_PASS=..., fail_to_pass=ids, pass_to_pass=json.dumps(["a.py::b"]))
    assert row.fail_to_pass == ("test_calc.py::test_add", "test_calc.py::test_it's")
    assert row.pass_to_pass == ("a.py::b",)


def test_a_published_command_is_made_to_write_its_report(origin: Origin) -> None:
    """SWE-rebench's pytest command gets the option; the row's own environment has the last word."""
    row = parsed(origin, install_config={"test_cmd": ["cd .", "pytest -rA test_calc.py"]})
    assert row.test_command == "cd . && pytest -rA test_calc.py --junitxml={junit}"
    environment = {"base": "b", "test_command": "run-tests {tests} > {junit}"}
    assert parsed(origin, install_config={"test_cmd": "make"}, environment=environment).test_command.startswith("run-")
    with pytest.raises(TaskError, match=r"test_command: has no \{junit\}"):
        parsed(origin, install_config={"test_cmd": "pytest | tee log"})


def test_names_without_a_file_mean_the_only_one_that_is_touched(origin: Origin) -> None:
    """SWE-Next's bare names get the test patch's file; with two files there is no telling."""
    row = parsed(origin, FAIL_TO_PASS=["test_add", "TestX::test_y[a/b::c]"], PASS_TO_PASS=["other.py::test"])
    assert row.fail_to_pass == ("test_calc.py::test_add", "test_calc.py::TestX::test_y[a/b::c]")
    assert row.pass_to_pass == ("other.py::test",)
    two = origin.test_patch + origin.test_patch.replace("test_calc", "test_more")
    with pytest.raises(TaskError, match="FAIL_TO_PASS: 'test_add' names no file, and test_patch has 2"):
        parsed(origin, FAIL_TO_PASS=["test_add"], test_patch=two)


def test_scale_swe_rows_are_understood(origin: Origin, tmp_path: Path) -> None:
    """The commit comes from the set-up commands, the owner from the id, the tests from the patch or the script."""
    scale: dict[str, Any] = {
        "instance_id": "ann_calc_pr1",
        "repo": "calc",
        "base_commit": ...,
        "test_patch": ...,
        "pre_commands": f"git clean -fd && git checkout {origin.base} -f && git reset --hard HEAD",
        "f2p_patch": origin.test_patch,
        "f2p_script": TEST,
    }
    row = parsed(origin, **scale)
    assert (row.repo, row.base_commit, row.test_patch) == ("ann/calc", origin.base, origin.test_patch)
    scale |= {"f2p_patch": "", "FAIL_TO_PASS": [f"{SCRIPT_FILE}::test_add"]}
    (task,) = load(tmp_path, origin, origin.row(**scale))
    assert isinstance(task.grader, Spec)
    git(tmp_path, "apply", str(_written(tmp_path / "tests.patch", task.grader.test_patch)))
    assert (tmp_path / SCRIPT_FILE).read_text() == TEST


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
