"""What is done in a rollout's sandbox, on record: intended before, told after; not told where nobody knows."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from barchan.errors import BarchanError, Preempted, SandboxLost, TrajectoryDiverged, TransportError
from barchan.model.sandbox import ExecResult
from barchan.rollout.ports import Clock, Log
from barchan.rollout.resuming.operations import (
    STALLED,
    Operations,
    Recorded,
    error_body,
    raise_logged,
    require_same,
)
from barchan.sdk.aio.shell import ShellResult
from barchan.trajectory.format import Kind

T = TypeVar("T")
# Whoever gets one of these does not know what came of what was asked.
UNKNOWN = (TransportError, SandboxLost, Preempted, TrajectoryDiverged)
_DURABLE: frozenset[Kind] = frozenset({"exec", "file_write"})  # that the intent of a side effect is on disk before it


async def logged(
    log: Log,
    kind: Kind,
    args: Mapping[str, Any],
    work: Callable[[], Awaitable[T]],
    outcome: Callable[[T], Mapping[str, Any]],
    *,
    op_id: str | None = None,
) -> T:
    """Do the work between an INTENT and its RESULT. What it raises is a result, too; one that was cancelled, or whose
    answer was lost, has none, for nobody knows how far it came.
    """
    seq = log.intent(kind, args, op_id=op_id)
    if kind in _DURABLE:
        await log.committed(seq)
    return await told(log, seq, work, outcome)


async def told(log: Log, seq: int, work: Callable[[], Awaitable[T]], outcome: Callable[[T], Mapping[str, Any]]) -> T:
    """The second half of `logged`, for an intent that is in the log."""
    try:
        value = await work()
    except UNKNOWN:
        raise
    except Exception as error:
        log.result(seq, error_body(error))
        raise
    log.result(seq, outcome(value))
    return value


class Doing:
    """Operations in one sandbox, each logged, and each done once.

    Attributes:
        earlier: Those that a tool had done before.
        clock: Of the tool call that is under way.
        failure: The error by which nobody knows what came of an operation. No other begins from then on, and though a
            tool may catch it and go on as if the agent had failed, its call counts for nothing.
    """

    def __init__(self, sandbox_id: str, log: Log) -> None:
        self.earlier = Operations()
        self.sandbox_id = sandbox_id
        self.log = log
        self.clock: Clock | None = None
        self.failure: BarchanError | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """One operation: raises the `failure` that there was, or becomes it."""
        self.check()
        try:
            yield
        except UNKNOWN as error:
            self.failure = error
            raise

    def check(self) -> None:
        """Raise the `failure`, if there was one."""
        if self.failure is not None:
            raise self.failure

    def time(self) -> float:
        """Seconds of the sandbox's own time; outside of a tool call nobody counts them."""
        return self.clock.time() if self.clock is not None else 0.0

    def ended(self, result: ExecResult | ShellResult, since: float, timeout_s: float) -> Mapping[str, Any]:
        """What the log is told of a program that has ended. A time-out of the platform's making is marked, so that it
        passes for none of the agent's when it is answered from the log.

        Args:
            since: The time when it began.
        """
        stalled_s = self.clock.stalled_s if self.clock is not None else 0.0
        if result.timed_out and stalled_s > 0 and self.time() - since < timeout_s:
            return {**whole(result), STALLED: round(stalled_s, 3)}
        return whole(result)

    async def once(
        self,
        kind: Kind,
        args: Mapping[str, Any],
        work: Callable[[Recorded | None], Awaitable[T]],
        outcome: Callable[[T], Mapping[str, Any]],
        answer: Callable[[Recorded, Mapping[str, Any]], T],
        *,
        op_id: str | None = None,
    ) -> T:
        """Do it, or give what the log has of it.

        Args:
            work: Does it; given what the log has, where it has no whole result: then it is the same operation again.
            answer: The value that `outcome` was made of.
        """
        asked = {"sandbox_id": self.sandbox_id, **args}
        with self.watched():
            found = self.earlier.take(kind, asked)
            if found is None:
                return await logged(self.log, kind, asked, lambda: work(None), outcome, op_id=op_id)
            if found.result is None:
                return await told(self.log, found.seq, lambda: work(found), outcome)
            raise_logged(found.result)
            if found.is_whole:
                return answer(found, found.result)
            value = await work(found)
            require_same(found, outcome(value))
            return value


def given(members: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say something: readers take a missing one for its default."""
    return {name: value for name, value in members.items() if value}


def whole(result: ExecResult | ShellResult) -> Mapping[str, Any]:
    members = {name: getattr(result, name) for name in result.__struct_fields__}
    return {"exit_code": members.pop("exit_code"), **given(members)}
