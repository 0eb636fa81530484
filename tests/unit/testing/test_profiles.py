"""The suite's own data: what is checked, what may be lacking, and who may lack it."""

import json
from collections import Counter

import pytest

from barchan import backends
from barchan.cli.main import main
from barchan.errors import InvalidSpec
from barchan.testing.conformance import CHECKS
from barchan.testing.profiles import LACKABLE, PROFILES, profile_of
from barchan.testing.suite import LEFTOVERS, Outcome, Report, chosen


def test_checks_can_be_told_apart() -> None:
    """Each has a name of its own, which is no area's, and says what it promises."""
    names = Counter(check.name for check in CHECKS)
    assert {name for name, count in names.items() if count > 1} == set()
    assert {check.area for check in CHECKS} & set(names) == set()
    assert LEFTOVERS not in names
    assert all(check.summary for check in CHECKS)


def test_only_what_may_be_lacking_is_needed() -> None:
    """What checks need, and what ours are listed to lack, are things that a backend may lack."""
    assert {check.needs for check in CHECKS} - {None} == set(LACKABLE)
    for profile in PROFILES.values():
        assert set(profile.lacks) <= set(LACKABLE)
        assert all(profile.lacks.values())


def test_our_profiles_are_of_our_backends() -> None:
    """No profile is left of one that is gone; what others add is checked with a patient one."""
    assert set(PROFILES) <= set(backends.BACKENDS)
    assert profile_of("container").lacks == {}
    assert profile_of("theirs", ("fork",)).lacks == {"fork": "its author says so"}
    assert profile_of("theirs").patience > profile_of("container").patience


def test_nobody_may_lack_the_rest() -> None:
    """Limits, streams and the like are no capabilities."""
    with pytest.raises(InvalidSpec, match="limits"):
        profile_of("theirs", ("limits",))


def test_checks_are_chosen_by_area_and_name() -> None:
    """Both at once, in the suite's order; what is neither is refused."""
    picked = chosen(("terminals", "an_exit_code_and_a_signal_are_told"))
    assert picked[0].name == "an_exit_code_and_a_signal_are_told"
    assert {check.area for check in picked[1:]} == {"terminals"}
    assert chosen() == CHECKS
    with pytest.raises(InvalidSpec, match="no check or area 'speed'"):
        chosen(("speed",))


def test_a_report_names_what_is_not_a_pass() -> None:
    """Counts first, then gaps and failures by their names."""

    def outcome(name: str, result: str) -> Outcome:
        return Outcome(name=name, area="x", result=result, took_s=0.0)  # type: ignore[arg-type]

    report = Report(backend="b", template="t", outcomes=(outcome("one", "passed"), outcome("two", "gap")))
    assert (report.ok, report.summary()) == (True, "b: 1 of 2 passed; gaps: two")
    for result in ("failed", "closed", "unmet"):
        worse = Report(backend="b", template="t", outcomes=(*report.outcomes, outcome("three", result)))
        assert not worse.ok
        assert worse.summary().endswith(": three")


def test_the_command_lists_checks(capsys: pytest.CaptureFixture[str]) -> None:
    """With their area and what they need; a wrong word is wrong usage, and tells of the areas."""
    assert main(["conformance", "--list", "--only", "state"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(chosen(("state",)))
    assert any(line.split() == ["state", "a_snapshot_keeps_programs", "memory"] for line in lines)
    assert main(["conformance", "--only", "speed", "--json"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["code"] == "invalid_spec"
    assert "terminals" in said.err
