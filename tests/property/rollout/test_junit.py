"""Hostile reports: whatever the bytes, the reader answers with cases or with one error, and gives no credit."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.rollout.graders.junit import BadReport, Case, outcomes, parse_junit

pytestmark = pytest.mark.timeout(300)

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=12)
PIECES = st.sampled_from(
    [
        b"<testsuite>",
        b"</testsuite>",
        b"<testcase name='x' classname='t'>",
        b"<testcase name='x' classname='t'/>",
        b"</testcase>",
        b"<failure/>",
        b"<skipped",
        b"<!DOCTYPE a [<!ENTITY e 'x'>]>",
        b"&e;",
        b"&#0;",
        b"<![CDATA[",
        b"]]>",
        b"<!--",
        b"<?xml version='1.0' encoding='utf-16'?>",
        b"<?xml version='1.0' encoding='cp037'?>",
        b"\xff",
        b"\x00",
        b" ",
    ]
)
WORD = re.compile(r"[^\[\]:./\s]+")


@given(st.one_of(st.binary(max_size=200), st.lists(PIECES, max_size=30).map(b"".join)))
def test_any_bytes(data: bytes) -> None:
    """No other exception than BadReport, and each case was spelled out."""
    try:
        cases = parse_junit(data)
    except BadReport:
        return
    assert len(cases) <= data.count(b"testcase")


@given(st.lists(st.tuples(NAMES, NAMES, st.sampled_from(["", "failure", "error", "skipped"])), max_size=8))
def test_what_a_writer_wrote_is_read(written: list[tuple[str, str, str]]) -> None:
    """Names come back as they were, whatever characters they have; an ending other than a pass is never one."""
    root = ElementTree.Element("testsuite")
    for classname, name, ending in written:
        case = ElementTree.SubElement(root, "testcase", classname=classname, name=name)
        if ending:
            ElementTree.SubElement(case, ending, message=name).text = classname
    ended = {"": "passed", "failure": "failed", "error": "error", "skipped": "skipped"}
    expected = [(classname, name, ended[ending]) for classname, name, ending in written]
    assert [(c.classname, c.name, c.outcome) for c in parse_junit(ElementTree.tostring(root))] == expected


@given(
    st.lists(st.from_regex(WORD, fullmatch=True), min_size=1, max_size=3),
    st.lists(st.from_regex(WORD, fullmatch=True), max_size=2),
    st.from_regex(WORD, fullmatch=True),
    st.none() | st.text(max_size=10),
)
def test_pytests_own_spelling(path: list[str], classes: list[str], name: str, parameters: str | None) -> None:
    """An id is found under the name that pytest's rule gives it in a report, whatever its parameters hold."""
    brackets = "" if parameters is None else f"[{parameters}]"
    test_id = "::".join(["/".join(path) + ".py", *classes, name]) + brackets
    case = Case(classname=".".join([*path, *classes]), name=name + brackets, outcome="passed")
    assert outcomes([case], [test_id]) == {test_id: "passed"}
