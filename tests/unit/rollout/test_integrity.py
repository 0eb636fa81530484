"""Signs of tampering, by names and text alone."""

import io
import tarfile
from typing import cast

import pytest
from msgspec.structs import replace

from barchan.errors import TaskError
from barchan.model.verdict import Evidence
from barchan.rollout.graders.base import Artifact
from barchan.rollout.integrity.canary import proof_in, put_canaries, token_of
from barchan.rollout.integrity.hooks import comes_before, runs_by_itself, steering_of, steers, touched
from barchan.rollout.integrity.imported import hooks_of, signs_of_artifact
from barchan.rollout.integrity.protected import Entry, suspects
from barchan.rollout.integrity.sentinel import Sentinel, takes_sentinel
from barchan.rollout.integrity.signs import names_grader, signs_of
from barchan.rollout.ports import Sandbox
from barchan.rollout.tars import Tree, files_of, packed, replaced, unpacked
from barchan.rollout.task import Environment, FilesArtifact, ScriptGrader, Task


@pytest.mark.parametrize(
    "name",
    [
        "conftest.py",
        "a/b/conftest.py",
        "setup.cfg",
        "x.pth",
        "src/pytest.py",
        "_pytest/__init__.py",
        "argparse.py",
        "json/__init__.py",
        "x.egg-info/entry_points.txt",
    ],
)
def test_what_steers(name: str) -> None:
    """By name, anywhere, or where modules are looked for first."""
    assert steers(name)


@pytest.mark.parametrize("name", ["a/b/unittest/x.py", "docs/entry_points.txt", "calc/json.py", "contest.py", "README"])
def test_what_does_not_steer(name: str) -> None:
    """What only looks like it."""
    assert not steers(name)


def test_the_reference_may_steer() -> None:
    """What the task's own solution changes is left to the agent."""
    patch = "diff --git a/setup.cfg b/setup.cfg\n--- a/setup.cfg\n+++ b/setup.cfg\n@@ -1 +1 @@\n-a\n+b\n"
    assert touched(patch + "rename from x y.py\nrename to z.py\n") == {"setup.cfg", "x y.py", "z.py"}
    assert steering_of(("setup.cfg", "conftest.py", "a.py"), touched(patch)) == ("conftest.py",)


def test_settings_count_for_what_they_say_to_a_runner() -> None:
    """A package has a pyproject.toml; one with a section for pytest steers."""
    assert not runs_by_itself("pyproject.toml", b"[project]\nname = 'x'\n")
    assert runs_by_itself("pyproject.toml", b"[project]\n[tool.pytest.ini_options]\naddopts = '-p x'\n")
    assert runs_by_itself("tox.ini", b"[pytest]\n")
    assert runs_by_itself("home/.bashrc", b"")
    assert runs_by_itself("x/.git/hooks/pre-commit", b"")
    assert not runs_by_itself("x/.git/config", b"")


def test_files_of_a_tree_are_replaced_or_left_out() -> None:
    """All others stay as they are."""
    data, _ = packed([Tree(path="/app/a", is_folder=False, data=b"1"), Tree(path="/app/b", is_folder=False, data=b"2")])
    (tree,) = unpacked(data, ("/app",), 1 << 20)
    assert files_of(tree) == {"a": b"1", "b": b"2"}
    assert files_of(replaced(tree, {"a": b"longer"})) == {"a": b"longer", "b": b"2"}
    assert files_of(replaced(tree, {"a": None})) == {"b": b"2"}


def test_a_link_is_no_way_around() -> None:
    """A hook that is a link is one, whatever it leads to; it becomes the file that the environment has."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        link = tarfile.TarInfo("conftest.py")
        link.type, link.linkname = tarfile.SYMTYPE, "other.py"
        tar.addfile(link)
    data, dropped = packed([Tree(path="/app", is_folder=True, data=out.getvalue())])
    (tree,) = unpacked(data, ("/app",), 1 << 20)
    assert (dropped, files_of(tree), hooks_of((tree,))) == ((), {"conftest.py": None}, ("conftest.py",))
    assert files_of(replaced(tree, {"conftest.py": b"base"})) == {"conftest.py": b"base"}
    assert runs_by_itself("pyproject.toml", None)


@pytest.mark.parametrize(
    ("name", "before"),
    [("json.py", True), ("pytest/x.txt", True), ("re", False), ("app/json.py", False), ("calc.py", False)],
)
def test_modules_before_pythons_own(name: str, before: bool) -> None:
    """Those where a program starts."""
    assert comes_before(name) is before


def facts(evidence: tuple[Evidence, ...]) -> list[str]:
    return [item.fact for item in evidence]


def test_signs() -> None:
    """Of a patch only what it adds; honest code of the same kind gives none."""
    sly = "class A:\n    def __eq__(self, other):\n        return True\n"
    assert facts(signs_of("file", sly.encode())) == ["sign: equals or is whatever it is compared with"]
    added = "".join(f"+{line}\n" for line in sly.splitlines())
    assert len(signs_of("patch", added.encode())) == 1
    assert signs_of("patch", added.replace("+", "-").encode()) == ()
    honest = "class A:\n    def __eq__(self, other):\n        return self.x == other.x\nimport os, sys\n"
    assert signs_of("file", honest.encode()) == ()


def test_the_graders_paths() -> None:
    """As they are, and not as the end of other paths."""
    assert names_grader("open('/tests/expected')", ["/tests"])[0].value == "/tests/expected"
    for text in ("src/tests/x", "./tests/x", "$HOME/tests/", "{root}/tests/x", "/tests-more/x"):
        assert names_grader(text, ["/tests"]) == (), text


def test_hooks_in_an_artifact_are_told() -> None:
    """Those of folders; a hook that the task asks for by name is an answer."""
    folder, _ = packed([Tree(path="/app/conftest.py", is_folder=False, data=b"")])
    grader = ScriptGrader(command="true")
    for paths, told in ((("/app",), ["put back: files that run by themselves"]), (("/app/conftest.py",), [])):
        task = Task(task_id="t", instruction="", grader=grader, artifact=FilesArtifact(paths=paths))
        assert facts(signs_of_artifact(task, Artifact(kind="files", data=folder))) == told


class NoFiles:
    """Decoys that are refused are never put anywhere."""


@pytest.mark.parametrize("path", ["relative.py", "/app/x.py", "/work/a/x.py"])
async def test_a_decoy_lies_outside_of_the_work(path: str) -> None:
    """Else an honest artifact would hold it."""
    task = Task(
        task_id="t",
        instruction="",
        grader=ScriptGrader(command="true"),
        artifact=FilesArtifact(paths=("/app",)),
        environment=Environment(workdir="/work/a/"),
        canaries=(path,),
    )
    with pytest.raises(TaskError, match="decoy"):
        await put_canaries(cast(Sandbox, NoFiles()), task)


def test_the_token_of_a_decoy_is_proof() -> None:
    """Only of the task's own, and only where it has decoys."""
    task = Task(task_id="t", instruction="", grader=ScriptGrader(command="true"), canaries=("/opt/x",))
    data = f"x = '{token_of('t')}'".encode()
    assert facts(proof_in(task, data)) == ["proven: it holds the token of a decoy"]
    assert proof_in(task, b"x") == proof_in(replace(task, canaries=()), data) == ()
    assert proof_in(replace(task, task_id="u"), data) == ()


def test_suspects() -> None:
    """What changed or went, and new names that come before others; not what was merely added."""
    entry = Entry("file", 1, 0o755, 1.0, "")
    base = {"/usr/bin/python3": entry, "/usr/bin/cat": entry, "/usr/lib/python3.11/os.py": entry}
    assert suspects(base, dict(base)) == ()
    now = base | {
        "/usr/bin/cat": entry._replace(size=2),
        "/usr/local/bin/python3": entry,
        "/usr/local/bin/mine": entry,
        "/usr/local/lib/python3.11/dist-packages/mine.py": entry,
        "/usr/local/lib/python3.11/dist-packages/x.pth": entry,
        "/etc/ld.so.preload": entry,
    }
    del now["/usr/lib/python3.11/os.py"]
    assert suspects(base, now) == (
        "/etc/ld.so.preload",
        "/usr/bin/cat",
        "/usr/lib/python3.11/os.py",
        "/usr/local/bin/python3",
        "/usr/local/lib/python3.11/dist-packages/x.pth",
    )


@pytest.mark.parametrize(
    ("command", "takes"),
    [
        ("pytest -q {tests}", True),
        ("python3 -m pytest --junitxml={junit} {tests}", True),
        ("cd x && /opt/bin/pytest {tests}", True),
        ("pytest -k word {tests}", False),
        ("pytest -m slow {tests}", False),
        ("pytest -q", False),
        ("tox -- {tests}", False),
    ],
)
def test_where_a_test_that_must_fail_can_run(command: str, takes: bool) -> None:
    """Where pytest runs all of the files that it is given."""
    assert takes_sentinel(command) is takes


def test_sentinels_differ() -> None:
    """So that no code can know one beforehand; each fails."""
    one, other = Sentinel.beside("tests/a/test_x.py"), Sentinel.beside("test_x.py")
    assert one.path.startswith("tests/a/test_")
    assert "/" not in other.path
    assert one.name != other.name
    scope: dict[str, object] = {}
    exec(one.source, scope)
    with pytest.raises(AssertionError):
        scope[one.name]()  # type: ignore[operator]
