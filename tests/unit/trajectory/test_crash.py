"""A killed writer loses nothing that it was told is written."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from barchan.trajectory.format import log_path
from barchan.trajectory.reader import load, verify
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.trajectory.logs import new_log

# Appends for ever, telling each acknowledged seq on stdout; every fourth entry is long.
WRITER = """
import os, sys
from pathlib import Path
from barchan.trajectory.writer import TrajectoryWriter
with TrajectoryWriter.reopen(Path(sys.argv[1])) as log:
    count = 0
    while True:
        count += 1
        size = 200_000 if count % 4 == 0 else 10
        seq = log.intent("exec", {"n": count, "ids": list(range(size))})
        os.write(1, b"%d\\n" % seq)
        os.write(1, b"%d\\n" % log.result(seq, {"n": count}))
"""


@pytest.mark.timeout(120)
def test_acknowledged_entries_outlive_kill_9(tmp_path: Path) -> None:
    """Killed at any moment, again and again: each acknowledged entry is there, and the next writer goes on."""
    new_log(tmp_path).close()
    path = log_path(tmp_path, "r-000000")
    pause = random.Random(7)
    for round_ in range(6):
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        told = child.stdout.readline()  # from here on it is in its loop
        time.sleep(pause.uniform(0.0, 0.05))
        child.send_signal(signal.SIGKILL)
        told += child.stdout.read()
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        acknowledged = int(told.split()[-1])
        found = verify(path)
        assert found.ok, found.why
        assert found.entries > acknowledged
        assert len(found.open_intents) <= round_ + 1
    with TrajectoryWriter.reopen(path) as log:
        for entry in log.open_intents:
            log.result(entry.seq, {"known": False})
    read = load(path)
    assert (read.open_intents, read.torn_bytes) == ((), 0)
    assert [entry.epoch for entry in read.entries if entry.part == "header"] == list(range(1, 9))


# Appends once per line of stdin.
STALLED = """
import sys
from pathlib import Path
from barchan.trajectory.writer import TrajectoryWriter
with TrajectoryWriter.reopen(Path(sys.argv[1])) as log:
    for line in sys.stdin:
        print(log.entry("note", {"said": line}), flush=True)
"""


@pytest.mark.timeout(60)
def test_the_log_of_a_stalled_writer_can_be_taken_over(tmp_path: Path) -> None:
    """A writer that is stopped, not dead, does not hold the log; when it goes on, it finds itself fenced."""
    new_log(tmp_path).close()
    path = log_path(tmp_path, "r-000000")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", STALLED, str(path)], stdin=pipe, stdout=pipe, stderr=pipe) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"first\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"2\n"
        child.send_signal(signal.SIGSTOP)
        with TrajectoryWriter.reopen(path) as log:
            assert log.entry("note", {"taken": True}) == 4
        child.send_signal(signal.SIGCONT)
        output, errors = child.communicate(b"second\n")
    assert (child.returncode, output) == (1, b"")
    assert b"barchan.errors.Conflict" in errors
    assert [entry.body for entry in load(path).entries if entry.part == "entry"] == [
        {"said": "first\n"},
        {"taken": True},
    ]
