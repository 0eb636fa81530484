"""The program that a zygote's own Python runs, seen from outside: it must suit old ones, and bring nothing along."""

import ast
import sys
from pathlib import Path

import pytest

from barchan.backends.container import zygote
from barchan.model.sandbox import ExecRequest, SandboxSpec, StartRequest, Zygote
from barchan.sdk.options import python_request, zygote_spec
from barchan.wire.guest import Start

SOURCE = Path(zygote.__file__).with_name("interpreter.py").read_text()


def test_it_is_written_in_the_oldest_python_that_is_promised() -> None:
    """Syntax of 3.8, and annotations that are never evaluated."""
    tree = ast.parse(SOURCE, feature_version=(3, 8))
    futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert [alias.name for node in futures for alias in node.names] == ["annotations"]


def test_it_imports_the_standard_library_alone() -> None:
    """Nothing else is in an image for certain."""
    names = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    assert names <= set(sys.stdlib_module_names)


def test_a_zygote_is_known_again_by_what_it_was_asked_to_be() -> None:
    """Its sandbox's id tells it from a user's, and one with other imports from it."""
    spec = zygote_spec("debian", ["json", "os.path"], "python3")
    assert spec == SandboxSpec(template="debian", zygote=Zygote(imports=("json", "os.path")))
    assert zygote.is_zygote("zy_0123_ab")
    assert not zygote.is_zygote("sb_0123_ab")


@pytest.mark.parametrize("kind", [ExecRequest, StartRequest])
def test_source_and_arguments_become_one_request(kind: type[ExecRequest]) -> None:
    """Without arguments there is no argument vector."""
    made = python_request(kind, "print(1)", ["a", "b"], {"process_id": "p", "stdin": "in"})
    assert (made.python, made.argv, made.shell) == ("print(1)", ("a", "b"), None)
    assert (made.stdin, made.process_id) == (b"in", "p")
    assert python_request(kind, "", [], {}).argv is None


def test_a_start_of_source_has_a_kind_of_its_own() -> None:
    """The byte behind the process id."""
    starts = [
        Start(process_id="p", argv=["x"]),
        Start(process_id="p", argv=["x"], applet=True),
        Start(process_id="p", argv=["x"], warm=True),
    ]
    assert [start.encode(1)[17] for start in starts] == [0, 1, 2]
