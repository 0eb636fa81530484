"""What containers need of the host, found by trying it, not by asking who we are."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from barchan.backends import tools
from barchan.backends.container import criu
from barchan.model.node import Requirement

CONTAINER = "container"
BUILD = "image build"
LAYERS = "layers as files"
OPEN = 'network="open"'
MANY = "many sandboxes"
MEMORY = "memory snapshots"
PYTHON_MIN = (3, 11)
ATTEMPTS_S = 60
TOOL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONTROLLERS = ("memory", "pids", "cpu")
GUEST_BINARIES = ("barchan-init", "barchan-supervisor", "barchan-pack")

AS_ROOT = "run as root"
USERNS = "sysctl -w user.max_user_namespaces=65536, and where it exists kernel.unprivileged_userns_clone=1"
KERNEL = "use a kernel built with CONFIG_"

# attempt -> (name, needed for, found when it works, remedy when it does not)
TRIED: dict[str, tuple[str, str, str, str]] = {
    "user": ("user namespaces", CONTAINER, "a new one was made", f"as root: {USERNS}"),
    "ids": ("range of user ids", CONTAINER, "65,536 ids were mapped", AS_ROOT),
    "mnt": ("mount namespaces", CONTAINER, "a new one was made", f"{KERNEL}NAMESPACES"),
    "pid": ("pid namespaces", CONTAINER, "a new one was made", f"{KERNEL}PID_NS"),
    "net": ("network namespaces", CONTAINER, "a new one was made", f"{KERNEL}NET_NS"),
    "ipc": ("ipc namespaces", CONTAINER, "a new one was made", f"{KERNEL}IPC_NS"),
    "uts": ("uts namespaces", CONTAINER, "a new one was made", f"{KERNEL}UTS_NS"),
    "cgroup": ("cgroup namespaces", CONTAINER, "a new one was made", f"{KERNEL}CGROUPS"),
    "time": ("time namespaces", "clocks of resumed sandboxes", "a new one was made", f"{KERNEL}TIME_NS"),
    "host_mounts": ("mounts on the host", CONTAINER, "a file system was mounted", f"{AS_ROOT}, with CAP_SYS_ADMIN"),
    "overlay": ("overlayfs", CONTAINER, "mounted in a user namespace", f"{KERNEL}OVERLAY_FS, 5.11 or newer"),
    "erofs": ("EROFS files", LAYERS, "a compressed one was read", f"{AS_ROOT}; {KERNEL}EROFS_FS_BACKED_BY_FILE"),
    "idmap": ("idmapped mounts", CONTAINER, "a mount was shifted", f"{AS_ROOT}; kernel 5.19 or newer"),
    "btrfs": ("btrfs", CONTAINER, "in the kernel", f"modprobe btrfs, or {KERNEL}BTRFS_FS"),
    "loop": ("loop devices", CONTAINER, "one is free", f"{AS_ROOT}; modprobe loop"),
    "seccomp": ("seccomp filters", CONTAINER, "one was installed", f"{KERNEL}SECCOMP_FILTER"),
    "pidfd": ("pidfd", CONTAINER, "one was opened", "use kernel 5.3 or newer"),
    "unix_sockets": ("unix sockets", CONTAINER, "packets, credentials and descriptors pass", f"{KERNEL}UNIX"),
    "open_files": ("open files", MANY, "8,192 at once are allowed", "raise the hard limit (ulimit -Hn) to 8192"),
}  # fmt: skip


def requirements(state_dir: Path = tools.SHARED_STATE_DIR) -> list[Requirement]:
    """Everything checked on this host, what the container backend can't do without first.

    Those with `needed_for == "container"` decide whether it is usable. Takes about 0.1 s and leaves nothing behind.
    `state_dir`: of a node, which may hold tools.
    """
    checked = [*_tried(), *_cgroups(), *_guest_binaries(), _tool("mkfs.btrfs", "btrfs-progs", CONTAINER), _python()]
    checked += [
        _tool("mmdebstrap", "mmdebstrap", BUILD),
        _tool("slirp4netns", "slirp4netns", OPEN),
        _criu(state_dir),
    ]
    return sorted(checked, key=lambda item: item.needed_for != CONTAINER)


def usable(checked: list[Requirement]) -> bool:
    """Whether the container backend can run here."""
    return all(item.ok for item in checked if item.needed_for == CONTAINER)


def mounts_erofs(checked: list[Requirement]) -> bool:
    """Whether layers can stay EROFS files here, or must be unpacked."""
    return all(item.ok for item in checked if item.needed_for == LAYERS)


def _tried() -> Iterator[Requirement]:
    program = Path(__file__).with_name("attempts.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", program], capture_output=True, check=False, timeout=ATTEMPTS_S, cwd="/"
    )
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        outcome = dict.fromkeys(TRIED, f"could not be tried: {lines[-1] if lines else done.returncode}")
    else:
        outcome = msgspec.json.decode(done.stdout, type=dict[str, str])
    for key, (name, needed_for, found, remedy) in TRIED.items():
        failed = outcome[key]
        yield Requirement(
            name=name, ok=not failed, needed_for=needed_for, found=failed or found, remedy=remedy if failed else ""
        )


def _cgroups() -> Iterator[Requirement]:
    """Version 1 controllers with a version 2 tree beside them, or version 2 alone."""
    version1, version2 = _cgroup_mounts()
    bound = {name: path for name, path in version1.items() if name in CONTROLLERS}
    if bound or version2 is None:
        missing = [name for name in CONTROLLERS if name not in bound]
        found = f"version 1: {', '.join(bound) or 'none mounted'}"
        if missing:
            found += f"; missing: {', '.join(missing)}"
    else:
        have = _read(version2 / "cgroup.controllers").split()
        missing = [name for name in CONTROLLERS if name not in have]
        found = f"version 2: {', '.join(name for name in have if name in CONTROLLERS) or 'none'}"
    yield Requirement(
        name="cgroup controllers",
        ok=not missing,
        needed_for=CONTAINER,
        found=found,
        remedy=f"mount or delegate the cgroup controllers {', '.join(missing)}" if missing else "",
    )
    trees = sorted({*bound.values(), *([version2] if version2 else [])})
    failed = "; ".join(filter(None, (_try_cgroup(tree) for tree in trees))) or ("" if trees else "no cgroups mounted")
    yield Requirement(
        name="cgroups of our own",
        ok=not failed,
        needed_for=CONTAINER,
        found=failed or f"made and removed in {len(trees)} hierarchies",
        remedy="run as root, or with these directories delegated to you" if failed else "",
    )
    kill = "no version 2 hierarchy is mounted" if version2 is None else _try_cgroup(version2, "cgroup.kill")
    yield Requirement(
        name="cgroup.kill",
        ok=not kill,
        needed_for=CONTAINER,
        found=kill or "there",
        remedy="mount cgroup2 (beside version 1: on /sys/fs/cgroup/unified); kernel 5.14 or newer" if kill else "",
    )


def _cgroup_mounts() -> tuple[dict[str, Path], Path | None]:
    """Mount points of version 1 by controller, and the one of version 2."""
    version1: dict[str, Path] = {}
    version2 = None
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4])
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" and version2 is None:
            version2 = point
        elif kind == "cgroup":
            for option in options.split(","):
                version1.setdefault(option, point)
    return version1, version2


def _try_cgroup(tree: Path, file: str = "cgroup.procs") -> str:
    """Make a cgroup and remove it again: "" if that works and `file` is in it."""
    path = tree / f"barchan-probe-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        return f"{tree}: {errno.errorcode.get(error.errno or 0, '')} {error.strerror}"
    try:
        return "" if (path / file).exists() else f"{tree} has no {file}"
    finally:
        path.rmdir()


def _guest_binaries() -> Iterator[Requirement]:
    directory = Path(__file__).parents[2] / "_guest"
    for name in GUEST_BINARIES:
        ok = os.access(directory / name, os.X_OK)
        yield Requirement(
            name=name,
            ok=ok,
            needed_for=CONTAINER,
            found="installed" if ok else f"not in {directory}",
            remedy="" if ok else "install gcc, make and libc6-dev, then reinstall barchan (in a checkout: make setup)",
        )


def _tool(tool: str, package: str, needed_for: str) -> Requirement:
    path = shutil.which(tool, path=TOOL_PATH)
    remedy = "" if path else f"apt-get install {package}"
    return Requirement(
        name=tool, ok=path is not None, needed_for=needed_for, found=path or "not installed", remedy=remedy
    )


def _criu(state_dir: Path) -> Requirement:
    found = criu.find(state_dir)
    return Requirement(
        name="criu",
        ok=found is not None,
        needed_for=MEMORY,
        found=f"{found.version}: {found.command[-1]}" if found else "none of version 4 or later",
        remedy="" if found else "barchan tools install criu",
    )


def _python() -> Requirement:
    ok = sys.version_info >= PYTHON_MIN
    found = ".".join(map(str, sys.version_info[:3]))
    wanted = ".".join(map(str, PYTHON_MIN))
    return Requirement(
        name="python", ok=ok, needed_for=CONTAINER, found=found, remedy="" if ok else f"use Python {wanted} or newer"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
