"""Imports point down the tiers of DESIGN, and nowhere else."""

import ast
from pathlib import Path

import pytest

from tests.tidy.source import PACKAGE, files, module_name, relative, tree

_VALUES = {"errors", "model"}
_STORES = _VALUES | {"wire", "core", "image", "snapshot", "trajectory"}
_NODE = _STORES | {"backends", "observe"}
_CLIENT = _VALUES | {"wire", "sdk"}
_JOB = _CLIENT | {"trajectory", "rollout"}

# Part of the package -> the parts it may import, besides itself. "" is barchan/__init__.py, the public names.
# A part that is not here yet must be added, which is the moment to think about where it belongs.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "model": {"errors"},
    "wire": _VALUES,
    "core": _VALUES,
    "image": _VALUES | {"wire", "core"},
    "snapshot": _VALUES | {"wire", "core", "image"},
    "trajectory": _VALUES | {"wire", "core"},
    "backends": _STORES,
    "observe": _STORES | {"backends"},
    "node": _NODE,
    "gateway": _NODE,
    "cluster": _NODE | {"node", "gateway"},
    "sdk": _VALUES | {"wire"},
    "": _CLIENT | {"rollout"},
    "rollout": _CLIENT | {"trajectory"},
    "compat": _JOB | {""},
    "bench": _JOB | {"", "image"},  # it measures with an image that it makes
    "sim": _VALUES | {"core"},
    "testing": _JOB | _NODE | {"", "node"},  # it looks at everything, and only the command line at it
    # The command line is the top: besides being a client it sets up a node (images, requirements, the node itself).
    "cli": _JOB | {"", "bench", "compat", "sim", "image", "backends", "node", "testing"},
}

# `client.run()` is where a user looks for runs, which are built on the client: named here, (file, module) by (file,
# module), so that nothing else of the client comes to depend on what stands above it.
EXCEPTIONS = {
    ("src/barchan/sdk/aio/client.py", "barchan.rollout.run"),
    ("src/barchan/sdk/client.py", "barchan.rollout.sync"),
}


def part_of(module: str) -> str:
    """`barchan.wire.api` -> `wire`; the package itself -> ``."""
    return (*module.split("."), "")[1]


def imported(path: Path) -> list[tuple[int, str]]:
    """Every Barchan module a file imports, anywhere in it, as (line, dotted name)."""
    here = module_name(path)
    package = here if path.name == "__init__.py" else here.rpartition(".")[0]
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found += [(node.lineno, _submodule(base, alias.name)) for alias in node.names]
    return [(line, name) for line, name in found if name == "barchan" or name.startswith("barchan.")]


def _submodule(base: str, name: str) -> str:
    """`from barchan import wire` imports `barchan.wire`; `from barchan import connect` the package itself."""
    target = PACKAGE / name
    is_module = base == "barchan" and (target.is_dir() or target.with_suffix(".py").exists())
    return f"{base}.{name}" if is_module else base


def test_imports_point_down() -> None:
    """No module imports a part that the table does not allow to its own part; the SDK, above all, never the node."""
    wrong = []
    for path in files(".py"):
        if not path.is_relative_to(PACKAGE):
            continue
        part = part_of(module_name(path))
        assert part in ALLOWED, f"{relative(path)}: {part!r} has no row in ALLOWED"
        for line, name in imported(path):
            if part_of(name) not in ALLOWED[part] | {part} and (relative(path), name) not in EXCEPTIONS:
                wrong.append(f"{relative(path)}:{line}: {part or 'barchan'} must not import {name}")
    assert wrong == []


def test_the_table_has_no_cycle() -> None:
    """The table itself is a tiering: following what is allowed never leads back."""
    done: set[str] = set()

    def visit(part: str, above: tuple[str, ...]) -> None:
        assert part not in above, f"cycle: {' -> '.join([*above, part])}"
        if part not in done:
            for lower in sorted(ALLOWED[part]):
                visit(lower, (*above, part))
            done.add(part)

    for part in ALLOWED:
        visit(part, ())
    assert done == set(ALLOWED)
    assert "node" not in ALLOWED["sdk"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import barchan.node.app", ["barchan.node.app"]),
        ("from barchan import errors, connect", ["barchan.errors", "barchan"]),
        ("def f():\n    from barchan.node import app", ["barchan.node"]),
        ("from . import api", ["barchan.wire"]),
        ("from ..model.node import NodeInfo", ["barchan.model.node"]),
        ("import json", []),
    ],
)
def test_every_form_of_import_is_seen(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader finds absolute, relative and local imports, so that none escapes the table."""
    monkeypatch.setattr("tests.tidy.test_tiers.tree", lambda path: ast.parse(text))
    assert [name for _, name in imported(PACKAGE / "wire/extra.py")] == expected
