"""Entries of a rollout's log from which it goes on; `forward` reads them."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import asdict

from barchan.errors import BlobCorrupt, InvalidSpec, SandboxExpired, SandboxLost, TrajectoryDiverged
from barchan.model.verdict import Evidence, Verdict
from barchan.rollout.graders.base import Artifact
from barchan.rollout.ports import Log
from barchan.rollout.record import Completion
from barchan.rollout.resuming.forward import Tail
from barchan.rollout.state import AttemptState, Done
from barchan.rollout.verdict import void

ABANDONED = "abandoned"
LOST = (BlobCorrupt, SandboxExpired, SandboxLost, TrajectoryDiverged)
_LONG_BYTES = 1 << 20


def opened_body(state: AttemptState) -> dict[str, Any]:
    """The agent's sandbox, once everything in it is as the policy finds it."""
    sandboxes = state.sandboxes
    return {
        "sandbox_id": state.sandbox_id,
        "made": sandboxes.ids["agent"],
        "template": sandboxes.agent_template,
        "resources": sandboxes.resources,
        "create_s": sandboxes.create_s.get("agent", 0.0),
        "queue_s": sandboxes.queue_s,
    }


def done_body(done: Done, first_s: float | None) -> Mapping[str, Any]:
    """One call's result.

    Args:
        first_s: As of `AttemptState`, where it became known in this call.
    """
    result = done.result
    body: dict[str, Any] = {"content": result.content, "status": result.status, "truncated": result.truncated}
    if done.counts_as is not None:
        body |= {"counts_as": done.counts_as, "agent_s": done.agent_s}
    if done.over is not None:
        body["over"] = done.over
    if first_s is not None:
        body["first_s"] = first_s
    return body


async def keep_artifact(log: Log, artifact: Artifact) -> None:
    """Put an artifact on disk, from where it can be graded at any time."""
    body = {"kind": artifact.kind, "data": artifact.data, "image": artifact.image, "notes": artifact.notes}
    if len(artifact.data) > _LONG_BYTES:
        await asyncio.to_thread(log.entry, "artifact", body)
    else:
        log.entry("artifact", body)
    await log.committed()


def needs_sandbox(state: AttemptState, tail: Tail) -> bool:
    """Whether anything is left to be done in the agent's sandbox."""
    if tail.untaken is not None:
        return False
    return state.artifact is None or state.artifact.kind == "shared"


def abandoned(why: Exception, stage: str) -> Verdict:
    """The verdict on an attempt that was left by its driver, and that nobody can go on with."""
    evidence = Evidence(source="run", fact=ABANDONED, value=f"{type(why).__name__}: {why}"[:400])
    return void("caller", "abandoned", (evidence, Evidence(source="run", fact="stage", value=stage)))


def is_abandoned(verdict: Verdict) -> bool:
    """Whether an attempt ended because its driver left it, so that its place is open for the next."""
    return any((fact.source, fact.fact) == ("run", ABANDONED) for fact in verdict.evidence)


def sampled_body(completion: Completion) -> Mapping[str, Any]:
    """A model call as the trajectory log has it."""
    usage = {"prompt_tokens": completion.prompt_tokens, "completion_tokens": completion.completion_tokens}
    return {**asdict(completion), "usage": usage}


def check_completion(completion: Completion) -> None:
    """Better refused here than a line in the results that nobody can read."""
    try:
        msgspec.convert(asdict(completion), Completion)
        completion.text.encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidSpec(f"no record of a model call: {error}") from error
    if not all(map(math.isfinite, completion.logprobs)):
        raise InvalidSpec("log-probs are finite numbers")
