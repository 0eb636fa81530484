"""A grader's sandbox with the artifact in it."""

import asyncio
import posixpath
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from msgspec.structs import replace

from barchan.errors import BarchanError, Denied, GuestWrecked, NotFound, TaskError
from barchan.model.sandbox import Network, Root
from barchan.rollout.graders.base import Artifact, Grading
from barchan.rollout.integrity.imported import hooks_of
from barchan.rollout.ports import Sandbox
from barchan.rollout.tars import Tree, replaced, unpacked
from barchan.rollout.task import FileArtifact, FilesArtifact, Task
from barchan.rollout.tools.base import is_guests_doing
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.recipe import Put, Recipe

HOOK_BYTES_MAX = 1 << 20
PATCH_FILE = "/tmp/artifact.patch"  # where a patch lies for whoever grades it by a script or function


@asynccontextmanager
async def placed(
    grading: Grading,
    artifact: Artifact,
    *,
    recipe: Recipe | None = None,
    network: Network = "none",
    allow_hosts: tuple[str, ...] = (),
    root: Root = "plain",
    layers: tuple[str, ...] = (),
) -> AsyncIterator[Sandbox]:
    """A fresh sandbox that holds the artifact, ended on leaving; of a `shared` artifact the agent's own one, which is
    not.

    Raises:
        GuestWrecked: The artifact can't be put in place, by what is in it.

    Args:
        recipe: What it is made from, in place of the environment's. A `diff` has its own base.
        layers: Images whose own layers lie between that and the artifact.
    """
    if artifact.sandbox is not None:
        yield artifact.sandbox
        return
    environment = replace(
        grading.task.environment,
        recipe=recipe or grading.task.environment.recipe,
        network=network,
        allow_hosts=allow_hosts,
        root=root,
    )
    template = artifact.image or None
    if layers and template is not None:
        layers, template = (*layers, template), None
    async with grading.sandboxes.opened("grader", environment, template=template, layers=layers) as sandbox:
        try:
            await place(sandbox, artifact, grading.task)
        except BarchanError as error:
            if not is_guests_doing(error):
                raise
            raise GuestWrecked(f"the artifact can't be put in place: {error}") from error
        yield sandbox


async def place(sandbox: Sandbox, artifact: Artifact, task: Task) -> None:
    """Put an artifact where the agent had it, as the sandbox's default user, or as root where that one may not write.

    Raises:
        InvalidSpec: A tar holds what may not enter a sandbox.
    """
    spec = task.artifact
    if artifact.kind == "patch":
        await sandbox.files.write(PATCH_FILE, artifact.data)
    elif isinstance(spec, FileArtifact):
        await _write(sandbox, spec.path, artifact.data, 0o644)
    elif isinstance(spec, FilesArtifact):
        for tree in unpacked(artifact.data, spec.paths, spec.bytes_max):
            await _replace(sandbox, await _disarmed(sandbox, tree))


async def _disarmed(sandbox: Sandbox, tree: Tree) -> Tree:
    """A folder whose files that run by themselves are as the environment has them: gone, where it has none. A path that
    the task declares by itself is a tree of its own, and stays.
    """
    hooks = await asyncio.to_thread(hooks_of, (tree,))
    if not hooks:
        return tree
    files = sandbox.files.as_user("root")
    base: dict[str, bytes | None] = {}
    for name in hooks:
        path = posixpath.join(tree.path, name)
        base[name] = None
        try:
            if (await files.stat(path)).kind == "file":
                base[name] = await files.read(path, length=HOOK_BYTES_MAX)
        except BarchanError as error:
            if not is_guests_doing(error):
                raise
    return await asyncio.to_thread(replaced, tree, base)


async def _write(sandbox: Sandbox, path: str, data: bytes, mode: int) -> None:
    try:
        await sandbox.files.write(path, data, mode=mode)
    except Denied:
        await sandbox.files.as_user("root").write(path, data, mode=mode)


async def _replace(sandbox: Sandbox, tree: Tree) -> None:
    """What the environment has there goes: what the agent has removed is gone as well. A folder itself stays, since it
    may be the one that programs start in.
    """
    if not tree.is_folder:
        await clear(sandbox, tree.path)
        await _write(sandbox, tree.path, tree.data, tree.mode)
        return
    if await _is_emptied(sandbox, tree.path):
        try:
            await sandbox.files.write_tar(tree.path, tree.data)
        except Denied:
            await sandbox.files.as_user("root").write_tar(tree.path, tree.data)
        return
    await clear(sandbox, tree.path)
    files = sandbox.files
    try:
        await files.mkdir(tree.path)
    except Denied:
        files = sandbox.files.as_user("root")
        await files.mkdir(tree.path)
    await files.write_tar(tree.path, tree.data)


async def _is_emptied(sandbox: Sandbox, path: str) -> bool:
    """Remove what a folder holds; False where there is no folder."""
    for user in (None, "root"):
        files = sandbox.files.as_user(user)
        try:
            if (await files.stat(path)).kind != "directory":
                return False
            entries = await files.list(path)
        except NotFound as error:
            if "errno" not in error.details:
                raise
            return False
        except Denied:
            continue
        for entry in entries:
            await clear(sandbox, posixpath.join(path, posixpath.basename(entry.path)))
        return True
    return False


async def clear(sandbox: Sandbox, path: str) -> None:
    """Remove whatever is at a path. A sandbox's root has no rights over other users' folders, so both are tried; what
    neither may remove stays.
    """
    for user in (None, "root", None):
        try:
            await sandbox.files.as_user(user).remove(path, recursive=True)
        except NotFound as error:
            if "errno" not in error.details:
                raise
            return
        except Denied:
            continue
        return


async def put(sandbox: Sandbox, item: Put, task: Task, *, private: bool) -> None:
    """Put a grader's file or folder in place. What the agent may have left there is removed, unless the agent's working
    directory lies there.

    Args:
        private: A folder is closed to all users but its owner.
    """
    from barchan.sdk.put import put_files  # with its hashing and copying, which most graders don't need

    if (item.source is None) == (item.data is None):
        raise TaskError(f"what goes to {item.path}: give exactly one of source and data")
    where = posixpath.normpath(item.path)
    workdir = posixpath.normpath(task.environment.workdir or "/")
    if where != "/" and not f"{workdir}/".startswith(f"{where}/"):
        await clear(sandbox, item.path)
    if private and item.source is not None and await asyncio.to_thread(Path(item.source).is_dir):
        await sandbox.files.as_user(item.user).mkdir(item.path, mode=0o700)
    await put_files(cast(AsyncSandbox, sandbox), item)
