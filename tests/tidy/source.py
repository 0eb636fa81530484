"""The project's own files, as the tidy tests read them."""

import ast
import functools
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src/barchan"
SKIPPED = {"build", "dist", "runs", "_guest", "__pycache__"}


@functools.cache
def project_files() -> tuple[Path, ...]:
    """Every file of the project that a person wrote, without hidden folders and built ones."""
    found: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        hidden = {name for name in folders if name.startswith(".") and name != ".ci"}
        folders[:] = sorted(set(folders) - hidden - SKIPPED)
        found += [Path(folder, name) for name in sorted(names)]
    return tuple(found)


def files(*suffixes: str) -> list[Path]:
    return [path for path in project_files() if path.suffix in suffixes]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    """`src/barchan/wire/api.py` -> `barchan.wire.api`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
