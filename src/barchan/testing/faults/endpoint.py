"""A model's server whose answers are right in about half of the attempts, known beforehand like `HalfRight`'s."""

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from barchan.rollout.task import FunctionGrader, Task
from barchan.testing.faults.policies import is_right

MODEL = "half-right"


class HalfRightServer:
    """Answers chat completions about functions; which attempt asks, it knows by the seed of the request.

    Args:
        tasks: Those of the run, each with a function to write.
        group: Attempts at each.
        seed: The run's `--seed`.
        think_s: What an answer takes.
    """

    def __init__(self, tasks: Sequence[Task], group: int, seed: int, think_s: float = 0.2) -> None:
        self.base_url = ""
        self._think_s = think_s
        self._answers: dict[int, str] = {}
        for task in tasks:
            grader, stub = task.grader, task.stub
            if not isinstance(grader, FunctionGrader) or stub is None:
                raise TypeError(f"task {task.task_id} asks for no function")
            for sample_index in range(group):
                right = is_right(task.task_id, sample_index)
                text = grader.reference if right else f"{stub.prompt}    pass\n"
                place = f"{seed}/{task.task_id}/{sample_index}/0"  # as the policy makes a request's seed
                self._answers[zlib.crc32(place.encode()) >> 1] = f"```python\n{text}\n```"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Serve, on a free port of loopback."""
        application = web.Application()
        application.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self.base_url = f"http://{host}:{port}"
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        asked: dict[str, Any] = await request.json()
        await asyncio.sleep(self._think_s)
        text = self._answers[int(asked["seed"])]
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 1, "completion_tokens": len(text) // 4, "total_tokens": 1 + len(text) // 4}
        return web.json_response(
            {
                "id": f"answer-{asked['seed']}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": MODEL,
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": usage,
            }
        )
