"""The tables of docs/verdicts.md, from the rules.

`python -m barchan.rollout.rules.page docs/verdicts.md` puts them in.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from barchan.rollout.rules.causes import RULES
from barchan.rollout.rules.control import DECISIONS
from barchan.rollout.rules.findings import FINDINGS

BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"
_CONTROLS = {
    "good": "gets 1 or more",
    "wrong": "gets less",
    "undecided": "has no answer either",
    "none": "there is none",
}

_UNLESS = {"undecided": "; the task's where a function of its own raises for both"}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _word(fault: str) -> str:
    return "-" if fault == "none" else fault


def tables() -> str:
    """Causes, findings in the order of their precedence, and what a control decides."""
    causes = _table(
        ("cause", "status", "fault", "reward", "truncated", "retry", "when"),
        (
            (
                f"`{cause}`",
                rule.status,
                " or ".join(_word(fault) for fault in (rule.fault, *rule.or_faults)),
                _word(rule.reward),
                "yes" if rule.truncated else "-",
                rule.retry if rule.status == "void" else "-",
                rule.meaning,
            )
            for cause, rule in RULES.items()
        ),
    )
    findings = _table(
        ("finding", "cause", "found by", "policy can cause it", "when"),
        (
            (f"`{name}`", f"`{rule.cause}`", rule.origin, "yes" if rule.is_policys else "-", rule.meaning)
            for name, rule in FINDINGS.items()
        ),
    )
    controls = _table(
        ("the known-good artifact", "the submission"),
        (
            (
                _CONTROLS[outcome],
                "is graded once more; without an answer again 0"
                if decision is None
                else f"void, the {decision}'s fault{_UNLESS.get(outcome, '')}"
                if decision != "first"
                else "void, as the grading told; the task is quarantined",
            )
            for outcome, decision in DECISIONS.items()
        ),
    )
    parts = {"Causes": causes, "Findings, in the order in which they count": findings, "Controls": controls}
    return "\n".join(f"### {name}\n\n{table}\n" for name, table in parts.items())


def put_into(page: str) -> str:
    """The page with the tables as they are now, between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(put_into(path.read_text()))
