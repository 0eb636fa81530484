"""Graders: from an artifact to the facts a verdict is made of."""

from importlib import import_module
from typing import cast

from barchan.rollout.graders.base import Grader
from barchan.rollout.task import FunctionGrader, GraderSpec, JudgeGrader, PythonGrader, ScriptGrader, TestsGrader

GRADERS: dict[type[GraderSpec], str] = {
    FunctionGrader: "functions:FunctionGrading",
    ScriptGrader: "script:ScriptGrading",
    TestsGrader: "tests:TestsGrading",
    PythonGrader: "python:PythonGrading",
    JudgeGrader: "judge:JudgeGrading",
}


def grader_of(spec: GraderSpec) -> Grader:
    """The grader of a task's spec; its module is imported when a task asks for it.

    Raises:
        TaskError: The spec can't give a reward, or names something that is not there.
    """
    module, _, name = GRADERS[type(spec)].partition(":")
    return cast(Grader, getattr(import_module(f"{__name__}.{module}"), name)(spec))
