"""Make Harbor tasks of published source packages: `python scripts/make_harbor_tasks.py OUT [NAME...]`

A task is version n of a package with the tests of version n+1: the agent gets the old code and the new version's change
log, the verifier runs the new tests. For each pair of the list, both source packages are downloaded and the new tests
run against both: what passes with the new code only, and what passes with both, are the tests of the task. A pair whose
new tests fail nothing on the old code is left out, and said so.

Everything a task needs at run time lies in its folder (the test dependencies as wheels), so building and running it
needs no network. Run this with the Python that the tasks' image has (Debian 12: 3.11).
"""

import argparse
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

RUNS = 2  # of each side, so that what differs from run to run is left out
RUN_S_MAX = 60.0
PASS_TO_PASS_MAX = 300
CHANGES_CHARS_MAX = 6000
WHEELS = ("pip", "pytest==8.3.5")  # also for packages whose tests came before pytest 9
# None of the package's own options: they ask for plugins that nothing else here needs.
PYTEST = (
    *("-q", "-p", "outcomes", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings="),
    "--continue-on-collection-errors",
)
CHANGE_LOG = re.compile(r"(changes|changelog|history|news|releases?|versions?)(\.(md|rst|txt))?", re.IGNORECASE)
TEST_FILE = re.compile(r"(test_.*|.*_test|tests?|conftest)\.py")
OF_THE_VERSION = re.compile(r"version|copyright|licen[cs]e|readme|doctest", re.IGNORECASE)


class Pair(NamedTuple):
    """Two versions of a package, and what its tests need beyond pytest and its own dependencies."""

    name: str
    old: str
    new: str
    needs: tuple[str, ...] = ()

    @property
    def task_id(self) -> str:
        return f"{self.name}-{self.new}"


PAIRS = (
    Pair("cachetools", "5.4.0", "5.5.0"),
    Pair("cachetools", "5.5.2", "6.0.0"),
    Pair("click", "8.1.7", "8.1.8"),
    Pair("h11", "0.14.0", "0.16.0"),
    Pair("inflect", "7.3.1", "7.4.0"),
    Pair("itsdangerous", "2.1.2", "2.2.0", ("freezegun",)),
    Pair("jinja2", "3.1.3", "3.1.4", ("trio",)),
    Pair("jinja2", "3.1.4", "3.1.5", ("trio",)),
    Pair("jsonpatch", "1.32", "1.33"),
    Pair("lark", "1.1.9", "1.2.2"),
    Pair("markdown", "3.5.2", "3.6", ("PyYAML",)),
    Pair("marshmallow", "3.21.3", "3.22.0", ("pytz", "simplejson")),
    Pair("mistune", "3.0.2", "3.1.0"),
    Pair("parso", "0.8.3", "0.8.4"),
    Pair("pathspec", "0.11.2", "0.12.0"),
    Pair("prettytable", "3.10.2", "3.11.0", ("pytest-lazy-fixtures",)),
    Pair("prettytable", "3.11.0", "3.12.0", ("pytest-lazy-fixtures",)),
    Pair("semver", "3.0.1", "3.0.2"),
    Pair("sqlparse", "0.5.0", "0.5.1"),
    Pair("sqlparse", "0.5.1", "0.5.2"),
    Pair("tabulate", "0.8.10", "0.9.0"),
    Pair("tomlkit", "0.12.5", "0.13.0", ("PyYAML",)),
    Pair("wcwidth", "0.2.12", "0.2.13"),
    Pair("xmltodict", "0.13.0", "0.14.0"),
)

DOCKERFILE = """\
FROM debian
COPY wheels /srv/wheels
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/srv/wheels PIP_BREAK_SYSTEM_PACKAGES=1
RUN python3 /srv/wheels/{pip}/pip install --quiet {needs}
COPY metadata /srv/metadata
COPY source /app
USER root
ENV PYTHONPATH={path} PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
"""

TASK_TOML = """\
schema_version = "1.4"

[metadata]
difficulty = "medium"
category = "programming"
tags = ["python", "{name}"]

[agent]
timeout_sec = 1800.0

[verifier]
timeout_sec = 300.0

[environment]
network_mode = "no-network"
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
storage_mb = 2048
"""

INSTRUCTION = """\
The directory /app holds the source of the Python package `{name}`, version {old}. Change it so that it does what
version {new} does. This is what that version changed, in its own words:

{changes}

The tests of version {new} will be run on your work. These are the ones that fail with version {old}:

{tests}
"""

SOLVE_SH = """\
#!/bin/bash
# The image has neither patch nor git: the changed files lie here whole.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
while IFS= read -r path; do
    rm -f -- "/app/$path"
done < "$here/removed.txt"
cp -R "$here/changed/." /app/
"""

TEST_SH = """\
#!/bin/bash
# Puts the new version's tests in place of those that are there and runs the chosen ones: all of them have to pass.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p /logs/verifier
echo 0 > /logs/verifier/reward.txt
cd /app || exit 1
while IFS= read -r path; do
    rm -f -- "/app/$path"
done < "$here/replaced.txt"
cp -R "$here/new/." /app/
export PYTHONPATH="$here:{path}" PYTHONDONTWRITEBYTECODE=1 OUTCOMES=/logs/verifier/outcomes.json
python3 -m pytest {options} "@$here/selected.txt"
python3 "$here/outcomes.py" "$here/selected.txt" "$OUTCOMES" > /logs/verifier/reward.txt
cat /logs/verifier/reward.txt
"""

OUTCOMES_PY = '''\
"""As a pytest plugin: write each test's outcome. As a program: say whether all of the chosen tests passed."""

import json
import os
import sys

outcomes = {}


def pytest_runtest_logreport(report):
    passed = report.outcome == "passed" and not hasattr(report, "wasxfail")
    if report.when == "call" and passed:
        outcomes.setdefault(report.nodeid, "passed")
    elif report.outcome == "skipped" or hasattr(report, "wasxfail"):
        outcomes.setdefault(report.nodeid, "skipped")
    elif not passed:
        outcomes[report.nodeid] = "failed"


def pytest_sessionfinish():
    with open(os.environ["OUTCOMES"], "w") as file:
        json.dump(outcomes, file)


if __name__ == "__main__":
    try:
        with open(sys.argv[1]) as chosen, open(sys.argv[2]) as file:
            found = json.load(file)
            print(int(all(found.get(line.rstrip("\\n")) == "passed" for line in chosen)))
    except OSError:
        print(0)
'''


class Unfit(Exception):
    """This pair makes no task; the text says why."""


def call(*argv: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a program; its stderr's end is the error when it fails."""
    done = subprocess.run([str(arg) for arg in argv], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unfit(f"{argv[-1]}: {(done.stderr.strip() or done.stdout.strip())[-300:]}")
    return done.stdout


def pip_download(to: Path, *arguments: str) -> None:
    call(sys.executable, "-m", "pip", "download", "--quiet", "--dest", to, *arguments)


def unpacked(pair: Pair, version: str, into: Path) -> Path:
    """The source package's content."""
    downloads = into / f"sdist-{version}"
    pip_download(downloads, "--no-deps", "--no-binary", pair.name, f"{pair.name}=={version}")
    archives = [path for path in downloads.iterdir() if path.name.endswith(".tar.gz")]
    if len(archives) != 1:
        raise Unfit(f"version {version} has no source package")
    call("tar", "--extract", "--no-same-owner", "--directory", downloads, "--file", archives[0])
    folders = [path for path in downloads.iterdir() if path.is_dir()]
    if len(folders) != 1:
        raise Unfit(f"the source package of {version} is not one folder")
    return folders[0]


def content(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def is_test(path: str) -> bool:
    pure = PurePosixPath(path)
    return bool({"tests", "test"} & set(pure.parts[:-1])) or bool(TEST_FILE.fullmatch(pure.name))


def write(root: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def import_path(files: dict[str, bytes], root: str, metadata: str) -> str:
    """Where the package is imported from, `src` where there is one, and where its metadata lie."""
    in_src = any(re.fullmatch(r"src/[^/]+(/__init__)?\.py", name) for name in files)
    return f"{root}/src:{root}:{metadata}" if in_src else f"{root}:{metadata}"


class Trial:
    """A virtual environment like the task's image, and pytest runs in it."""

    def __init__(self, scratch: Path, wheels: Path, pip: Path, needs: list[str], metadata: dict[str, bytes]) -> None:
        self._scratch = scratch
        write(scratch / "metadata", metadata)
        self._python = scratch / "venv/bin/python"
        call(sys.executable, "-m", "venv", "--without-pip", scratch / "venv")
        call(self._python, pip / "pip", "install", "--quiet", "--no-index", "--find-links", wheels, *needs)
        (scratch / "plugin").mkdir()
        (scratch / "plugin/outcomes.py").write_text(OUTCOMES_PY)

    def outcomes(self, files: dict[str, bytes], arguments: list[str]) -> tuple[set[str], set[str]]:
        """Ids of the tests that pass in a folder of these files: in each of several runs, and in any of them."""
        runs = [self._run(files, arguments) for _ in range(RUNS)]
        passed = [{test for test, outcome in run.items() if outcome == "passed"} for run in runs]
        return set.intersection(*passed), set.union(*passed)

    def _run(self, files: dict[str, bytes], arguments: list[str]) -> dict[str, str]:
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            root, report = Path(folder, "app"), Path(folder, "outcomes.json")
            write(root, files)
            path = import_path(files, str(root), str(self._scratch / "metadata"))
            env = {
                "PATH": os.defpath,
                "HOME": folder,
                "LANG": "C.UTF-8",
                "PYTHONPATH": f"{self._scratch / 'plugin'}:{path}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OUTCOMES": str(report),
            }
            argv = [str(self._python), "-m", "pytest", *PYTEST, *arguments]
            try:
                subprocess.run(argv, cwd=root, env=env, capture_output=True, timeout=RUN_S_MAX, check=False)
            except subprocess.TimeoutExpired as error:
                raise Unfit(f"its tests take more than {RUN_S_MAX:.0f} s") from error
            return json.loads(report.read_bytes()) if report.exists() else {}


def change_log(old: dict[str, bytes], new: dict[str, bytes]) -> str:
    """The lines that the new version's change log has and the old one's has not."""
    added: list[str] = []
    for name, data in new.items():
        if not CHANGE_LOG.fullmatch(PurePosixPath(name).name) or name.endswith(".py"):
            continue
        before = old.get(name, b"").decode("utf-8", "replace").splitlines()
        after = data.decode("utf-8", "replace").splitlines()
        added += [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ")] if before else []
    return "\n".join(added).strip()[:CHANGES_CHARS_MAX] or "(its source package has no change log)"


def choose(trial: Trial, old: dict[str, bytes], new: dict[str, bytes], tests: list[str]) -> tuple[list[str], list[str]]:
    """Tests that only the new code passes, and tests that both pass: chosen from whole runs, then run on their own."""
    always_new, _ = trial.outcomes(new, tests)
    always_old, ever_old = trial.outcomes(old, tests)
    usable = {test for test in always_new if test.isprintable() and not OF_THE_VERSION.search(test)}
    fail_to_pass, pass_to_pass = sorted(usable - ever_old), sorted(usable & always_old)[:PASS_TO_PASS_MAX]
    if not fail_to_pass:
        raise Unfit(f"none of {len(always_new)} new tests fails with the old code")
    alone_new, _ = trial.outcomes(new, fail_to_pass + pass_to_pass)
    alone_old, _ = trial.outcomes(old, pass_to_pass) if pass_to_pass else (set(), set())
    fail_to_pass = [test for test in fail_to_pass if test in alone_new]
    pass_to_pass = [test for test in pass_to_pass if test in alone_new & alone_old]
    if not fail_to_pass or trial.outcomes(old, fail_to_pass)[1]:
        raise Unfit("the chosen tests end otherwise on their own")
    return fail_to_pass, pass_to_pass


def make_task(pair: Pair, out: Path, scratch: Path) -> str:
    """Write one task's folder; the line that says what it holds."""
    old, new = content(unpacked(pair, pair.old, scratch)), content(unpacked(pair, pair.new, scratch))
    new_tests = {name: data for name, data in new.items() if is_test(name)}
    old_code = {name: data for name, data in old.items() if not is_test(name)}
    new_code = {name: data for name, data in new.items() if not is_test(name)}
    if not any(TEST_FILE.fullmatch(PurePosixPath(name).name) for name in new_tests):
        raise Unfit("its source package has no tests")
    wheels = scratch / "wheels"
    pip_download(wheels, "--only-binary", ":all:", *WHEELS, *pair.needs, f"{pair.name}=={pair.new}")
    own = re.sub(r"[-_.]+", "[-_.]+", pair.name)
    for wheel in [path for path in wheels.iterdir() if re.match(rf"{own}-\d", path.name, re.IGNORECASE)]:
        wheel.unlink()
    needs = sorted(path.name.split("-")[0] for path in wheels.iterdir())
    # What an installed package would have: some ask for their own version there.
    metadata = {f"{pair.name}-{pair.old}.dist-info/METADATA": old["PKG-INFO"]}
    (pip,) = wheels.glob("pip-*.whl")
    trial = Trial(scratch, wheels, pip, needs, metadata)
    tests = [
        name for name in new_tests if (base := PurePosixPath(name).name) != "conftest.py" and TEST_FILE.fullmatch(base)
    ]
    fail_to_pass, pass_to_pass = choose(trial, {**old_code, **new_tests}, {**new_code, **new_tests}, tests)

    path = import_path(new, "/app", "/srv/metadata")
    folder = out / pair.task_id
    shutil.rmtree(folder, ignore_errors=True)
    write(folder / "environment/source", old)
    write(folder / "environment/metadata", metadata)
    shutil.copytree(wheels, folder / "environment/wheels")
    write(folder / "tests/new", new_tests)
    write(folder / "solution/changed", {name: data for name, data in new_code.items() if old_code.get(name) != data})
    instruction = INSTRUCTION.format(
        name=pair.name,
        old=pair.old,
        new=pair.new,
        changes=change_log(old, new),
        tests="\n".join(f"- {test}" for test in fail_to_pass[:50]),
    )
    texts = {
        "task.toml": TASK_TOML.format(name=pair.name),
        "instruction.md": instruction,
        "environment/Dockerfile": DOCKERFILE.format(pip=pip.name, needs=shlex.join(needs), path=path),
        "solution/solve.sh": SOLVE_SH,
        "solution/removed.txt": "".join(f"{name}\n" for name in old_code if name not in new_code),
        "tests/test.sh": TEST_SH.replace("{path}", path).replace("{options}", shlex.join(PYTEST)),
        "tests/outcomes.py": OUTCOMES_PY,
        "tests/replaced.txt": "".join(f"{name}\n" for name in old if is_test(name)),
        "tests/selected.txt": "".join(f"{test}\n" for test in fail_to_pass + pass_to_pass),
    }
    write(folder, {name: text.encode() for name, text in texts.items()})
    for script in ("solution/solve.sh", "tests/test.sh"):
        (folder / script).chmod(0o755)
    return (
        f"{len(fail_to_pass)} tests fail with {pair.old} and pass with {pair.new}, {len(pass_to_pass)} pass with both"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the tasks' folders are made here")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these packages")
    asked = parser.parse_args()
    pairs = [pair for pair in PAIRS if not asked.names or pair.name in asked.names]
    made = 0
    for pair in pairs:
        with tempfile.TemporaryDirectory(prefix="harbor-tasks-") as scratch:
            try:
                said = make_task(pair, asked.out, Path(scratch))
                made += 1
            except Unfit as reason:
                said = f"left out: {reason}"
        print(f"{pair.task_id}: {said}", flush=True)
    print(f"{made} of {len(pairs)} pairs are tasks")
    return 0 if made == len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
