"""Have Harbor's own reader judge ATIF files: `python scripts/check_atif.py FILE_OR_FOLDER...`

Harbor needs Python 3.12 or later and many packages, so it is installed into a virtual environment of its own, made
anew in a temporary folder, or kept in `--venv DIR` for the next time. Exit code 1 if a file is refused.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHON_MIN = (3, 12)
CANDIDATES = ("python3.14", "python3.13", "python3.12", "python3")

# Runs inside that environment: the file names come on stdin, as there may be more than fit on a command line.
READER = """
import json
import sys
from importlib.metadata import version

from harbor.models.trajectories import Trajectory
from harbor.utils.trajectory_validator import TrajectoryValidator

refused = steps = calls = ids = long = 0
paths = sys.stdin.read().splitlines()
for path in paths:
    validator = TrajectoryValidator()
    if not validator.validate(path):
        refused += 1
        print(f"refused: {path}", *validator.errors, sep="\\n    ", file=sys.stderr)
        continue
    with open(path, "rb") as file:
        read = Trajectory.model_validate(json.load(file))
    steps += len(read.steps)
    long += sum(step.source == "agent" for step in read.steps) > 1
    calls += sum(len(step.tool_calls or ()) for step in read.steps)
    ids += sum(len(step.metrics.completion_token_ids or ()) for step in read.steps if step.metrics)
print(
    f"harbor {version('harbor')} accepts {len(paths) - refused} of {len(paths)} files:"
    f" {long} of more than one turn, {steps} steps, {calls} tool calls, {ids} completion token ids"
)
sys.exit(bool(refused))
"""


def is_new_enough(python: str) -> bool:
    code = f"import sys, venv, ensurepip; sys.exit(sys.version_info < {PYTHON_MIN})"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def reader_python(venv: Path, python: str | None) -> Path:
    """The interpreter of an environment that has Harbor; made where it is missing."""
    inside = venv / "bin/python"
    if not (venv / "harbor-is-installed").exists():
        found = next(filter(is_new_enough, [python] if python else CANDIDATES), None)
        if found is None:
            sys.exit(f"check_atif: Harbor needs Python {'.'.join(map(str, PYTHON_MIN))}; name one with --python")
        subprocess.run([found, "-m", "venv", "--clear", str(venv)], check=True)
        subprocess.run([str(inside), "-m", "pip", "install", "-qq", "harbor"], check=True)
        (venv / "harbor-is-installed").touch()
    return inside


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE_OR_FOLDER")
    parser.add_argument("--venv", type=Path, help="keep the environment here")
    parser.add_argument("--python", help="an interpreter of Python 3.12 or later")
    asked = parser.parse_args()
    files = [file for path in asked.paths for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])]
    if not files:
        sys.exit("check_atif: there is no file to check")
    with tempfile.TemporaryDirectory(prefix="check-atif-") as scratch:
        python = reader_python(asked.venv or Path(scratch), asked.python)
        names = "\n".join(str(file) for file in files)
        return subprocess.run([str(python), "-c", READER], input=names, text=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
