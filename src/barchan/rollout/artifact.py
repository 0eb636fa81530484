"""What leaves the agent's sandbox. It is read by the platform; where it can't be read because of what the policy did,
that is the policy's zero, with the reason as evidence.
"""

import asyncio
import posixpath
import tarfile

from barchan.errors import BarchanError, GuestError, NotFound, QuotaExceeded, TaskError
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout import patching
from barchan.rollout.graders.base import Artifact
from barchan.rollout.ports import Sandbox
from barchan.rollout.tars import Tree, packed
from barchan.rollout.task import DiffArtifact, FileArtifact, FilesArtifact, PatchArtifact, SharedArtifact, Task
from barchan.rollout.tools.base import Workspace, in_time, is_guests_doing
from barchan.rollout.verdict import TRUNCATING, scored

TOO_LARGE = "larger than bytes"
READ_TIMEOUT_S = 120.0


async def take(workspace: Workspace, task: Task, image: str) -> Artifact | Evidence:
    """The artifact, or why there is none. What the platform fails to do is raised.

    Args:
        image: Name for the image that a `diff` becomes.
    """
    spec, sandbox = task.artifact, workspace.sandbox
    try:
        if isinstance(spec, FileArtifact):
            return await in_time(_file(sandbox, spec), READ_TIMEOUT_S)
        if isinstance(spec, PatchArtifact):
            return await _patch(sandbox, spec)
        if isinstance(spec, FilesArtifact):
            return await in_time(_files(sandbox, spec), READ_TIMEOUT_S)
        if isinstance(spec, DiffArtifact):
            return Artifact(kind="diff", image=(await sandbox.snapshot(image)).name)
        return Artifact(kind="shared", sandbox=sandbox)
    except BarchanError as error:
        # A snapshot is all the platform's work, on the platform's images: it says itself what is the guest's doing.
        is_operation = not isinstance(spec, DiffArtifact)
        if not isinstance(error, GuestError) and not (is_operation and is_guests_doing(error)):
            raise
        return Evidence(source=f"artifact: {type(error).__name__}", fact="not readable", value=str(error)[:400])


def nothing(task: Task) -> Artifact:
    """What an attempt has left that did nothing, where the grader can be given that."""
    if isinstance(task.artifact, FilesArtifact):
        return Artifact(kind="files", data=packed([])[0])
    if isinstance(task.artifact, DiffArtifact | SharedArtifact):
        return Artifact(kind="diff")
    return Artifact(kind="file" if isinstance(task.artifact, FileArtifact) else "patch")


async def _file(sandbox: Sandbox, spec: FileArtifact) -> Artifact | Evidence:
    """The reader takes regular files only, and one byte more than is allowed, to see whether there is more."""
    data = await sandbox.files.read(spec.path, length=spec.bytes_max + 1)
    if len(data) > spec.bytes_max:
        return _too_large(spec.bytes_max)
    return Artifact(kind="file", data=data) if data.strip() else _empty(len(data))


async def _patch(sandbox: Sandbox, spec: PatchArtifact) -> Artifact | Evidence:
    result = await patching.diff(sandbox, spec)
    if result.timed_out or result.oom_killed or result.exit_code:
        how = "timed out" if result.timed_out else "out of memory" if result.oom_killed else f"exit {result.exit_code}"
        return Evidence(source="artifact: git", fact="no patch", value=f"{how}: {result.error_text.strip()[-400:]}")
    if result.stdout_bytes > spec.bytes_max or result.truncated:
        return _too_large(spec.bytes_max)
    notes: tuple[Evidence, ...] = ()
    if result.stderr.strip():
        notes = (Evidence(source="artifact: git", fact="said", value=result.error_text.strip()[-400:]),)
    return Artifact(kind="patch", data=result.stdout, notes=notes) if result.stdout.strip() else _empty(0)


async def _files(sandbox: Sandbox, spec: FilesArtifact) -> Artifact | Evidence:
    left, trees, notes = spec.bytes_max, [], []
    for path in spec.paths:
        try:
            tree = await _tree(sandbox, path, left)
        except QuotaExceeded as error:
            if "errno" in error.details:  # the guest's own disk
                raise
            return _too_large(spec.bytes_max)
        except NotFound as error:
            if "errno" not in error.details:  # not of a file
                raise
            notes.append(Evidence(source="artifact", fact="missing", value=path))
            continue
        if tree is None:
            notes.append(Evidence(source="artifact", fact="neither file nor folder", value=path))
            continue
        trees.append(tree)
        left -= len(tree.data)
    if not trees:
        return Evidence(
            source="artifact", fact="none of the declared paths is there", value=", ".join(spec.paths)[:400]
        )
    try:
        data, dropped = await asyncio.to_thread(packed, trees)
    except tarfile.TarError as error:
        return Evidence(source="artifact", fact="no proper tar", value=str(error)[:400])
    if dropped:
        notes.append(Evidence(source="artifact", fact="left out", value=", ".join(dropped)[:400]))
    return Artifact(kind="files", data=data, notes=tuple(notes))


async def _tree(sandbox: Sandbox, path: str, bytes_max: int) -> Tree | None:
    if not path.strip("/"):
        raise TaskError("an artifact of files is not the whole file system: declare a diff")
    found = await sandbox.files.stat(path)
    if found.kind == "directory":
        return Tree(path=path, is_folder=True, data=await sandbox.files.read_tar(path, max_bytes=bytes_max))
    if found.kind != "file":
        return None
    data = await sandbox.files.read(path, length=bytes_max + 1)
    if len(data) > bytes_max:
        raise QuotaExceeded(f"{posixpath.basename(path)} is larger than {bytes_max} bytes")
    return Tree(path=path, is_folder=False, data=data, mode=found.mode)


def _too_large(bytes_max: int) -> Evidence:
    return Evidence(source="artifact", fact=TOO_LARGE, value=bytes_max)


def _empty(size: int) -> Evidence:
    return Evidence(source="artifact", fact="empty, of bytes", value=size)


def ungraded(why: Evidence, ended: Cause) -> Verdict:
    """The verdict on an attempt that left no artifact: zero."""
    if why.fact == TOO_LARGE:
        return scored(0.0, "output_limit", True, (why,))
    return scored(0.0, ended, ended in TRUNCATING, (why,))


def text_of(artifact: Artifact) -> str | None:
    """The artifact as a record holds it; None for what is no text."""
    if artifact.kind in ("file", "patch"):
        return artifact.data.decode("utf-8", "replace")
    return artifact.image or None
