"""Programs that images are made with: their output, their failures, their end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from barchan.errors import BackendError
from barchan.image.tools import in_namespaces, run


def test_each_line_is_told_and_a_failure_has_the_last_ones() -> None:
    """Both streams come line by line; the error quotes the tail and the exit code."""
    lines: list[str] = []
    run(["sh", "-c", "echo one; echo two >&2"], on_line=lines.append)
    assert lines == ["one", "two"]
    with pytest.raises(BackendError, match=r"sh failed with exit code 3: c \| d \| e") as caught:
        run(["sh", "-c", "for i in a b c d e; do echo $i; done; exit 3"])
    assert caught.value.details == {"exit_code": 3}


def test_a_listener_that_raises_ends_the_program() -> None:
    """An exception (or Ctrl-C) on the way kills the program before it is seen."""

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run(["sh", "-c", "echo x; exec sleep 60"], on_line=stop)
    assert time.monotonic() - started < 30


@pytest.mark.requires("root")
def test_a_killed_builder_takes_its_programs_along(tmp_path: Path) -> None:
    """SIGKILL of this process ends what it runs, and all of that one's children."""
    seen = tmp_path / "seen"
    inner = f"sleep 3600 & readlink /proc/self/ns/pid > {seen}; wait"
    program = f"from barchan.image.tools import *; run(in_namespaces(['sh', '-c', {inner!r}]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as builder:
        deadline = time.monotonic() + 30
        while not (seen.exists() and seen.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.02)
        namespace = seen.read_text().strip()
        inside = members(namespace)
        assert len(inside) == 2
        builder.send_signal(signal.SIGKILL)
        builder.wait()
    while members(namespace) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert members(namespace) == set()


def members(namespace: str) -> set[int]:
    """Processes in a pid namespace."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/pid"):
        try:
            if os.readlink(path) == namespace:
                found.add(int(path.parts[2]))
        except OSError:
            continue  # it has just ended
    return found


def test_namespaces_are_asked_for_once() -> None:
    """The program itself comes last, so that its own options stay its own."""
    assert in_namespaces(["prog", "--mount"])[-2:] == ["prog", "--mount"]
