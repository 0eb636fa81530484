"""Whose reads waited, and for how long together."""

import os
from pathlib import Path

from barchan.image.lazy.waits import Waits

OWN = Path("/proc/self/cgroup").read_text().splitlines()[0].rpartition(":")[2].rstrip("/")


def test_reads_that_wait_at_once_count_once() -> None:
    """Only what lies within the time that is asked for, and only of the group."""
    waits = Waits()
    for unique, began, end in ((1, 10.0, 14.0), (2, 12.0, 15.0), (3, 17.0, 18.0)):
        waits.begin(unique, os.getpid(), began)
        waits.end(unique, end)
    waits.begin(4, os.getpid(), 19.5)
    waits.begin(4, os.getpid(), 19.9)  # known already
    waits.begin(5, 1 << 22, 11.0)  # no such process
    assert waits.of(OWN, 0.0, 20.0) == (6.5, 0.5)
    assert waits.of(OWN, 13.0, 20.0) == (3.5, 0.5)
    assert waits.of("/another", 0.0, 20.0) == (0.0, 0.0)
