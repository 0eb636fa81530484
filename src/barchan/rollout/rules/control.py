"""When a grading gives no answer: a known-good artifact of the task, the *control*, is graded in the same way.

A policy must gain nothing by breaking the place where it is graded, and lose nothing by a platform that breaks. Where
the control passes, the submission was the cause.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import Fault
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.rules.causes import fault_of
from barchan.rollout.rules.findings import Finding, verdict_of

Outcome = Literal["good", "wrong", "undecided", "none"]
SAME_REWARD = 1e-9
QUARANTINED = "task quarantined"

# A grading ended without an answer, be it by the artifact's doing or not: a control decides.
UNDECIDED: frozenset[Cause] = frozenset({"grader_timeout", "grader_crash", "reward_missing", "reward_malformed"})
# Control -> what becomes of a submission whose grading stays without an answer, and whose doing it is then. None: the
# submission's, which scores 0; "first": as the grading itself told.
DECISIONS: dict[Outcome, Fault | Literal["first"] | None] = {
    "good": None,
    "wrong": "task",
    "undecided": "platform",
    "none": "first",
}
# What the policy is taken to have done where the control is good.
_DOINGS: dict[Cause, Finding] = {"grader_timeout": "cpu_limit_reached"}


class Control(Struct, frozen=True, kw_only=True):
    """A known-good artifact of a task, graded as submissions are. `none`: the task has nothing to make one from."""

    outcome: Outcome
    verdict: Verdict | None = None


def control_of(verdict: Verdict) -> Control:
    """What a known-good artifact's verdict shows. Rewards above 1 are a task's own scale."""
    if verdict.reward is None:
        return Control(outcome="undecided", verdict=verdict)
    return Control(outcome="good" if verdict.reward >= 1.0 else "wrong", verdict=verdict)


def is_undecided(verdict: Verdict) -> bool:
    return verdict.status == "void" and verdict.cause in UNDECIDED


def decided(first: Verdict, control: Control, second: Verdict | None = None) -> Verdict:
    """The verdict on a submission whose grading was undecided.

    Where the known-good artifact is graded as good, the submission is the cause: it is looked at once more, so that a
    moment's stall of the host becomes no zero, and without an answer again it scores 0. Where it is not, nobody knows.
    Without a control nobody ever can: the task is quarantined.

    Args:
        second: The submission's second grading, after a good control.
    """
    told = control.verdict.evidence if control.outcome in ("wrong", "undecided") and control.verdict else ()
    facts = (Evidence(source="control", fact="known-good artifact", value=control.outcome), *told)
    if control.outcome == "none":
        facts += (Evidence(source="control", fact=QUARANTINED, value="it has no known-good artifact to compare with"),)
    decision = DECISIONS[control.outcome]
    if decision is not None or second is None:
        fault = first.fault if decision is None or decision == "first" else decision
        crashes = (first, control.verdict)  # a task's own function that fails for the known-good artifact, too
        if all(one is not None and (one.fault, one.cause) == ("task", "grader_crash") for one in crashes):
            fault = "task"
        return replace(first, fault=fault_of(first.cause, fault), evidence=first.evidence + facts)
    if not is_undecided(second):
        return replace(second, evidence=second.evidence + facts)
    is_oom = any(item.fact == "oom_killed" and item.value is True for item in first.evidence + second.evidence)
    doing = "memory_limit_reached" if is_oom else _DOINGS.get(second.cause, "guest_broke_off")
    return replace(verdict_of((doing,), second.evidence + facts), exposed=second.exposed)


def quarantined(verdict: Verdict) -> str:
    """Why no further attempt at the task should begin; empty: nothing speaks against it."""
    facts = (item for item in verdict.evidence if (item.source, item.fact) == ("control", QUARANTINED))
    return next((str(item.value) for item in facts), "")


def disagree(verdicts: Sequence[Verdict]) -> bool:
    """Whether gradings of one artifact gave different rewards; those without one say nothing here."""
    rewards = [verdict.reward for verdict in verdicts if verdict.reward is not None]
    return len(rewards) > 1 and max(rewards) - min(rewards) > SAME_REWARD


def agreed(verdicts: Sequence[Verdict], controls: Sequence[Verdict]) -> Verdict:
    """The verdict on an artifact that was graded several times.

    The first undecided grading stands, for a control to decide. Where the rewards disagree, the artifact is the cause
    if the known-good one's gradings don't, and the least of its rewards stands; else nobody knows.

    Args:
        verdicts: At least one.
        controls: As many gradings of the known-good artifact; needed only where the rewards disagree.
    """
    for verdict in verdicts:
        if verdict.reward is None:
            return verdict
    least = min(verdicts, key=lambda verdict: verdict.reward or 0.0)
    if not disagree(verdicts):
        return verdicts[0]
    rewards = ", ".join(f"{verdict.reward:g}" for verdict in verdicts)
    fact = Evidence(source="repeats", fact="rewards that disagree", value=rewards)
    is_stable = (
        len(controls) > 1 and all(control_of(one).outcome == "good" for one in controls) and not disagree(controls)
    )
    if is_stable:
        return replace(least, evidence=(*least.evidence, fact))
    evidence = (*least.evidence, fact, Evidence(source="control", fact="known-good artifact", value="unstable"))
    return replace(verdict_of(("gradings_disagree",), evidence), exposed=least.exposed)
