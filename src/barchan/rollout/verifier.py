"""What a script grader installs, kept as an image before anything is graded, so that grading needs no network.

The command runs once in a fresh sandbox of the task's environment, with its network; the reward that it gives there is
of no interest. What it has written, but for rewards, logs and the grader's own files, becomes an image that grading
finds by its name, once what the task's oracle leaves behind was graded over it.
"""

import posixpath

from msgspec.structs import replace

from barchan.errors import NotFound, TaskError
from barchan.rollout.artifact import nothing
from barchan.rollout.graders.base import Grading
from barchan.rollout.graders.placing import clear
from barchan.rollout.graders.prepared import image_name
from barchan.rollout.graders.script import ScriptGrading
from barchan.rollout.grading import grade_oracle
from barchan.rollout.ports import NoLog, Sandbox
from barchan.rollout.sandboxes import Sandboxes, SandboxesState
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import ScriptGrader, Task
from barchan.sdk.aio.client import AsyncClient

LOGS = "/logs"


async def prepare_verifier(client: AsyncClient, task: Task, run_id: str, template: str) -> str | None:
    """Keep what a task's grader installs; None where it installs nothing. What is kept already is left as it is.

    Args:
        run_id: Begins the sandboxes' create ids: another each time.
        template: The image of a task without one of its own.

    Raises:
        TaskError: The command ran out of time. Or over what it has installed, without a network, it gives no reward, or
            less than 1 to what the oracle has made. Nothing is kept then.
    """
    spec = task.grader
    if not isinstance(spec, ScriptGrader) or not spec.installs:
        return None
    settings = RunSettings(run_id=run_id, template=template)
    sandboxes = Sandboxes(client, settings, f"{run_id}-{task.task_id}", state=SandboxesState())
    environment = replace(
        task.environment,
        recipe=spec.recipe or task.environment.recipe,
        network=spec.network,
        allow_hosts=spec.allow_hosts,
        root="capable",
    )
    name = image_name(spec, await sandboxes.template(environment))
    if await sandboxes.has_image(name):
        return name
    grading = Grading(task=task, settings=settings, sandboxes=sandboxes, log=NoLog())
    grader = ScriptGrading(spec)
    async with sandboxes.opened("grader", environment) as sandbox:
        await grader.install(sandbox, grading)
        await _clean(sandbox, spec)
        await sandbox.snapshot(name)
    try:
        if task.oracle:
            verdict = await grade_oracle(grading, f"{run_id}-{task.task_id}")
        else:
            verdict = await grader.grade(grading, nothing(task))
        if verdict.reward is None or (task.oracle and verdict.reward < 1):
            told = "; ".join(f"{item.source}: {item.fact}: {item.value}" for item in verdict.evidence)
            gives = "no reward" if verdict.reward is None else f"the oracle {verdict.reward:g}"
            raise TaskError(f"over what its verifier installs, and without a network, it gives {gives}: {told}")
    except BaseException:
        await sandboxes.remove_image(name)
        raise
    return name


async def _clean(sandbox: Sandbox, spec: ScriptGrader) -> None:
    """Take away what a run says and what it was given; the folders of logs stay."""
    for path in (spec.reward_text, spec.reward_json, *(item.path for item in spec.files)):
        await clear(sandbox, path)
    root = sandbox.files.as_user("root")
    try:
        folders = [entry for entry in await root.list(LOGS) if entry.kind == "directory"]
    except NotFound as error:
        if "errno" not in error.details:
            raise
        return
    for folder in folders:
        where = posixpath.join(LOGS, posixpath.basename(folder.path))
        for entry in await root.list(where):
            await clear(sandbox, posixpath.join(where, posixpath.basename(entry.path)))
