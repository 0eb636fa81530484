"""The synchronous faces of a run, its groups and rollouts: each call runs its native twin on the SDK's own loop."""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from barchan.model.verdict import Cause, Verdict
from barchan.rollout.calls import Observation, ToolCall
from barchan.rollout.group import AsyncGroup
from barchan.rollout.live import AsyncRollout
from barchan.rollout.record import Completion
from barchan.rollout.run import AsyncRun
from barchan.rollout.task import Task
from barchan.sdk.background import iterate, run


class Run:
    """A run of this process, made by `client.run()`: enter it, ask for groups, and leave it, which ends its sandboxes.

    Every process that enters a run has a lease of its own, held by the SDK's own thread: when the process is killed,
    its sandboxes end after the lease's grace time, and no other's. It pickles; whoever unpickles it holds the same
    lease, too, and need not enter it.
    """

    def __init__(self, twin: AsyncRun) -> None:
        self._twin = twin

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._twin,)

    @property
    def name(self) -> str:
        return self._twin.name

    @property
    def lease_id(self) -> str:
        """The lease that this process holds.

        Raises:
            LocalProtocolError: The run was not entered.
        """
        return self._twin.lease_id

    def __enter__(self) -> Self:
        run(self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self._twin.__aexit__(kind, error, trace))

    def group(self, task: Task, n: int, *, key: str) -> "Group":
        """`n` attempts at a task. Its environment is made first, once, whoever else asks for it; then its members start
        from that same state, and come out of the iteration as they are ready.

        Asking again for the key gives the same group, also in another process: the same sandboxes, verdicts that are
        there already (where the run has a folder), and for a member whose driver was killed the next attempt.

        Raises:
            Conflict: The key was used for another task or size.
            TaskError, NotFound: The environment can't be made.
            RunStopped: Too many of this process's latest rollouts were void; it says what these have in common.
        """
        return Group(run(self._twin.group(task, n, key=key)))

    def rollout(self, rollout_id: str) -> "Rollout":
        """A rollout of this run by its id, wherever it was driven before; from then on it goes on here, where its log
        leaves it: what its driver was killed in the middle of is finished first.

        One that nobody can go on with, since its sandbox has ended and can't be made again, is over and void.

        Raises:
            NotFound: The run has no such rollout, or no folder to find it in.
        """
        return Rollout(run(self._twin.rollout(rollout_id)))

    def rollouts(self) -> "list[Rollout]":
        """All of this run that are not over, by their ids; each is taken over from whoever had it, as by `rollout`.

        Raises:
            NotFound: The run has no folder to find them in.
        """
        return [Rollout(twin) for twin in run(self._twin.rollouts())]


class Group:
    """Iterate over it for its rollouts, in the order in which they are ready; each iteration gives all of them.

    A member that can't start is over and void. Leaving the iteration early ends nothing: `cancel` does.
    """

    def __init__(self, twin: AsyncGroup) -> None:
        self._twin = twin
        self.name = twin.name
        self.key = twin.key
        self.task = twin.task
        self.n = twin.n

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.key!r}, n={self.n})"

    def __iter__(self) -> "Iterator[Rollout]":
        return map(Rollout, iterate(self._twin.__aiter__()))

    def cancel(self, reason: Literal["user", "stale", "surplus"] = "user") -> None:
        """Give every member up that is not over yet."""
        run(self._twin.cancel(reason))


class Rollout:
    """One attempt of a group: observe it, act in it, record what was sampled, finish it. Given by a group or a run.

    One call at a time. It pickles between two calls, and goes on in the process that it is sent to; from that process's
    first call on, this one's calls raise `Conflict`, where the run has a folder.

    Attributes:
        index: Its place in the group; `attempt` says how often that was tried before.
    """

    def __init__(self, twin: AsyncRollout) -> None:
        self._twin = twin
        self.rollout_id = twin.rollout_id
        self.task = twin.task
        self.index = twin.index
        self.attempt = twin.attempt

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rollout_id!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._twin,)

    @property
    def verdict(self) -> Verdict | None:
        """None while it is not over."""
        return self._twin.verdict

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process goes on with it, as far as the run's folder tells."""
        return self._twin.is_elsewhere

    @property
    def pending(self) -> tuple[Completion, ...]:
        """Model calls that were recorded and not acted on yet: whoever goes on with it need not sample them again."""
        return self._twin.pending

    @property
    def is_resumed(self) -> bool:
        """Whether it went on here where its log had left it."""
        return self._twin.is_resumed

    @property
    def sandbox_id(self) -> str | None:
        """The agent's sandbox, while it lives."""
        return self._twin.sandbox_id

    def observe(self) -> Observation:
        """What a policy knows before its next turn: messages, tool schemas, limits left."""
        return run(self._twin.observe())

    def record(
        self,
        *,
        text: str = "",
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        policy_version: str | int | None = None,
        **more: Any,
    ) -> None:
        """Keep a model call; its text is said in the next turn, its completion tokens count towards the limit.

        Args:
            more: What else `barchan.rollout.record.Completion` has.

        Raises:
            InvalidSpec: Ids and log-probs of different lengths.
            Conflict: The rollout has ended, or goes on in another process.
        """
        run(
            self._twin.record(
                text=text,
                prompt_ids=prompt_ids,
                completion_ids=completion_ids,
                logprobs=logprobs,
                policy_version=policy_version,
                **more,
            )
        )

    def act(self, tool_calls: Sequence[ToolCall | Mapping[str, Any]], *, timeout_s: float | None = None) -> Observation:
        """Take a turn: carry the calls out, one after the other. One that can't be carried out is told, not raised.

        Args:
            tool_calls: Ours, or as a chat completion's message has them.
            timeout_s: For each call, within what the task allows.

        Raises:
            Conflict: The rollout is over, as the last observation said, or goes on in another process.
        """
        return run(self._twin.act(tool_calls, timeout_s=timeout_s))

    def finish(self, cause: Cause | None = None) -> Verdict:
        """Take the artifact out, end the agent's sandbox, grade elsewhere. Repeating gives the same verdict."""
        return run(self._twin.finish(cause))

    def fail(self, error: Exception) -> Verdict:
        """The driver can't go on: void, by the model's fault for a `ModelError`, else by the caller's."""
        return run(self._twin.fail(error))

    def cancel(self, reason: Literal["user", "stale", "surplus"] = "user") -> Verdict:
        """Give the rollout up; its sandbox is ended."""
        return run(self._twin.cancel(reason))
