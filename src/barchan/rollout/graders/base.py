"""The contract of a grader: from an artifact to a verdict, in sandboxes where the agent never was."""

from typing import Literal, Protocol

from msgspec import Struct

from barchan.model.verdict import Evidence, Verdict
from barchan.rollout.ports import Log, Sandbox
from barchan.rollout.sandboxes import Sandboxes
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import Task


class Artifact(Struct, frozen=True, kw_only=True):
    """What left the agent's sandbox.

    Attributes:
        data: A file's bytes, a patch, or a tar.
        image: `diff`: name of the node's image that holds the agent's layer over its base.
        sandbox: `shared`: the agent's own sandbox, still running; never written to a file.
        notes: What was left out of it, and the like: evidence for the verdict.
    """

    kind: Literal["file", "patch", "files", "diff", "shared"]
    data: bytes = b""
    image: str = ""
    sandbox: Sandbox | None = None
    notes: tuple[Evidence, ...] = ()


class Grading(Struct, frozen=True, kw_only=True):
    """What a grader has to work with. It makes its sandboxes by `sandboxes`, which ends them and keeps their times."""

    task: Task
    settings: RunSettings
    sandboxes: Sandboxes
    log: Log


class Grader(Protocol):
    async def grade(self, grading: Grading, artifact: Artifact) -> Verdict:
        """The verdict on one artifact, as if the attempt had simply been completed: how the attempt's own part ended is
        added by the caller.

        A void verdict whose cause is in `UNDECIDED` says that the grading ended without an answer, be it by the
        artifact's doing or not: the caller then grades a known-good artifact, the control. What the platform fails to
        do is raised.
        """
        ...
