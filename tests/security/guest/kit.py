"""What hostile programs share. They run inside a sandbox and need nothing but Python.

A program is a list of attempts. Each runs in a child of its own, which it may lose its life in; what it returns is the
evidence that something worked which must not, and an `OSError` says that it did not. Every attempt that worked is one
JSON line, and the last line says how many were made, so that a program that was stopped half way is not taken for one
that found nothing.
"""

import ctypes
import json
import os
import platform
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable

Evidence = str | None
ATTEMPT_S = 20.0

CLONE_NEWTIME = 0x80
CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

# name: number on x86_64, on aarch64 (0: it has none there)
_NUMBERS = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clone": (56, 220),
    "clone3": (435, 435),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "iopl": (172, 0),
    "ioprio_get": (252, 31),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "listmount": (458, 458),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, 0),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_pages": (279, 239),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pivot_root": (155, 41),
    "prlimit64": (302, 261),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "seccomp": (317, 277),
    "setns": (308, 268),
    "statmount": (457, 457),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}
_COLUMN = {"x86_64": 0, "aarch64": 1}[platform.machine()]
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

Argument = int | bytes | ctypes.Array[ctypes.c_char] | None


def _long(argument: Argument) -> object:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument


def raw(number: int, *arguments: Argument) -> int:
    """A system call by its number."""
    result = int(_libc.syscall(ctypes.c_long(number), *(_long(argument) for argument in arguments)))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def call(name: str, *arguments: Argument) -> int:
    """A system call by its name."""
    number = _NUMBERS[name][_COLUMN]
    if not number:
        raise OSError(38, f"{name} does not exist here")
    return raw(number, *arguments)


def read(path: str, size: int = 4096) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fd, size)
    finally:
        os.close(fd)


def lines(path: str) -> list[str]:
    with open(path) as file:
        return file.read().splitlines()


def write(path: str, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def enter_user_namespace() -> None:
    """Get every capability in a user and mount namespace of one's own; ids need no mapping for that.

    Raises:
        OSError: No such namespace can be made.
    """
    call("unshare", CLONE_NEWUSER | CLONE_NEWNS)


Attempt = Callable[[], Evidence]


def _child(attempt: Attempt, report: int) -> None:
    """Never returns. Exit code 0: the report holds evidence, 1: it did not work, 2: the attempt itself is wrong."""
    try:
        evidence = attempt()
    except OSError:
        os._exit(1)
    except BaseException:
        os.write(report, traceback.format_exc().encode()[-4000:])
        os._exit(2)
    if not evidence:
        os._exit(1)
    os.write(report, evidence.encode()[:1000])
    os._exit(0)


def _run(attempt: Attempt) -> tuple[int, str]:
    """The exit code of the child, negative after a signal, and its report."""
    report, child_report = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(report)
        _child(attempt, child_report)
    os.close(child_report)
    # Looked at again and again: not every kernel that this runs on has descriptors of processes.
    until = time.monotonic() + ATTEMPT_S
    while not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and time.monotonic() < until:
        time.sleep(0.005)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = ""
    if select.select([report], [], [], 0)[0]:
        text = os.read(report, 4096).decode("utf-8", "replace")
    os.close(report)
    return (code if ended else -signal.SIGALRM), text


def run(attempts: dict[str, Attempt]) -> None:
    """Make every attempt and print what worked."""
    for name, attempt in attempts.items():
        code, text = _run(attempt)
        if code == 2:
            print(f"{name}: the attempt is broken:\n{text}", file=sys.stderr)
            sys.exit(1)
        if code == 0:
            print(json.dumps({"attempt": name, "evidence": text}), flush=True)
    print(json.dumps({"attempts": len(attempts)}), flush=True)
