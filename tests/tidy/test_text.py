"""What must not stand in the source: unfinished work, one machine's paths, hidden settings, tests without a promise."""

import ast
import re
from pathlib import Path

import pytest

from tests.tidy.source import PACKAGE, ROOT, files, relative, tree

TEXT = (".py", ".c", ".h", ".sh", ".md", ".toml", "")
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
# A folder of whoever checked this out, or a package host: true on one machine only.
LOCAL = re.compile(
    r"(?<![\w.])/(?:work/(?:main|shared|\.)|Users/|opt/(?:wheels|pypi))"
    r"|\b(?:pypi\.org|pythonhosted\.org|deb\.debian\.org|registry\.npmjs\.org)"
    rf"|{re.escape(str(ROOT))}/\w"
)
# Only what a person starts reads the environment: everything else takes arguments.
ENVIRONMENT_READERS = (
    PACKAGE / "cli",
    PACKAGE / "rollout" / "graders" / "judge.py",  # a task names its judge's key, which must be in no file
    PACKAGE / "sdk" / "endpoint.py",  # where the user's own node is: a program finds the one that commands use
    PACKAGE / "backends" / "container" / "interpreter.py",  # a program of the guest, which gives others theirs
    PACKAGE / "backends" / "function" / "keeper.py",  # likewise
    ROOT / "tests",
    ROOT / "scripts",
    ROOT / "hatch_build.py",
)


def lines_matching(pattern: re.Pattern[str]) -> list[str]:
    """Every match in the project's text files, as `file:line: text`."""
    return [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in files(*TEXT)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]


def test_nothing_is_left_unfinished() -> None:
    """No marker of unfinished work: what is missing is an issue, not a comment."""
    assert lines_matching(UNFINISHED) == []


def test_no_path_of_one_machine() -> None:
    """No checkout path and no package host: the project runs wherever it is cloned."""
    assert [line for line in lines_matching(LOCAL) if not line.startswith("tests/tidy/test_text.py")] == []


def reads_environment(module: ast.Module) -> list[int]:
    """Lines that touch `os.environ`, `os.getenv` or their imported names.

    `{**os.environ, ...}` is left out: that hands the environment on to a child whole and depends on none of it.
    """
    handed_on = {
        id(value)
        for node in ast.walk(module)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if key is None
    }
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "getenvb"}:
            if isinstance(node.value, ast.Name) and node.value.id == "os" and id(node) not in handed_on:
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [node.lineno for alias in node.names if alias.name.startswith(("environ", "getenv"))]
    return found


def test_environment_is_read_at_the_top_only() -> None:
    """Settings are arguments; variables are read in cli/, in `__main__` files, in tests and in the build."""
    wrong = [
        f"{relative(path)}:{line}"
        for path in files(".py")
        if path.name != "__main__.py" and not any(path.is_relative_to(reader) for reader in ENVIRONMENT_READERS)
        for line in reads_environment(tree(path))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os\nos.environ['A']", [2]),
        ("import os\nx = os.getenv('A')", [2]),
        ("from os import environ", [1]),
        ("import os\nx = dict(os.environ)", [2]),
        ("environ = {}\nenviron['A']", []),
        ("import os\nx = {**os.environ, 'A': '1'}", []),
    ],
)
def test_every_way_to_read_the_environment_is_seen(text: str, expected: list[int]) -> None:
    """The reader knows the forms in which a variable can be read."""
    assert reads_environment(ast.parse(text)) == expected


def is_test_file(path: Path) -> bool:
    return path.is_relative_to(ROOT / "tests") or path.is_relative_to(PACKAGE / "testing")


def test_every_test_states_the_behaviour() -> None:
    """Each test has a docstring: what it promises, in words."""
    wrong = [
        f"{relative(path)}:{node.lineno}: {node.name}"
        for path in files(".py")
        if is_test_file(path)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert wrong == []
