"""Task sets written in Python: how they are found, and how a broken one is told."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.errors import BarchanError, InvalidSpec, TaskError
from barchan.rollout.task import PythonGrader
from barchan.rollout.tasksets.plain import load_plain

pytestmark = pytest.mark.timeout(30)

HEAD = """from barchan.rollout.task import PythonGrader, Task


def grade(task, artifact):
    return 1.0


def one(name, function="{module}:grade"):
    return Task(task_id=name, instruction="Do it.", grader=PythonGrader(function=function))


"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a user works; what is imported from there is forgotten again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("set_a", "set_b", "set_c"):
        sys.modules.pop(name, None)


def written(folder: Path, name: str, body: str) -> str:
    path = folder / f"{name}.py"
    path.write_text(HEAD.replace("{module}", name) + body)
    return str(path)


def test_a_file(folder: Path) -> None:
    """`tasks()` of the file gives them, in its order, from a generator too; graders are found by the file's name."""
    (folder / "sub").mkdir()
    path = written(folder / "sub", "set_a", "def tasks():\n    yield one('x')\n    yield one('y')\n")
    found = load_plain(path)
    assert [task.task_id for task in found] == ["x", "y"]
    assert found[0].grader == PythonGrader(function="set_a:grade")


def test_a_function_of_a_file_or_module(folder: Path) -> None:
    """Another function is named after a colon; a module is found from the current directory."""
    path = written(folder, "set_b", "def hard():\n    return (one('z'),)\n")
    assert [task.task_id for task in load_plain(f"{path}:hard")] == ["z"]
    assert [task.task_id for task in load_plain("set_b:hard")] == ["z"]


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        ("def tasks(:\n", InvalidSpec, "set_c.py:12: invalid syntax"),
        ("import no_such_module_here\n", InvalidSpec, "set_c.py:12: ModuleNotFoundError: No module named"),
        ("1 / 0\n", InvalidSpec, "set_c.py:12: ZeroDivisionError"),
        ("", InvalidSpec, "set_c.py: no function tasks()"),
        ("tasks = 3\n", InvalidSpec, "set_c.py: no function tasks()"),
        ("def tasks():\n    return [one('x'), 'y']\n", TaskError, "set_c.py:12: item 1 is no Task but str"),
        ("def tasks():\n    return one('x')\n", TaskError, "set_c.py:12: it gives Task, and no tasks"),
        ("def tasks():\n    return 3\n", TaskError, "set_c.py:12: it gives int, and no tasks"),
        ("def tasks():\n    return []\n", TaskError, "set_c.py:12: it gives no task"),
        ("def tasks():\n    return [one('x'), one('x')]\n", TaskError, "set_c.py:12: 2 tasks are called x"),
        ("def tasks():\n    yield one('x')\n    yield {}['y']\n", TaskError, "set_c.py:14: KeyError: 'y'"),
        ("raise SystemExit(0)\n", InvalidSpec, "set_c.py:12: SystemExit: 0"),
        ("def tasks():\n    raise SystemExit(0)\n", TaskError, "set_c.py:13: SystemExit: 0"),
        ("def tasks():\n    return [one(3)]\n", TaskError, "set_c.py:12: task 3: Expected `str`, got `int`"),
        ("def tasks():\n    return [one('')]\n", TaskError, "set_c.py:12: item 0 has no task_id"),
        ("def tasks(a):\n    return []\n", TaskError, "set_c.py:12: TypeError: tasks() missing 1 required"),
        ("def tasks():\n    return [one('x', 'gone:f')]\n", TaskError, "set_c.py:12: task x: grader gone:f: ModuleNot"),
        ("def tasks():\n    return [one('x', 'set_c:f')]\n", TaskError, "task x: grader set_c:f: AttributeError"),
    ],
)
def test_broken_ones(folder: Path, body: str, kind: type[BarchanError], said: str) -> None:
    """The error names the file and the line, before anything runs."""
    path = written(folder, "set_c", body)
    with pytest.raises(kind) as refused:
        load_plain(path)
    assert said in str(refused.value)
    assert path in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("no/such/file.py", "there is no file no/such/file.py"),
        ("no_such_module_here:tasks", "task set no_such_module_here:tasks: ModuleNotFoundError"),
        ("json:tasks", "no function tasks()"),
    ],
)
def test_not_there(folder: Path, spec: str, said: str) -> None:
    """A file, module or function that is not there."""
    with pytest.raises(InvalidSpec) as refused:
        load_plain(spec)
    assert said in str(refused.value)


def test_a_file_with_a_modules_name(folder: Path) -> None:
    """Its graders would be looked for in the other module, so it is refused."""
    path = written(folder, "json", "def tasks():\n    return [one('x')]\n")
    with pytest.raises(InvalidSpec, match=r"another module is called json"):
        load_plain(path)
