"""Grades by a trusted function of the caller's, in the caller's process.

What the function does wrong is the task's fault, for it is no code of the policy's. A function that takes too long is
given up; one that runs in a thread can't be killed, and keeps that thread until it returns or the process ends, which
it does not hold up.
"""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from barchan.errors import BarchanError, InvalidSpec, TaskError
from barchan.model.verdict import Evidence, Verdict
from barchan.rollout.graders.base import Artifact, Grading
from barchan.rollout.graders.placing import placed
from barchan.rollout.graders.reward import reward_of
from barchan.rollout.imports import load_function
from barchan.rollout.task import PythonGrader
from barchan.rollout.verdict import scored, void

END_WAIT_S = 5.0  # for an async function that was cancelled to end


class Ended(NamedTuple):
    """How a call ended: one of the two."""

    value: object = None
    error: BaseException | None = None


class PythonGrading:
    """Calls the function of a `PythonGrader`.

    Raises:
        TaskError: There is no such function, or it is to work in a sandbox and is not async.
    """

    def __init__(self, spec: PythonGrader) -> None:
        self._spec = spec
        self._source = f"grader {spec.function}"
        try:
            self._function = load_function(spec.function, "grader")
        except InvalidSpec as error:
            raise TaskError(str(error)) from error
        if spec.sandbox and not inspect.iscoroutinefunction(self._function):
            raise TaskError(f"{self._source}: it has to be async to work in a sandbox")

    async def grade(self, grading: Grading, artifact: Artifact) -> Verdict:
        if not self._spec.sandbox:
            return await self._call(grading.task, artifact)
        async with placed(grading, artifact) as sandbox:
            verdict = await self._call(grading.task, artifact, sandbox)
        return replace(verdict, exposed=artifact.kind in ("diff", "shared"))

    async def _call(self, *arguments: object) -> Verdict:
        ended = await bounded(self._function, arguments, self._spec.timeout_s)
        if ended is None:
            seconds = Evidence(source=self._source, fact="not ended after seconds", value=self._spec.timeout_s)
            return void("task", "grader_timeout", (seconds,))
        if isinstance(ended.error, BarchanError) and ended.error.fault == "platform":
            raise ended.error
        if ended.error is not None:
            return self._crashed("raised", f"{type(ended.error).__name__}: {ended.error}", _place(ended.error))
        try:
            reward, metrics = reward_of(ended.value)
        except ValueError as error:
            return self._crashed("gave no reward", str(error), "")
        return scored(reward, "completed", False, ()).with_metrics(metrics)

    def _crashed(self, fact: str, message: str, place: str) -> Verdict:
        told = {fact: message, "at": place}
        return void(
            "task",
            "grader_crash",
            tuple(Evidence(source=self._source, fact=name, value=text[:400]) for name, text in told.items() if text),
        )


async def bounded(function: Callable[..., Any], arguments: tuple[object, ...], timeout_s: float) -> Ended | None:
    """Call a function, async ones in this loop and others in a thread of their own; None when it takes too long."""
    call: Awaitable[Ended]
    if inspect.iscoroutinefunction(function):
        call = _awaited(function, arguments)
    else:
        call = _in_thread(function, arguments)
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        return task.result() if done else None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=END_WAIT_S)


async def _awaited(function: Callable[..., Awaitable[object]], arguments: tuple[object, ...]) -> Ended:
    try:
        return Ended(value=await function(*arguments))
    except Exception as error:
        return Ended(error=error)


async def _in_thread(function: Callable[..., object], arguments: tuple[object, ...]) -> Ended:
    """A daemon thread, and none of a pool's: a pool waits for its threads when the process ends."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Ended] = loop.create_future()

    def settle(ended: Ended) -> None:
        if not answer.done():
            answer.set_result(ended)

    def work() -> None:
        try:
            ended = Ended(value=function(*arguments))
        except BaseException as error:  # SystemExit as well: it would end this thread only, and nobody would know
            ended = Ended(error=error)
        try:
            loop.call_soon_threadsafe(settle, ended)
        except RuntimeError:
            return  # the loop is closed: nobody waits for this any more

    threading.Thread(target=work, name="grader", daemon=True).start()
    ended = await answer
    if inspect.isawaitable(ended.value):
        value = ended.value

        async def wait() -> object:
            return await value

        return await _awaited(wait, ())
    return ended


def _place(error: BaseException) -> str:
    """Where it was raised: the last lines of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " <- ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in reversed(frames))
