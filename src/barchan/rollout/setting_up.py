"""What every attempt's sandbox has before its policy acts."""

from barchan.rollout.integrity.canary import put_canaries
from barchan.rollout.oracle import ORACLE, put_oracle_files
from barchan.rollout.ports import Log, Sandbox
from barchan.rollout.services import start_services
from barchan.rollout.task import Task


async def set_up(sandbox: Sandbox, task: Task, policy_name: str, log: Log) -> None:
    """Start the task's services, put its canaries there, and for the oracle its files. All of it can be done again.

    Args:
        log: Is told of services.

    Raises:
        TaskError: A service does not come up.
    """
    await start_services(sandbox, task.environment.services, log)
    await put_canaries(sandbox, task)
    if policy_name == ORACLE:
        await put_oracle_files(sandbox, task)
