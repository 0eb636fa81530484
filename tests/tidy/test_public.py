"""The public names are those that `barchan/__init__.py` lists, and each is the same thing in its own module."""

import ast
import importlib
import subprocess
import sys

import barchan
from barchan.errors import BY_CODE
from tests.tidy.source import PACKAGE, tree


def typed_imports() -> dict[str, str]:
    """Name -> module, from the imports that type checkers and editors see."""
    (block,) = (node for node in tree(PACKAGE / "__init__.py").body if isinstance(node, ast.If))
    return {
        alias.name: node.module or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_each_public_name_resolves_to_its_module() -> None:
    """Every name of `__all__` loads, and is what the type checker is told: the same object of the same module."""
    assert len(barchan.__all__) == len(set(barchan.__all__))
    assert set(barchan.__all__) == {*typed_imports(), "__version__"}
    for name, module in typed_imports().items():
        assert getattr(barchan, name) is getattr(importlib.import_module(module), name)
    assert barchan.__version__


def test_every_error_is_public() -> None:
    """Whatever Barchan raises can be caught by a public name."""
    assert {error.__name__ for error in BY_CODE.values()} <= set(barchan.__all__)


def test_other_names_are_refused() -> None:
    """A name that is not public is an AttributeError, also one that a submodule would have."""
    for name in ("from_wire", "Endpoint", "no_such_name"):
        assert not hasattr(barchan, name)


def test_import_is_lazy() -> None:
    """`import barchan` loads no HTTP, event loop or value library: a program pays for what it touches."""
    heavy = "{'aiohttp', 'asyncio', 'msgspec', 'rich', 'pyte', 'ssl'}"
    code = f"import barchan, sys; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
