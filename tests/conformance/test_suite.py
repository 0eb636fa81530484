"""The suite sees what it is there for: a backend that fails, lacks something, or lacks nothing that it is said to."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec, RequirementMissing
from barchan.testing.check import Body, Check
from barchan.testing.expect import NotConforming, equal, holds, raises, until
from barchan.testing.lab import Lab
from barchan.testing.profiles import Profile
from barchan.testing.suite import Suite, run

pytestmark = [pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs"), pytest.mark.timeout(150)]


def made_up(name: str, body: Body, needs: str | None = None) -> Check:
    return Check(name, "made up", needs, "What it promises.", body)


async def passes(lab: Lab) -> None:
    await (await lab.create()).exec("true")


async def refuses(lab: Lab) -> None:
    raise InvalidSpec("no such thing here")


async def breaks(lab: Lab) -> None:
    equal((await (await lab.common()).exec("exit 3")).exit_code, 0, "exit code")


async def hangs(lab: Lab) -> None:
    await (await lab.common()).exec("sleep 600", timeout_s=600)


async def finds_no_tool(lab: Lab) -> None:
    raise RequirementMissing("no such tool here")


async def kills_the_node(lab: Lab) -> None:
    lab.node.kill()
    raise NotConforming("cut short")


CHECKS = (
    made_up("passes", passes),
    made_up("breaks", breaks),
    made_up("refuses", refuses),
    made_up("lacks", refuses, "fork"),
    made_up("can after all", passes, "fork"),
    made_up("breaks what it lacks", breaks, "fork"),
    made_up("is not what nobody asks for", breaks, "bounded root"),
    made_up("refuses what it has", refuses, "memory"),
    made_up("hangs", hangs),
    made_up("unmet", finds_no_tool),
    made_up("kills", kills_the_node),
    made_up("goes on", passes),
)


async def test_each_outcome_is_told_as_what_it_is(images: Path) -> None:
    """A gap is what is listed as lacking, and refused; one that has closed fails; nothing else is excused."""
    suite = Suite(
        "container",
        "debian",
        Profile(patience=0.03, lacks={"fork": "it is a test", "bounded root": "it is one"}),
        images,
    )
    report = await run(suite, CHECKS)
    told = {outcome.name: outcome for outcome in report.outcomes}
    assert {name: outcome.result for name, outcome in told.items()} == {
        "passes": "passed",
        "breaks": "failed",
        "refuses": "failed",
        "lacks": "gap",
        "can after all": "closed",
        "breaks what it lacks": "failed",
        "is not what nobody asks for": "gap",
        "refuses what it has": "failed",
        "hangs": "failed",
        "unmet": "unmet",
        "kills": "failed",
        "goes on": "passed",
        "nothing_is_left_on_the_host": "passed",
    }
    assert told["breaks"].message.startswith("NotConforming: exit code: expected 0, got 3")
    assert told["lacks"].message == "fork: it is a test"
    assert not report.ok


async def test_expectations_fail() -> None:
    """Each of the words that checks are written in can say no, and what was seen."""

    async def value() -> str:
        return "x" * 1000

    for expectation in (lambda: equal(1, 2, "count"), lambda: holds(False, "it works")):
        with pytest.raises(NotConforming):
            expectation()
    with pytest.raises(NotConforming, match="expected InvalidSpec, got 'xxx"):
        await raises(InvalidSpec, value())
    with pytest.raises(NotConforming, match="not within"):
        await until(lambda: asyncio.sleep(0, False), "never", 0.1)


def test_the_command_reports(images: Path, tmp_path: Path) -> None:
    """One JSON value, with an outcome for each check and for what is left."""
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    (state_dir / "images").symlink_to(images)
    words = ["conformance", "--only", "a_sandbox_says_what_it_is", "--state-dir", str(state_dir), "--json"]
    done = subprocess.run([sys.executable, "-m", "barchan.cli", *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["backend"] == "container"
    assert [outcome["result"] for outcome in report["outcomes"]] == ["passed", "passed"]
    assert [path.name for path in state_dir.iterdir()] == ["images"]


# A backend of another package: containers under another name, which can't be forked.
STRANGER = """
from msgspec.structs import replace
from barchan.backends.container.backend import ContainerBackend

class Stranger:
    capabilities = replace(ContainerBackend.capabilities, fork=False, zygote=False)

    def __init__(self, host):
        self._host = host

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def start(self):
        self._inner = await self._host.backend("container")

    async def found(self):
        return []

    async def lost(self):
        await self._inner.lost()

    async def close(self):
        pass

    async def shutdown(self):
        pass
"""


def test_a_strangers_backend_is_checked_by_pytest(images: Path, tmp_path: Path) -> None:
    """Found by its entry point; what its author says it lacks is a gap, and fails where it does not lack it."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[barchan.backends]\nstranger = stranger:Stranger\n")
    which = "exit_code_and or keeps_files or warm_interpreter or capable"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "barchan.testing.plugin"]
    command += ["--pyargs", "barchan.testing.conformance", "--backend", "stranger", "--images", str(images)]
    lacks = ["--lacks", "fork", "--lacks", "zygote", "--lacks", "root capable"]
    done = subprocess.run(
        [*command, *lacks, "-k", which],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    assert "3 passed" in done.stdout and "1 failed" in done.stdout, done.stdout
    assert "it is listed as lacking root capable" in done.stdout
