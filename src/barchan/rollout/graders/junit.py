"""JUnit XML: from a test runner's report to an outcome per test id. Pure.

The report comes out of a sandbox where the agent's code has run, so it is read as hostile: streamed, with no DTD (and
so no entities), within bounds. Its caller bounds the bytes.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal
from xml.parsers import expat

from msgspec import Struct

Outcome = Literal["passed", "failed", "error", "skipped", "xfailed", "missing"]
_Key = tuple[str, str]  # classname or file, and name

CASES_MAX = 500_000
DEPTH_MAX = 64
# The worst of a test's cases counts: a test whose teardown fails is in some reports twice.
_BADNESS: dict[Outcome, int] = {"passed": 0, "xfailed": 1, "skipped": 2, "missing": 3, "failed": 4, "error": 5}
_CHILDREN: dict[str, Outcome] = {"failure": "failed", "error": "error", "skipped": "skipped"}


class BadReport(ValueError):
    """It is no JUnit XML, or passes a bound."""


class Case(Struct, frozen=True, kw_only=True):
    """One `testcase` as the runner names it."""

    classname: str
    name: str
    file: str = ""
    outcome: Outcome


def parse_junit(data: bytes) -> list[Case]:
    """The cases of a report, in its order.

    Raises:
        BadReport: It is not well-formed, has a DTD, or more cases or depth than a report has.
    """
    reader = _Reader()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.StartDoctypeDeclHandler = reader.doctype
    try:
        parser.Parse(data, True)
    except BadReport:
        raise
    except (expat.ExpatError, LookupError, ValueError) as error:  # the last two: an encoding that Python has not
        raise BadReport(f"no XML: {error}") from error
    if not reader.has_suite:
        raise BadReport("no testsuite in it")
    return reader.cases


class _Reader:
    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.has_suite = False
        self._open: list[str] = []
        self._case: dict[str, str] | None = None
        self._outcome: Outcome = "passed"

    def doctype(self, *declared: object) -> None:
        raise BadReport("it has a DTD")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self._open and tag not in ("testsuites", "testsuite"):
            raise BadReport(f"its root is a {tag[:40]}")
        if len(self._open) >= DEPTH_MAX:
            raise BadReport(f"nested deeper than {DEPTH_MAX}")
        self.has_suite = self.has_suite or tag == "testsuite"
        if tag == "testcase" and self._case is None:
            if len(self.cases) >= CASES_MAX:
                raise BadReport(f"more than {CASES_MAX} cases")
            self._case, self._outcome = attributes, "passed"
        elif self._case is not None and self._open[-1] == "testcase" and tag in _CHILDREN:
            found = _CHILDREN[tag]
            if tag == "skipped" and attributes.get("type") == "pytest.xfail":
                found = "xfailed"
            self._outcome = _worse(self._outcome, found)
        self._open.append(tag)

    def end(self, tag: str) -> None:
        self._open.pop()
        if tag == "testcase" and self._case is not None and "testcase" not in self._open:
            told, self._case = self._case, None
            classname, name, file = (told.get(key, "") for key in ("classname", "name", "file"))
            self.cases.append(Case(classname=classname, name=name, file=file, outcome=self._outcome))


def _worse(one: Outcome, other: Outcome) -> Outcome:
    return max(one, other, key=_BADNESS.__getitem__)


def outcomes(cases: Iterable[Case], ids: Iterable[str]) -> dict[str, Outcome]:
    """What became of each test of `ids`, `missing` where the report does not have it.

    An id is `path::name` or `path::Class::name[parameters]`, as pytest has them; pytest's reports spell path and
    classes as one dotted `classname`. Of other runners, `file::name` and `classname::name` are found, too. An id whose
    parameters are cut off at a blank, as published rows have them, stands for every test that begins so.
    """
    wanted = {test_id: _keys(test_id) for test_id in ids}
    seen: dict[_Key, Outcome] = {}
    for case in cases:
        for place in {case.classname, case.file or case.classname}:
            key = (place, case.name)
            seen[key] = _worse(seen.get(key, "passed"), case.outcome)
    seen |= _cut(seen, {key for test_id, keys in wanted.items() if _is_cut(test_id) for key in keys} - seen.keys())
    return {test_id: next((seen[key] for key in keys if key in seen), "missing") for test_id, keys in wanted.items()}


def _keys(test_id: str) -> tuple[_Key, ...]:
    """Where a report may have a test. What is in brackets can hold anything, `::` too."""
    plain, bracket, parameters = test_id.partition("[")
    *path, name = plain.split("::")
    file, classes = path[0] if path else "", path[1:]
    name += bracket + parameters
    dotted = ".".join([file.removesuffix(".py").replace("/", "."), *classes])
    return (dotted, name), (file, "::".join([*classes, name]))


def _is_cut(test_id: str) -> bool:
    return "[" in test_id and not test_id.endswith("]")


def _cut(seen: Mapping[_Key, Outcome], keys: Collection[_Key]) -> dict[_Key, Outcome]:
    """The worst outcome of the tests that go on, after a blank, from each of `keys`."""
    lengths: dict[str, set[int]] = {}
    for place, name in keys:
        lengths.setdefault(place, set()).add(len(name))
    found: dict[_Key, Outcome] = {}
    for (place, name), outcome in seen.items():
        for length in lengths.get(place, ()):
            key = (place, name[:length])
            if key in keys and name[length : length + 1].isspace():
                found[key] = _worse(found.get(key, "passed"), outcome)
    return found


def files_of(ids: Iterable[str]) -> tuple[str, ...]:
    """The files that tests are in, each once, in the order of the ids."""
    return tuple(dict.fromkeys(test_id.partition("::")[0] for test_id in ids if "::" in test_id.partition("[")[0]))


def stable_ids(runs: Sequence[Mapping[str, Outcome]]) -> frozenset[str]:
    """The tests that ended in the same way in each of several runs of the same code; the others are flaky."""
    return frozenset(
        test_id for test_id, outcome in runs[0].items() if all(run.get(test_id) == outcome for run in runs)
    )
