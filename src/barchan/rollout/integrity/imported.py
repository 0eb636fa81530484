"""What an artifact brings along beside the answer. Pure."""

import tarfile
from collections.abc import Sequence

from barchan.errors import InvalidSpec
from barchan.model.verdict import Evidence
from barchan.rollout.graders.base import Artifact
from barchan.rollout.integrity.hooks import comes_before, runs_by_itself
from barchan.rollout.integrity.signs import BYTES_MAX, SOURCE, names_grader, signs_of, tar_text
from barchan.rollout.tars import Tree, files_of, unpacked
from barchan.rollout.task import FilesArtifact, FunctionGrader, ScriptGrader, Task


def hooks_of(trees: Sequence[Tree]) -> tuple[str, ...]:
    """Files of folders that run by themselves, by their paths in them."""
    return tuple(name for tree in trees for name, content in files_of(tree).items() if runs_by_itself(name, content))


def signs_of_artifact(task: Task, artifact: Artifact) -> tuple[Evidence, ...]:
    """What speaks against an artifact, and what of it was put back before it was graded. A function's candidate runs
    where it reaches nothing, whatever it tries: nothing is said of one.
    """
    if isinstance(task.grader, FunctionGrader) or not artifact.data:
        return ()
    spec = task.artifact
    paths = [item.path for item in task.grader.files] if isinstance(task.grader, ScriptGrader) else []
    if not isinstance(spec, FilesArtifact):
        text = artifact.data[:BYTES_MAX].decode("utf-8", "replace")
        return signs_of(artifact.kind, artifact.data) + names_grader(text, paths)
    try:
        trees = unpacked(artifact.data, spec.paths, spec.bytes_max)
        hooks, before = (
            hooks_of(trees),
            sorted({name for tree in trees for name in files_of(tree) if comes_before(name)}),
        )
        found = signs_of(artifact.kind, artifact.data) + names_grader(tar_text(artifact.data), paths)
    except (InvalidSpec, tarfile.TarError):
        return ()  # the grader has refused it, and said so
    if hooks:
        told = ", ".join(hooks)[:400]
        found += (Evidence(source=SOURCE, fact="put back: files that run by themselves", value=told),)
    if before:
        told = ", ".join(before)[:400]
        found += (Evidence(source=SOURCE, fact="sign: modules that come before Python's own", value=told),)
    return found
