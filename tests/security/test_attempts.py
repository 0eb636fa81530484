"""Promises that programs of many small attempts are made against: none works, and each does without its protection."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from barchan.sdk.sandbox import Sandbox
from tests.security.lab import Lab, findings

USERS = ("root", "agent")
NAMESPACES = {"user", "mount", "net", "pid", "ipc", "uts", "cgroup"}


@dataclass(frozen=True)
class Weakness:
    """What a program must find, as one user, on a node with these protections switched off."""

    promise: int
    program: str
    switches: tuple[str, ...]
    user: str
    found: frozenset[str]


def weakness(promise: int, program: str, switches: str, user: str, found: str) -> Weakness:
    return Weakness(promise, program, tuple(switches.split()), user, frozenset(found.split(", ")))


KERNEL_CALLS = ", ".join(
    [*(f"{how} {name}" for how in ("unshare", "clone") for name in sorted(NAMESPACES)), "clone3", "mount", "fsopen"]
    + ["open_tree", "pivot_root", "add_key", "io_uring", "personality", "AF_NETLINK audit", "AF_NETLINK netfilter"]
    + ["reach keyctl", "reach perf_event_open", "reach userfaultfd", "reach bpf"]
    + (["int 0x80", "x32"] if os.uname().machine == "x86_64" else [])
)
INIT = "kill 15, kill 17, pidfd signal, prlimit nofile, read limits, list socket dir"
HOST_PROC = (
    "read key-users, read kpagecount, read kpageflags, read timer_list, core_pattern, hostname, writable in /proc"
)
WEAKNESSES = (
    weakness(2, "capabilities", "no-caps-drop", "root", "has one, bounding set, chown, setuid, file capabilities"),
    weakness(2, "capabilities", "no-caps-drop", "agent", "bounding set, set-id program"),
    weakness(3, "kernel_calls", "no-seccomp", "root", KERNEL_CALLS),
    weakness(3, "kernel_calls", "no-seccomp", "agent", KERNEL_CALLS),
    weakness(4, "processes", "no-pidns", "root", "list, command line"),
    weakness(5, "network", "no-netns", "agent", "tcp, abstract socket, abstract names"),
    weakness(6, "proc_files", "no-masks", "root", "read interrupts, read kallsyms, writable in /proc"),
    weakness(6, "proc_files", "no-masks no-userns", "root", HOST_PROC),
    weakness(12, "init", "init-as-guest-root", "root", INIT),
    weakness(14, "devices", "full-dev", "root", "present"),
    weakness(14, "devices", "no-caps-drop no-userns", "root", "mknod mem in /tmp, mknod kmsg in /dev/shm"),
)


@pytest.fixture(scope="module")
def host_services() -> Iterator[tuple[str, ...]]:
    """A port and an abstract name that the host listens on; who connects is told so."""
    tcp, local = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    name = f"barchan-test-{os.getpid()}"
    local.bind(f"\0{name}")
    local.listen()

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:  # closed: the tests are done
                return
            with peer:
                peer.sendall(b"host")

    threads = [threading.Thread(target=serve, args=(listener,)) for listener in (tcp, local)]
    with closing(tcp), closing(local):
        for thread in threads:
            thread.start()
        yield str(tcp.getsockname()[1]), name
        for listener in (tcp, local):
            listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(10)


def attack(sandbox: Sandbox, program: str, user: str, host_services: tuple[str, ...]) -> dict[str, str]:
    arguments = {"processes": (str(os.getpid()),), "network": host_services}.get(program, ())
    if program == "capabilities" and user != "root":
        findings(sandbox, program)  # guest root leaves a set-id program for the others
    return findings(sandbox, program, *arguments, user=user)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("program", sorted({weakness.program for weakness in WEAKNESSES}))
def test_no_attempt_works(lab: Lab, host_services: tuple[str, ...], program: str, user: str) -> None:
    """Whatever a guest user tries, nothing comes of it, and the sandbox still answers."""
    sandbox = lab.shared()
    assert attack(sandbox, program, user, host_services) == {}
    assert sandbox.exec(["true"]).ok


def test_no_attempt_works_on_a_file_operation(lab: Lab) -> None:
    """File operations are forks of the init: one that runs is as closed as the init, even to the user it runs as."""
    sandbox = lab.shared()
    with sandbox.files.as_user("root").watch("/tmp"):
        assert findings(sandbox, "init", user="root") == {}


@pytest.mark.parametrize(
    "weakness", WEAKNESSES, ids=lambda weakness: f"{weakness.program}-{weakness.user}-{'+'.join(weakness.switches)}"
)
def test_attempts_work_without_the_protection(lab: Lab, host_services: tuple[str, ...], weakness: Weakness) -> None:
    """The same program finds what the protection keeps from it: it can see what it looks for."""
    found = attack(lab.shared(*weakness.switches), weakness.program, weakness.user, host_services)
    assert weakness.found - set(found) == frozenset(), found
