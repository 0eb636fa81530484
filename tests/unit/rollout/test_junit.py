"""Reports of test runners: which outcome each test id has, and what is no report."""

from pathlib import Path

import pytest

from barchan.rollout.graders import junit
from barchan.rollout.graders.junit import BadReport, Case, files_of, outcomes, parse_junit, stable_ids

pytestmark = pytest.mark.timeout(60)

# Written by pytest 9.2.0 (junit_family=xunit2) about tests that end in every way there is.
PYTEST = (Path(__file__).parent / "pytest-9.2.0.junit.xml").read_bytes()
IDS = {
    "tests/test_a.py::test_plain": "passed",
    "tests/test_a.py::TestThing::TestInner::test_deep[a/b.py::x]": "passed",
    "tests/test_a.py::test_wrong": "failed",
    "tests/test_a.py::test_strict": "failed",
    "tests/test_a.py::test_setup": "error",
    "tests/test_a.py::test_skip": "skipped",
    "tests/test_a.py::test_xfail": "xfailed",
    "tests/test_a.py::test_param[a b]": "passed",
    "tests/test_a.py::test_gone": "missing",
    "tests/test_b.py::test_plain": "missing",
    "tests/test_a.py::TestThing::test_plain": "missing",
}


def case(classname: str, name: str, outcome: junit.Outcome = "passed", file: str = "") -> Case:
    return Case(classname=classname, name=name, outcome=outcome, file=file)


def test_outcomes_by_pytest_id() -> None:
    """Each way a test can end, of functions, nested classes and parameters that look like paths."""
    assert outcomes(parse_junit(PYTEST), IDS) == IDS


def test_an_id_cut_at_a_blank_stands_for_all_that_begin_so() -> None:
    """Published rows have ids that end inside their parameters; the worst of the tests meant counts."""
    cut = "tests/test_a.py::test_param[a"
    assert outcomes(parse_junit(PYTEST), [cut]) == {cut: "passed"}
    cases = [*parse_junit(PYTEST), case("tests.test_a", "test_param[a d]", "failed"), case("other", "test_param[a e]")]
    assert outcomes(cases, [cut, "tests/test_a.py::test_para"]) == {
        cut: "failed",
        "tests/test_a.py::test_para": "missing",
    }
    assert outcomes([case("tests.test_a", "test_param[ab]")], [cut]) == {cut: "missing"}


def test_the_worst_of_a_tests_cases_counts() -> None:
    """A test that is in the report twice has passed only if both have."""
    twice = [case("t", "x", "failed"), case("t", "x", "passed")]
    for cases in (twice, twice[::-1]):
        assert outcomes(cases, ["t.py::x"]) == {"t.py::x": "failed"}


def test_other_runners() -> None:
    """A file's name in the report, or a class's as it is, name a test as well."""
    cases = [case("suite A", "adds", file="src/a.test.js"), case("pkg.mod.Case", "test_x", "error")]
    told = outcomes(cases, ["src/a.test.js::adds", "suite A::adds", "pkg.mod.Case::test_x", "adds"])
    assert list(told.values()) == ["passed", "passed", "error", "missing"]


def test_the_same_name_in_another_class_is_another_test() -> None:
    """A test that did not run gets no credit from a namesake in its file."""
    told = outcomes([case("t.TestB", "x", file="t.py")], ["t.py::TestA::x", "t.py::TestB::x"])
    assert told == {"t.py::TestA::x": "missing", "t.py::TestB::x": "passed"}


BOMB = b"""<!DOCTYPE testsuite [<!ENTITY a "aaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;">]>
<testsuite><testcase classname="&b;" name="x"/></testsuite>"""
FILE = b"""<!DOCTYPE testsuite [<!ENTITY a SYSTEM "file:///etc/passwd">]>
<testsuite><testcase name="&a;"/></testsuite>"""


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no XML"),
        (b"PASSED tests/test_a.py::test_plain\n", "no XML"),
        (PYTEST[:-30], "no XML"),
        (PYTEST + PYTEST, "no XML"),
        (b"\xff\xfe<testsuite", "no XML"),
        (b'<?xml version="1.0" encoding="no-such"?><testsuite/>', "no XML"),
        (b'<?xml version="1.0" encoding="idna"?><testsuite/>', "no XML"),
        (b"<html><testsuite/></html>", "its root is a html"),
        (b"<testsuites/>", "no testsuite"),
        (BOMB, "DTD"),
        (FILE, "DTD"),
        (b"<testsuite>" * 100 + b"</testsuite>" * 100, "nested deeper"),
    ],
)
def test_what_is_no_report(data: bytes, why: str) -> None:
    """Text, cut or doubled reports, strange encodings, entities and depth are refused, saying why."""
    with pytest.raises(BadReport, match=why):
        parse_junit(data)


def test_more_cases_than_a_report_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of cases is bounded."""
    monkeypatch.setattr(junit, "CASES_MAX", 8)
    with pytest.raises(BadReport, match="more than 8 cases"):
        parse_junit(PYTEST)


def test_a_case_inside_a_case_is_none() -> None:
    """Only what a runner itself writes is a case: nothing that a test's output could hold."""
    data = (
        b"<testsuite><testcase name='a'><system-out><testcase name='b'/><failure/></system-out></testcase></testsuite>"
    )
    assert parse_junit(data) == [case("", "a")]


def test_files_of_ids() -> None:
    """Each file once, in order; an id without a file has none."""
    ids = ["b/t.py::x", "a.py::T::y[p::q]", "b/t.py::z", "alone", "alone[a::b]"]
    assert files_of(ids) == ("b/t.py", "a.py")


def test_stable_ids() -> None:
    """A test is stable when it ended alike in every run, whatever the end; missing from one run is not alike."""
    runs: list[dict[str, junit.Outcome]] = [
        {"a": "passed", "b": "passed", "c": "failed", "d": "passed"},
        {"a": "passed", "b": "failed", "c": "failed"},
    ]
    assert stable_ids(runs) == {"a", "c"}
    assert stable_ids(runs[:1]) == {"a", "b", "c", "d"}
