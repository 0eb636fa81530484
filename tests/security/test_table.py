"""The threat model, the supervisor and these tests speak of the same switches."""

import re
from pathlib import Path

import pytest

from tests.security.test_attempts import WEAKNESSES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(10)


def rows() -> dict[int, list[str]]:
    """The cells of each numbered promise."""
    lines = (ROOT / "docs/threat-model.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+ \|", line)]
    return {int(number): rest for number, *rest in cells}


def switches() -> set[str]:
    return set(re.findall(r'\{"([a-z-]+)", &options\.\w+\},', (ROOT / "guest/supervisor/main.c").read_text()))


def test_every_promise_names_switches_that_exist() -> None:
    """And every switch of the supervisor turns off a promise."""
    named = {number: set(re.findall(r"`([a-z-]+)`", cells[2])) for number, cells in rows().items()}
    assert all(named.values())
    assert set().union(*named.values()) == switches()


def test_every_promise_names_tests_that_exist() -> None:
    """A file with a class of that name, or a program of attempts that this promise's switches are tried with."""
    for number, cells in rows().items():
        programs = {weakness.program for weakness in WEAKNESSES if weakness.promise == number}
        found = re.findall(r"program `(\w+)`|`(test_\w+\.py)(?:::(\w+))?`", cells[3])
        assert found
        for program, file, name in found:
            assert not program or program in programs
            assert not file or f"class {name}" in (Path(__file__).parent / file).read_text() or not name


def test_every_switch_is_tried() -> None:
    """Each is used by at least one test here."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tried = {switch for weakness in WEAKNESSES for switch in weakness.switches}
    tried |= {switch for switch in switches() if f'"{switch}"' in text}
    assert tried == switches()
