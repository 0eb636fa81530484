"""What a test may require of its host: name -> probe that answers "" or what is missing and how to get it."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path


def _root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def _controllers1() -> set[str]:
    """Controllers bound to version 1 hierarchies."""
    rows = [line.split() for line in Path("/proc/cgroups").read_text().splitlines()[1:]]
    return {name for name, hierarchy, _, enabled in rows if hierarchy != "0" and enabled == "1"}


def _cgroup1() -> str:
    missing = {"memory", "pids", "cpu"} - _controllers1()
    return f"no version 1 cgroup hierarchy has {', '.join(sorted(missing))}" if missing else ""


def _cgroup2() -> str:
    """Limits on version 2: the controllers are in its root."""
    root = Path("/sys/fs/cgroup/cgroup.controllers")
    have = set(root.read_text().split()) if root.exists() else set()
    missing = {"memory", "pids", "cpu"} - have
    return f"cgroup version 2 lacks {', '.join(sorted(missing))}" if missing else ""


def _cgroup() -> str:
    return "no cgroup with memory, pids and cpu, of either version" if _cgroup1() and _cgroup2() else ""


def _userns() -> str:
    """A child process tries it, since unshare() would change the test process itself."""
    clone_newuser = 0x10000000
    pid = os.fork()
    if pid == 0:
        os._exit(0 if ctypes.CDLL(None).unshare(clone_newuser) == 0 else 1)
    return "" if os.waitpid(pid, 0)[1] == 0 else "user namespaces are refused (sysctl user.max_user_namespaces)"


def _tool(name: str, package: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"no {name} (Debian package {package})"


def _slirp4netns() -> str:
    if missing := _tool("slirp4netns", "slirp4netns")():
        return missing
    return "" if Path("/dev/net/tun").exists() else "no /dev/net/tun"


def _zram() -> str:
    return "" if Path("/sys/class/zram-control/hot_add").exists() else "no zram (modprobe zram)"


def _fuse() -> str:
    return "" if Path("/dev/fuse").exists() else "no /dev/fuse (modprobe fuse)"


def _moto() -> str:
    found = all(importlib.util.find_spec(name) for name in ("moto", "flask", "flask_cors"))
    return "" if found else "no moto (pip install -e '.[stores]')"


def _criu() -> str:
    from barchan.backends.container import criu
    from barchan.backends.tools import SHARED_STATE_DIR

    return "" if criu.find(SHARED_STATE_DIR) else "no CRIU of version 4 (barchan tools install criu)"


def _qemu() -> str:
    from barchan.backends import tools
    from barchan.backends.qemu import install

    return "" if install.find(tools.SHARED_STATE_DIR) else "no QEMU of version 10 (barchan tools install qemu)"


def _runsc() -> str:
    from barchan.backends import tools
    from barchan.backends.gvisor import install

    return "" if install.find(tools.SHARED_STATE_DIR) else "no runsc (barchan tools install runsc)"


def _guest_kernel() -> str:
    from barchan.backends.microvm import kernel

    return "" if kernel.best(kernel.SHARED_STATE_DIR) else "no kernel for microVMs (barchan kernel install)"


def _static_libc() -> str:
    if missing := _tool("gcc", "gcc")() or _tool("make", "make")():
        return missing
    found = subprocess.run(["gcc", "-print-file-name=libc.a"], capture_output=True, text=True, check=True).stdout
    return "" if Path(found.strip()).is_absolute() else "no static C library (Debian package libc6-dev)"


PROBES: dict[str, Callable[[], str]] = {
    "root": _root,
    "cgroup": _cgroup,
    "cgroup1": _cgroup1,
    "cgroup2": _cgroup2,
    "userns": _userns,
    "static-libc": _static_libc,
    "mmdebstrap": _tool("mmdebstrap", "mmdebstrap"),
    "mkfs.erofs": _tool("mkfs.erofs", "erofs-utils"),
    "fsck.erofs": _tool("fsck.erofs", "erofs-utils"),
    "umoci": _tool("umoci", "umoci"),
    "skopeo": _tool("skopeo", "skopeo"),
    "crun": _tool("crun", "crun"),
    "buildah": _tool("buildah", "buildah"),
    "docker-registry": _tool("docker-registry", "docker-registry"),
    "htpasswd": _tool("htpasswd", "apache2-utils"),
    "mkfs.btrfs": _tool("mkfs.btrfs", "btrfs-progs"),
    "mkfs.ext4": _tool("mkfs.ext4", "e2fsprogs"),
    "curl": _tool("curl", "curl"),
    "openssl": _tool("openssl", "openssl"),
    "slirp4netns": _tool("slirp4netns", "slirp4netns"),
    "ip": _tool("ip", "iproute2"),
    "fuse": _fuse,
    "zram": _zram,
    "mkswap": _tool("mkswap", "util-linux"),
    "nginx": _tool("nginx", "nginx-light"),
    "fsck.fat": _tool("fsck.fat", "dosfstools"),
    "mtools": _tool("mtype", "mtools"),
    "criu": _criu,
    "guest-kernel": _guest_kernel,
    "qemu": _qemu,
    "runsc": _runsc,
    "moto": _moto,
}


ONE_OF = {"cgroup1", "cgroup2"}  # a host has one or the other; "cgroup" asks for either


def must_run() -> set[str]:
    """Requirements whose absence is a failure: those named in BARCHAN_MUST_RUN, and in CI all but the alternatives."""
    named = {name for name in os.environ.get("BARCHAN_MUST_RUN", "").split(",") if name}
    if unknown := named - set(PROBES):
        raise ValueError(f"BARCHAN_MUST_RUN names unknown requirements: {', '.join(sorted(unknown))}")
    return named | (set(PROBES) - ONE_OF if os.environ.get("CI") else set())
