"""CRIU: where it is, what it is told, and what its complaints mean."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from barchan.backends.tools import places

MAJOR_MIN = 4
VERSION_TIMEOUT_S = 20.0
REASON_CHARS_MAX = 300

# CRIU's words -> what the guest holds. The first of its errors that one of these finds decides.
REASONS: tuple[tuple[str, str], ...] = (
    (r"ctty inheritance", "a program has /dev/tty open"),
    (r"secretmem", "a program has secret memory open (memfd_secret)"),
    (r"landlock", "a program has a Landlock ruleset open"),
    (
        r"mqueue|Can't lookup mount",
        "a program has a POSIX message queue open, or a file outside the sandbox's own mounts",
    ),
    (r"traced|PTRACE_SEIZE|Unable to (seize|interrupt)", "a program traces another"),
    (r"inotify|fsnotify|fanotify|irmap", "a program watches files (inotify or fanotify)"),
    (r"In-flight connection", "a connection has come in that its server has not accepted yet"),
    (r"half-?closed|TCP_REPAIR|tcp.*state", "a TCP connection is in a state that can't be stored"),
    (r"ghost", "a deleted file of more than 64 MiB is open"),
    (r"mount", "there is a mount of the guest's own"),
    (r"io_uring", "a program uses io_uring"),
    (r"userfaultfd|uffd", "a program handles its own page faults (userfaultfd)"),
    (r"bpf", "a program has a BPF object open"),
    (r"perf_event", "a program has a performance counter open"),
    (r"Unknown|unsupported|BUG!", "a program has something open of a kind that can't be stored"),
    (r"lock", "a program holds a file lock that can't be stored"),
)


class Criu(Struct, frozen=True):
    """A CRIU that can be used: its command and version."""

    command: tuple[str, ...]
    version: str


_HARMLESS = "rlimit: Can't setup RLIMIT_NOFILE for self"  # where root lacks CAP_SYS_RESOURCE


def installed(directory: Path) -> tuple[str, ...]:
    """The command of what `barchan tools install criu` has put into `directory`; empty if it has not.

    The release that it comes from has another C library than the host, hence its own loader.
    """
    program = directory / "root/usr/sbin/criu"
    loaders = sorted(directory.glob("root/usr/lib/*-linux-gnu/ld-linux-*.so.*"))
    if not loaders or not program.exists():
        return ()
    return (os.fspath(loaders[0]), "--library-path", os.fspath(loaders[0].parent), os.fspath(program))


def find(state_dir: Path) -> Criu | None:
    """The CRIU of this host, asked for its version; None where there is none of 4.0 or later. Blocks for some 20 ms."""
    candidates = [installed(directory) for directory in places(state_dir, "criu")]
    on_path = shutil.which("criu", path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    candidates += [(on_path,)] if on_path else []
    for command in filter(None, candidates):
        version = version_of(command)
        if version and int(version.split(".")[0]) >= MAJOR_MIN:
            return Criu(command, version)
    return None


def version_of(command: Sequence[str]) -> str:
    """What it says of itself, as "4.1.1"; empty if it does not run."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, timeout=VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(rb"Version:\s*(\d+(?:\.\d+)*)", done.stdout)
    return found[1].decode() if found and done.returncode == 0 else ""


def reason(log: str) -> tuple[str, str]:
    """What of a guest's CRIU could not store, in plain words ("" if that is not known), and its own first error."""
    errors = [words for words in re.findall(r"Error \([^)]*\): (.*)", log) if not words.startswith(_HARMLESS)]
    said = "" if "Error (" in log else log.strip()  # by the loader, or by the shell of a wrapper
    first = errors[0][:REASON_CHARS_MAX] if errors else said[-REASON_CHARS_MAX:]
    for error in errors:
        for pattern, words in REASONS:
            if re.search(pattern, error, re.IGNORECASE):
                return words, first
    return "", first


def is_out_of_room(log: str) -> bool:
    """Whether it failed because the disk took no more."""
    return re.search(r"Error \(.*(No space left on device|Disk quota exceeded)", log) is not None


def dump_arguments(
    pid: int, images: Path, group: str, mounts: Sequence[str], files: Sequence[str], *, keep: bool
) -> list[str]:
    """CRIU's, to dump the sandbox whose init is `pid`, all of whose processes are in the frozen `group`."""
    words = ["dump", "--tree", str(pid), "--images-dir", os.fspath(images), "--freeze-cgroup", group]
    words += [*_COMMON, *(["--leave-running"] if keep else [])]
    for point in mounts:
        words += ["--external", f"mnt[{point}]:{point}"]
    for name in files:
        words += ["--external", name]
    return words


def restore_arguments(
    images: Path, mounts: Sequence[str], files: Sequence[str], first_fd: int, work_dir: str, *, lazy: bool
) -> list[str]:
    """CRIU's, to restore from `images`: mounts lie in /run/job by number, files are descriptors from `first_fd` on."""
    words = ["restore", "--images-dir", os.fspath(images), "--work-dir", work_dir, "--root", "/run/job/root"]
    words += ["--restore-detached", "--restore-sibling", "--skip-file-rwx-check", *_COMMON]
    words += ["--lazy-pages"] if lazy else []
    for index, point in enumerate(mounts):
        words += ["--external", f"mnt[{point}]:/run/job/{index}"]
    for index, name in enumerate(files):
        words += ["--inherit-fd", f"fd[{first_fd + index}]:{name}"]
    return words


_COMMON = (
    *("--network-lock", "skip", "--manage-cgroups=ignore", "--file-locks", "--ghost-limit", "64M"),
    *("--tcp-established", "-v1"),
)
