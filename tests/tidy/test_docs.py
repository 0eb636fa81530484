"""The docs point at things that are there."""

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.source import ROOT, files, relative, tree

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TEST = re.compile(r"`(tests/[\w/.-]+\.py)((?:::\w+)*)`")
BENCH = re.compile(r"`python -m bench\.(\w+)[^`]*`")
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
SPEC = ROOT / "docs/spec.md"


def anchor(heading: str) -> str:
    """A heading's anchor, as the usual renderers of Markdown make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    text = FENCE.sub("", path.read_text())
    return {anchor(match) for match in re.findall(r"^#+ +(.+?)\s*$", text, re.MULTILINE)}


def dead_links(page: Path) -> list[str]:
    """Relative links of a page whose file or heading does not exist."""
    dead = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (heading and path.suffix == ".md" and heading not in anchors(path)):
            dead.append(f"{relative(page)}: {target}")
    return dead


def test_every_relative_link_resolves() -> None:
    """A link from one page to another file of the project, or to a heading, leads somewhere."""
    assert [link for page in files(".md") for link in dead_links(page)] == []


def test_a_dead_link_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing file and a missing heading are both reported; a web address and a good link are not."""
    monkeypatch.setattr("tests.tidy.test_docs.relative", lambda path: path.name)
    page = tmp_path / "page.md"
    page.write_text("# One two\n[a](page.md#one-two) [b](gone.md) [c](#nowhere) [d](https://example.org/x)\n")
    assert dead_links(page) == ["page.md: gone.md", "page.md: #nowhere"]


def defined(path: Path, names: list[str]) -> bool:
    """Whether a test file defines the class or function that `a::b` names."""
    body: list[ast.stmt] = tree(path).body
    for name in names:
        found = next((n for n in body if isinstance(n, _DEFINITIONS) and n.name == name), None)
        if found is None:
            return False
        body = found.body
    return True


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def promise_rows(page: str) -> list[str]:
    """Table rows of docs/spec.md, without headings and rules."""
    rows = [line for line in page.splitlines() if line.startswith("|")]
    return [
        row
        for row, below in zip(rows, [*rows[1:], ""], strict=True)
        if not set(row) <= set("|-: ") and not (below and set(below) <= set("|-: "))
    ]


@pytest.mark.skipif(not SPEC.exists(), reason="docs/spec.md is not written yet")
def test_every_promise_names_what_holds_it() -> None:
    """Each row of docs/spec.md names an existing test or bench, a `barchan bench` workload, a make target, or says
    pending.
    """
    wrong = []
    for row in promise_rows(SPEC.read_text()):
        tests, benches = TEST.findall(row), BENCH.findall(row)
        wrong += [f"no such bench: {name}" for name in benches if not (ROOT / "bench" / f"{name}.py").exists()]
        if not tests and not benches and not re.search(r"`(barchan (bench|rollout) |make )[^`]*`|\bpending\b", row):
            wrong.append(f"names nothing that holds it: {row}")
        for name, inner in tests:
            if not (ROOT / name).exists() or not defined(ROOT / name, inner.split("::")[1:]):
                wrong.append(f"no such test: {name}{inner}")
    assert wrong == []


def test_spec_rows_and_tests_are_read() -> None:
    """Headings and rules are no promises, and a test that does not exist is told from one that does."""
    page = "| what | held by |\n|---|---|\n| a | `tests/tidy/test_docs.py::test_spec_rows_and_tests_are_read` |\n"
    (row,) = promise_rows(page)
    ((name, inner),) = TEST.findall(row)
    assert defined(ROOT / name, inner.split("::")[1:])
    assert not defined(ROOT / name, ["test_of_another_name"])
