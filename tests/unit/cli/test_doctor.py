"""`barchan doctor` and the checks behind it."""

import ctypes
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan import backends
from barchan.backends.container import attempts, probe
from barchan.backends.microvm import probe as microvm_probe
from barchan.backends.vm import probe as vm_probe
from barchan.cli.backend_checks import Report, examine, usual_image
from barchan.cli.main import main
from barchan.model.node import ImageInfo, Requirement

PR_SET_DUMPABLE = 4
OTHERS = ("function", "gvisor", "microvm", "vm")
EXPECTED = {
    "user namespaces",
    "range of user ids",
    "mount namespaces",
    "pid namespaces",
    "network namespaces",
    "ipc namespaces",
    "uts namespaces",
    "cgroup namespaces",
    "time namespaces",
    "mounts on the host",
    "overlayfs",
    "EROFS files",
    "idmapped mounts",
    "btrfs",
    "loop devices",
    "seccomp filters",
    "pidfd",
    "unix sockets",
    "cgroup controllers",
    "cgroups of our own",
    "cgroup.kill",
    "barchan-init",
    "barchan-supervisor",
    "barchan-pack",
    "mkfs.btrfs",
    "python",
    "mmdebstrap",
    "slirp4netns",
    "criu",
    "open files",
}


def leftovers() -> set[Path]:
    places = (Path("/var/tmp"), *Path("/sys/fs/cgroup").iterdir())
    return {hit for place in places if place.is_dir() for hit in place.glob("barchan-probe-*")}


def test_json_has_every_requirement_and_decides_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """One value on the last line; 0 exactly when nothing that containers need is missing; nothing stays behind."""
    code = main(["doctor", "--quick", "--json"])
    report = msgspec.json.decode(capsys.readouterr().out.splitlines()[-1], type=Report)
    checked = [item for item in report.requirements if item.needed_for not in OTHERS]
    assert {item.name for item in checked} == EXPECTED
    assert len(checked) == len(EXPECTED)
    assert [check.name for check in report.backends] == list(backends.names())
    assert all(check.ok != bool(check.why) and check.first_ms is None for check in report.backends)
    missing = [item.name for item in checked if item.needed_for == "container" and not item.ok]
    assert code == (1 if missing else 0)
    assert all(bool(item.remedy) != item.ok and item.found for item in checked)
    assert leftovers() == set()


def test_the_table_names_each_requirement_and_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing says what to do, and the last line says whether containers run here."""
    good = Requirement(name="good", ok=True, needed_for="container", found="there")
    bad = Requirement(name="bad", ok=False, needed_for="container", found="not there", remedy="install it")
    optional = Requirement(name="extra", ok=False, needed_for="image build", found="no", remedy="apt-get install extra")
    monkeypatch.setattr("barchan.cli.backend_checks.requirements", lambda state_dir: [good, bad, optional])
    assert main(["doctor", "--quick"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["good", "yes"], ["bad", "no"], ["extra", "no"]]
    assert "install it" in lines[2]
    assert lines[-1] == "The container backend can't run here: bad."
    monkeypatch.setattr("barchan.cli.backend_checks.requirements", lambda state_dir: [good, optional])
    assert main(["doctor", "--quick"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The container backend can run here."


def test_a_backend_that_can_not_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whose package is broken is a row of the report, and hides nothing of the others."""
    broken = EntryPoint("broken", "no_such_package_at_all:Backend", backends.GROUP)
    monkeypatch.setattr(backends, "added", lambda: {"broken": broken})
    checks = {check.name: check for check in examine(tmp_path).backends}
    assert "no_such_package_at_all" in checks["broken"].why
    assert checks["container"].isolation == "container"


@pytest.mark.parametrize(
    ("there", "kind", "expected"),
    [
        (["debian", "a"], "root", "debian"),
        (["b", "prep-1"], "root", "b"),
        (["prep-1"], "root", None),
        (["debian"], "disk", None),
    ],
)
def test_what_is_booted(there: list[str], kind: str, expected: str | None) -> None:
    """The usual image where it is there, else one that somebody made on purpose, of the right kind."""
    images = [
        ImageInfo(
            name=name,
            digest=name,
            layers=(),
            size_bytes=1,
            created_unix_s=0,
            user="root",
            workdir="/",
            env={},
            kind="root",
        )
        for name in there
    ]
    assert usual_image(images, kind) == expected


def test_attempts_that_cannot_run_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the program that tries things fails, each thing counts as missing, with the reason."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    checked = {item.name: item for item in probe.requirements()}
    assert not checked["overlayfs"].ok
    assert "could not be tried" in checked["overlayfs"].found
    assert not probe.usable(list(checked.values()))
    assert not probe.mounts_erofs(list(checked.values()))


@pytest.mark.parametrize("probed", [microvm_probe.requirements, vm_probe.requirements])
def test_only_what_is_missing_has_a_remedy(probed: Callable[[Path], Sequence[Requirement]], tmp_path: Path) -> None:
    """Nobody is told to install what is there."""
    assert [row.name for row in probed(tmp_path) if row.ok == bool(row.remedy)] == []


def fail(place: attempts.Place) -> None:
    raise OSError(1, "mount: Operation not permitted")


def crash(place: attempts.Place) -> None:
    raise ValueError("x")


def die(place: attempts.Place) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(place: attempts.Place) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the test runner's own is inherited here
    signal.alarm(1)
    signal.pause()


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (lambda place: None, ""),
        (fail, "mount: Operation not permitted"),
        (crash, "ValueError('x')"),
        (die, "the attempt was ended by signal 9"),
        (hang, "the attempt was ended by signal 14"),
    ],
)
def test_an_attempt_fails_in_its_child_alone(action: attempts.Attempt, told: str) -> None:
    """Errors, crashes, signals and hanging are told as text; the caller goes on."""
    assert attempts.attempt(action, attempts.Place("/", "/")) == told


def attempts_as_nobody() -> dict[str, str]:
    """Run them all in a child without privileges."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            # A process that changed its user may not write its own /proc files until it says that it has no secrets.
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            sys.stdout = io.TextIOWrapper(os.fdopen(writer, "wb"))
            attempts.main()
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer: dict[str, Any] = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    return answer


@pytest.mark.requires("root", "userns")
def test_what_needs_privilege_fails_without_it() -> None:
    """Facts decide, not the user id: without privileges there are namespaces, but no host mounts or loop devices."""
    told = attempts_as_nobody()
    assert {name for name, failed in told.items() if failed} == {"ids", "host_mounts", "erofs", "idmap", "loop"}
    assert "not permitted" in told["host_mounts"]
    assert leftovers() == set()


def test_cgroup_hierarchies_are_read_from_the_mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Version 1 with a controller missing, version 2 alone, and none at all are told apart."""
    hybrid = (
        "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    pure = f"41 31 0:38 / {tmp_path} rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    real = probe._read

    def told(mountinfo: str) -> Requirement:
        monkeypatch.setattr(
            probe, "_read", lambda path: mountinfo if path == Path("/proc/self/mountinfo") else real(path)
        )
        monkeypatch.setattr(probe, "_try_cgroup", lambda tree, file="": "")
        return next(item for item in probe._cgroups() if item.name == "cgroup controllers")

    missing = told(hybrid)
    assert (missing.ok, missing.found) == (False, "version 1: cpu, memory; missing: pids")
    assert "pids" in missing.remedy
    unified = told(pure)
    assert (unified.ok, unified.found) == (True, "version 2: cpu, memory, pids")
    assert not told("").ok
