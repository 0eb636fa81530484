"""An unmet host requirement skips with its name, and fails where it is owed: a green run must have run."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import PROBES
from tests.tidy.source import ROOT

SUITE = """
import pytest
from tests.requirements import PROBES

PROBES["unobtainium"] = lambda: "none on this planet"
PROBES["cgroup2"] = lambda: "this host has version 1"

@pytest.mark.requires("unobtainium")
def test_owed(): pass

@pytest.mark.requires("cgroup2")
def test_alternative(): pass

@pytest.mark.skipif(True, reason="just so")
def test_other(): pass
"""


def outcomes(tmp_path: Path, **env: str) -> tuple[dict[str, int], str]:
    """Run the suite above in a process of its own; what it counted, and what it said."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    clean = {name: value for name, value in os.environ.items() if name not in {"CI", "BARCHAN_MUST_RUN"}}
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, *command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
    )
    words = done.stdout.splitlines()[-1].replace(",", "").split()
    return {word: int(count) for count, word in itertools.pairwise(words) if count.isdigit()}, done.stdout


def test_an_unmet_requirement_skips_by_name(tmp_path: Path) -> None:
    """On anybody's machine the test is skipped, and the summary says what was missing."""
    counts, said = outcomes(tmp_path)
    assert counts == {"skipped": 3}
    assert "unobtainium: none on this planet" in said


def test_what_must_run_fails(tmp_path: Path) -> None:
    """A requirement named in BARCHAN_MUST_RUN is owed; others still skip."""
    counts, said = outcomes(tmp_path, BARCHAN_MUST_RUN="unobtainium")
    assert counts == {"error": 1, "skipped": 2}
    assert "requirement unobtainium must be met here: none on this planet" in said


def test_in_ci_every_skip_fails(tmp_path: Path) -> None:
    """In CI only a cgroup version that this host does not have may be skipped, since the other one is owed."""
    counts, said = outcomes(tmp_path, CI="true")
    assert counts == {"errors": 2, "skipped": 1}
    assert "in CI no test may skip. Skipped: just so" in said


def test_an_unknown_requirement_is_refused(tmp_path: Path) -> None:
    """A misspelt name in BARCHAN_MUST_RUN is an error: it would otherwise owe nothing."""
    _, said = outcomes(tmp_path, BARCHAN_MUST_RUN="unobtanium")
    assert "BARCHAN_MUST_RUN names unknown requirements: unobtanium" in said


@pytest.mark.parametrize("name", sorted(PROBES))
def test_every_probe_answers(name: str) -> None:
    """Each probe says either nothing or, in one line, what is missing."""
    answer = PROBES[name]()
    assert answer == answer.strip()
    assert "\n" not in answer
