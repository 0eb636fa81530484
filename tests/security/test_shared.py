"""What the kernel counts for all of its users: a guest that takes all it can get takes it from itself only."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from barchan.sdk.sandbox import Process, Sandbox
from tests.security.lab import Lab, command

PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def start_taking(sandbox: Sandbox, what: str) -> tuple[Process, int]:
    """The program that goes on holding it, and how much it got."""
    process = sandbox.start(command("greedy", what), cwd="/opt", user="root")
    return process, int(next(iter(process.output(quiet_timeout_s=60)))[2])


def host_inotify() -> bool:
    fd = ctypes.CDLL(None).inotify_init1(os.O_CLOEXEC)
    if fd >= 0:
        os.close(fd)
    return bool(fd >= 0)


def host_terminal() -> bool:
    for fd in os.openpty():
        os.close(fd)
    return True


@pytest.mark.parametrize(
    ("what", "host_has"),
    [("inotify", host_inotify), ("signals", None), ("queues", None), ("terminals", host_terminal)],
)
def test_an_account_is_one_sandboxes_own(lab: Lab, what: str, host_has: Callable[[], bool] | None) -> None:
    """Another program of the same sandbox finds nothing left, so it was all taken; a neighbour and the host do."""
    with lab.create() as sandbox, lab.create() as neighbour:
        _, taken = start_taking(sandbox, what)
        assert taken > 0
        assert start_taking(sandbox, what)[1] < taken / 10
        assert host_has is None or host_has()
        assert start_taking(neighbour, what)[1] > taken * 0.9


def test_terminals_open_for_a_neighbour(lab: Lab) -> None:
    """A guest that opens terminals without end leaves those that the platform opens elsewhere."""
    with lab.create() as sandbox, lab.create() as neighbour:
        start_taking(sandbox, "terminals")
        process = neighbour.start(["test", "-t", "0"], pty=True)
        assert process.wait(30).exit_code == 0


def tcp_bytes() -> int:
    """What TCP buffers on the whole host."""
    line = next(line for line in Path("/proc/net/sockstat").read_text().splitlines() if line.startswith("TCP:"))
    return int(line.split()[line.split().index("mem") + 1]) * PAGE


def taken_by_tcp(lab: Lab, *switches: str) -> int:
    with lab.create(*switches, memory_mib=64) as sandbox:
        before = tcp_bytes()
        start_taking(sandbox, "tcp")
        return tcp_bytes() - before


def test_network_buffers_are_bounded(lab: Lab) -> None:
    """The kernel's memory for a guest's own connections is limited with the sandbox's memory."""
    assert taken_by_tcp(lab) < 64 * MIB


def test_without_limit_they_are_not(lab: Lab) -> None:
    """The same program makes the kernel hold several times what the sandbox may."""
    assert taken_by_tcp(lab, "no-memory-limit") > 128 * MIB
