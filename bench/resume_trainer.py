"""A trainer of `bench.resume` with generation of its own: it asks for groups, plays them, and is killed.

python -m bench.resume_trainer SOCKET FOLDER TASKS GROUP CONCURRENCY [attach]
"""

import asyncio
import sys
from pathlib import Path

import barchan
from barchan.rollout.live import AsyncRollout
from bench.resume_tasks import calls_in, sampled, tasks, think_s

NAME = "killed-trainer"
GRACE_S = 120.0


async def play(rollout: AsyncRollout) -> None:
    """To its end; what was sampled before this process is acted on, and not sampled again."""
    observation = await rollout.observe()
    while rollout.verdict is None and observation.over is None:
        if rollout.pending:
            text = rollout.pending[-1].text
        else:
            await asyncio.sleep(think_s(rollout.task.task_id, rollout.index, observation.turn))
            completion = sampled(rollout.task.task_id, rollout.index, observation)
            await rollout.record(
                model=completion.model,
                text=completion.text,
                completion_ids=completion.completion_ids,
                logprobs=completion.logprobs,
                policy_version=completion.policy_version,
            )
            text = completion.text
        observation = await rollout.act(calls_in(text))
    await rollout.finish()


async def train(socket: str, folder: Path, count: int, group: int, concurrency: int, *, attach: bool) -> None:
    turns = asyncio.Semaphore(concurrency // group)
    async with (
        barchan.connect_async(f"unix://{socket}") as client,
        client.run(NAME, out=folder, memory_mib=128, grace_s=GRACE_S, attach=attach) as run,
    ):

        async def learn(number: int) -> None:
            async with turns:
                members = await run.group(chosen[number], group, key=f"group-{number}")
                async with asyncio.TaskGroup() as playing:
                    async for rollout in members:
                        playing.create_task(play(rollout))

        chosen = tasks()[:count]
        async with asyncio.TaskGroup() as learning:
            for number in range(count):
                learning.create_task(learn(number))


def main() -> None:
    socket, folder, count, group, concurrency, *more = sys.argv[1:]
    asyncio.run(train(socket, Path(folder), int(count), int(group), int(concurrency), attach=more == ["attach"]))


if __name__ == "__main__":
    main()
