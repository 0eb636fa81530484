"""One line of `rollouts.jsonl`."""

from typing import Literal

from msgspec import Struct

from barchan.model.verdict import Verdict

ArtifactKind = Literal["file", "patch", "files", "diff", "shared"]


class Completion(Struct, frozen=True, kw_only=True):
    """One model call, kept for training: what was sampled and how likely the sampler found it.

    `tokens`, `completion_ids` and `logprobs` run in parallel where the server gave them, and are empty where it did
    not. `wait_ms`: from asking for the completion to having it, where the driver says so.
    """

    model: str = ""
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    completion_ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    logprobs: tuple[float, ...] = ()
    policy_version: str | int | None = None
    requests: int = 1
    wait_ms: float | None = None


class Timings(Struct, frozen=True, kw_only=True):
    """Where a rollout's time went, in milliseconds of wall time; None for a stage it did not reach.

    Attributes:
        queue_ms: Waiting because the node had no room (refused creates and the waits between them), for both
            sandboxes.
        setup_ms: Making the environment's image, where it is not there yet, and waiting for its services.
        create_ms: The create call of the agent's sandbox that succeeded.
        policy_ms: Waiting for the policy: from each observation to the action that follows it.
        exec_ms: Carrying its actions out in the agent's sandbox, and taking the artifact out.
        grade_queue_ms: Waiting for a free grader.
        grade_ms: Grading, from asking for the grader's sandbox to its end; its `queue_ms` excluded.
        ttfi_ms: Time to first instruction: from the create call to the first program's start in the new sandbox,
            without the policy's time between. Read as create_ms + (round trip of the first exec - its run time by the
            guest's clock), so it includes the way of the result back and is an upper bound.
    """

    queue_ms: float | None = None
    setup_ms: float | None = None
    create_ms: float | None = None
    policy_ms: float | None = None
    exec_ms: float | None = None
    grade_queue_ms: float | None = None
    grade_ms: float | None = None
    total_ms: float | None = None
    ttfi_ms: float | None = None


class Resources(Struct, frozen=True, kw_only=True):
    """What the agent's sandbox could use. None: as the node has it.

    Attributes:
        memory_mib: Declared.
        memory_limit_mib: Enforced: beyond it the kernel kills, which is the policy's doing.
    """

    memory_mib: int
    memory_limit_mib: int
    pids_max: int
    cpus: float | None = None
    disk_mib: int | None = None


STAGES = ("queue", "setup", "create", "policy", "exec", "grade_queue", "grade", "total")


class RolloutRecord(Struct, frozen=True, kw_only=True):
    """One attempt: which, what became of it, on what evidence, and where its time went.

    Attributes:
        group_index: The task's place in the run; `sample_index` is the attempt's place in its group.
        attempt: How often this place in the group was tried before.
        turns: Turns taken.
        tool_calls: Calls by the tool's name; those of tools that are not there count as `(unknown)`.
        malformed_calls: Calls that could not be carried out as they were made.
        agent_s: The time that the agent's own programs took.
        resources: None where no sandbox was asked for.
        artifact: The text of a file or patch, and the image's name of a `diff`; a tar is kept beside the record.
        artifact_kind: As the task's artifact is tagged; None where nothing left the sandbox.
        head_hash: Of the trajectory log's last entry, so that a log which was cut short shows.
        completions: The model calls, in their order.
    """

    run_id: str
    rollout_id: str
    task_id: str
    sample_index: int
    group_index: int = 0
    attempt: int = 0
    policy: str
    verdict: Verdict
    timings: Timings
    started_unix_s: float
    agent_sandbox_id: str | None = None
    grader_sandbox_ids: tuple[str, ...] = ()
    turns: int = 0
    tool_calls: dict[str, int] = {}
    malformed_calls: int = 0
    agent_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    resources: Resources | None = None
    artifact: str | None = None
    artifact_kind: ArtifactKind | None = None
    head_hash: str = ""
    completions: tuple[Completion, ...] = ()
