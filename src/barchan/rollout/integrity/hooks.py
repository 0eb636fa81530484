"""Files that programs take orders from without being asked to, by their names. Pure."""

import re
import sys
from collections.abc import Collection, Iterable
from pathlib import PurePosixPath

# What a test runner, or the interpreter under it, reads by itself.
_STEERING = """
    .coveragerc .gitattributes .pytest.ini conftest.py noxfile.py pyproject.toml pytest.ini pytest.toml setup.cfg
    setup.py sitecustomize.py tox.ini usercustomize.py
"""
STEERING = frozenset(_STEERING.split())
SHADOWED = frozenset({"_pytest", "pluggy", "pytest", "unittest"})  # such a module comes before the installed one
# Of these a program may be made as well, so only what they say to a test runner counts.
_SETTINGS = frozenset({"pyproject.toml", "setup.cfg", "setup.py", "tox.ini", "noxfile.py"})
_RUNNERS_SECTION = re.compile(rb"^\s*\[(tool\.pytest\b.*|tool:pytest|pytest)\]", re.MULTILINE)
_STARTED = ".bash_aliases .bash_login .bash_logout .bash_profile .bashrc .profile .zprofile .zshenv .zshrc"
_SHELLS = frozenset(_STARTED.split())
_PLUGINS_SUFFIXES = (".dist-info", ".egg-info")
_TOUCHED = re.compile(r"^(?:(?:---|\+\+\+) [ab]/|rename (?:from|to) )([^\t\n\r]+)", re.MULTILINE)


def steers(name: str) -> bool:
    """Whether a file of a repository, by its path in it, steers a test runner or the interpreter under it."""
    path = PurePosixPath(name)
    # Where a runner starts, the repository's own folder and those that it is installed from come first on the path.
    modules = {PurePosixPath(part).stem for part in path.parts[:2]}
    first = path.parts[0] if path.parts else ""
    return (
        path.name in STEERING
        or path.suffix == ".pth"
        or _names_plugins(path)
        or not SHADOWED.isdisjoint(modules)
        or (len(path.parts) == 1 and path.suffix == ".py" and path.stem in sys.stdlib_module_names)
        or (len(path.parts) == 2 and path.name == "__init__.py" and first in sys.stdlib_module_names)
    )


def runs_by_itself(name: str, content: bytes | None) -> bool:
    """Whether a file that a task's artifact brings along is run, or obeyed, by whatever runs near it.

    Args:
        content: None for a link, to whatever that is.
    """
    path = PurePosixPath(name)
    if path.name in _SETTINGS:
        return content is None or _RUNNERS_SECTION.search(content) is not None
    return (
        path.name in STEERING - {".coveragerc", ".gitattributes"}
        or path.suffix == ".pth"
        or path.name in _SHELLS
        or _names_plugins(path)
        or path.parts[-3:-1] == (".git", "hooks")
    )


def _names_plugins(path: PurePosixPath) -> bool:
    return path.name == "entry_points.txt" and path.parent.suffix in _PLUGINS_SUFFIXES


def comes_before(name: str) -> bool:
    """Whether a program that starts in the folder takes this for a module of Python's or pytest's."""
    first = PurePosixPath(name).parts[:1]
    return any(PurePosixPath(part).stem in SHADOWED | sys.stdlib_module_names for part in first) and (
        name.endswith(".py") or name.count("/") > 0
    )


def touched(patch: str) -> frozenset[str]:
    """The files that a patch of the task's own names."""
    return frozenset(name.rstrip() for name in _TOUCHED.findall(patch))


def steering_of(names: Iterable[str], allowed: Collection[str]) -> tuple[str, ...]:
    """Those of a repository's paths that steer, but for those that the task's own solution changes, too."""
    return tuple(name for name in names if name not in allowed and steers(name))
