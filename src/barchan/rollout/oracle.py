"""What the known-good attempt has beside its calls: files that no other attempt may see."""

from typing import cast

from barchan.rollout.ports import Sandbox
from barchan.rollout.task import Task
from barchan.sdk.aio.sandbox import AsyncSandbox

ORACLE = "oracle"  # the policy that plays `Task.oracle`


async def put_oracle_files(sandbox: Sandbox, task: Task) -> None:
    """Put a task's `oracle_files` where its oracle's calls look for them."""
    if not task.oracle_files:
        return
    from barchan.sdk.put import put_files  # with its hashing and copying, which most rollouts don't need

    for item in task.oracle_files:
        await put_files(cast(AsyncSandbox, sandbox), item)
