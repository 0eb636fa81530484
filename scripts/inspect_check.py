"""Run inspect_ai's own published self-check, and a small evaluation, in sandboxes of a backend.

    sudo python scripts/inspect_check.py --backend container --backend gvisor

inspect_ai and Barchan's wheel, made of this checkout, are installed into an environment of their own (`--venv`); the
node runs from that wheel. Exit code 1 if a check fails or the evaluation does not end as it should.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
INSPECT = "inspect-ai==0.3.285"
IMAGE = "inspect-check"  # what one check does needs adduser
TESTS = Path(__file__).with_name("inspect_check_tests.py")
EVALUATION = Path(__file__).with_name("inspect_check_eval.py")
RUN_S_MAX = 1800


def run(*command: str | Path, **environment: str) -> None:
    subprocess.run(
        [os.fspath(word) for word in command],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        env={**os.environ, **environment},
    )


def prepare(venv: Path) -> Path:
    """An environment with inspect_ai and this checkout's wheel; returns its folder of programs."""
    programs = venv / "bin"
    marker = venv / "has-inspect"
    if not marker.exists() or marker.read_text() != INSPECT:
        run(sys.executable, "-m", "venv", "--clear", venv)
        run(programs / "pip", "install", "-qq", INSPECT, "pytest", "pytest-asyncio")
        marker.write_text(INSPECT)
    with tempfile.TemporaryDirectory(prefix="inspect-check-") as scratch:
        run(programs / "pip", "wheel", "-qq", "--no-deps", "-w", scratch, ROOT)
        (wheel,) = Path(scratch).glob("barchan-*.whl")
        run(programs / "pip", "install", "-qq", f"{wheel}[inspect]")
        run(programs / "pip", "install", "-qq", "--no-deps", "--force-reinstall", wheel)
    return programs


def self_check(programs: Path, state_dir: Path, backend: str) -> dict[str, str]:
    """What became of each check: "" if it passed, else the last line of what it said."""
    with tempfile.TemporaryDirectory(prefix="inspect-check-") as scratch:
        report = Path(scratch) / "report.xml"
        options = [
            "-q",
            "-o",
            "asyncio_mode=auto",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            "-c",
            "/dev/null",
            "--rootdir",
            scratch,
        ]
        subprocess.run(
            [programs / "python", "-m", "pytest", *options, TESTS],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env={**os.environ, "CHECK_BACKEND": backend, "CHECK_STATE_DIR": str(state_dir), "CHECK_IMAGE": IMAGE},
            timeout=RUN_S_MAX,
        )
        outcome = {}
        for case in ElementTree.parse(report).iter("testcase"):
            bad = [item for item in case if item.tag in ("failure", "error", "skipped")]
            outcome[case.attrib["name"]] = bad[0].attrib.get("message", bad[0].tag).splitlines()[0] if bad else ""
        return outcome


def evaluation(programs: Path, state_dir: Path, backend: str) -> str:
    """ "" if the evaluation with a scripted model ended as it should, else what was wrong."""
    done = subprocess.run(
        [programs / "python", EVALUATION, backend, str(state_dir), IMAGE],
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
    )
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="may be repeated [default: container]")
    parser.add_argument("--venv", type=Path, default=ROOT / "build/inspect", help="kept here for the next time")
    parser.add_argument("--out", type=Path, help="write what came of it as JSON, too")
    asked = parser.parse_args()
    programs = prepare(asked.venv.absolute())
    state_dir = asked.venv.absolute() / "state"
    own = {"BARCHAN_STATE_DIR": str(state_dir)}
    run(programs / "barchan", "image", "build", "debian", "--name", IMAGE, "--include", "adduser", **own)
    found = {}
    for backend in asked.backend or ["container"]:
        began = time.monotonic()
        checks = self_check(programs, state_dir, backend)
        took_s = time.monotonic() - began
        wrong = evaluation(programs, state_dir, backend)
        failed = {name: said for name, said in checks.items() if said}
        passed = len(checks) - len(failed)
        found[backend] = {
            "passed": passed,
            "checks": len(checks),
            "failed": failed,
            "took_s": took_s,
            "evaluation": wrong,
        }
        print(f"{backend}: {passed} of {len(checks)} checks of {INSPECT} pass, in {took_s:.0f} s")
        for name, said in failed.items():
            print(f"    {name}: {said}")
        print(f"    evaluation with tools: {wrong or 'as it should be'}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(item["failed"] or item["evaluation"] or not item["checks"] for item in found.values()))


if __name__ == "__main__":
    sys.exit(main())
