"""What a gVisor guest is started with: its OCI specification, and the words for runsc's programs. No I/O."""

import math
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from barchan.backends.gvisor.programs import DIRECTORY, INIT, INIT_UID, RUNSC, SPOOL, STARTER
from barchan.model.sandbox import Network, SandboxSpec

CONTAINER_ID: Final = "guest"  # that the starter gives it
DOOR_DIR: Final = "/dev/shm/barchan-gvisor"  # where the guest has a directory of its own kernel's
SENTRY_UID: Final = 65534
OVERHEAD_MIB: Final = 96  # sentry, gofer, starter, and what the kernel keeps for them
STORING_MIB: Final = 64  # above all that, to store or load the rest: 5 were seen for a few programs, 58 for 150
STORING_MIB_MAX: Final = 256
PIDS_SPARE: Final = 1024  # threads of these
PIDS_EACH: Final = 4  # threads of the host for one of the guest, at most
PIDS_MAX: Final = 1 << 16
SPOOL_BYTES: Final = 64 << 20  # in the guest's memory
SPOOL_SPARE_BYTES: Final = 4 << 20
SHM_BYTES: Final = 64 << 20
OPEN_FILES: Final = (65536, 1048576)
PLATFORMS: Final = ("systrap", "ptrace")  # the fastest first

# As guest/supervisor/privileges.c gives them; SYS_ADMIN sets the host name; DAC_OVERRIDE, which the init drops at once,
# lets it be found in a directory that nobody else may enter.
_OF_INIT: Final = ("CHOWN", "DAC_OVERRIDE", "SETUID", "SETGID", "SETPCAP", "KILL", "SYS_RESOURCE", "SYS_ADMIN")
_OF_ROOT: Final = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "SETGID": 6,
    "SETUID": 7,
    "SETFCAP": 31,
    "SYS_CHROOT": 18,
}


def outer_spec(spec: SandboxSpec) -> SandboxSpec:
    """Of the container that holds such a guest."""
    return replace(
        spec,
        memory_mib=spec.memory_mib + OVERHEAD_MIB,
        pids_max=min(PIDS_MAX, PIDS_SPARE + PIDS_EACH * spec.pids_max),
        root="capable",
        user=None,
        workdir=None,
        env={},
        setup=None,
    )


def has_own_network(network: Network) -> bool:
    """Whether the guest's kernel has a network of its own, with nothing but a loopback, or uses the outer's."""
    return network == "none"


def starter_words(spec: SandboxSpec, platform: str) -> list[str]:
    """The command in the outer that runs the guest; it reads the guest's specification from descriptor 3."""
    runsc_flags = [
        f"--platform={platform}",
        f"--network={'none' if has_own_network(spec.network) else 'host'}",
        "--overlay2=none",
        "--directfs=false",
        "--file-access-mounts=exclusive",
        "--ignore-cgroups=true",
        # It makes no namespace, which the outer has made: the gofer changes its root to what the outer has as such.
        "--TESTONLY-unsafe-nonroot=true",
    ]
    boot_flags = [f"--cpu-num={max(1, math.ceil(spec.cpus))}", f"--total-memory={spec.memory_mib << 20}"]
    program = f"/{DIRECTORY}/{STARTER}"
    return [program, DOOR_DIR, str(SENTRY_UID), f"/{DIRECTORY}/{RUNSC}", *runsc_flags, "--", *boot_flags]


def oci(spec: SandboxSpec) -> bytes:
    """The guest's specification, as JSON. Its root is the outer's, whose mounts it does not see."""
    root_bits = sum(1 << bit for bit in _OF_ROOT.values()) if spec.root == "capable" else 0
    names = {*_OF_INIT, *(_OF_ROOT if root_bits else ())}
    capabilities = sorted(f"CAP_{name}" for name in names)
    shm_bytes = min(SHM_BYTES, spec.memory_mib << 19)
    value: dict[str, Any] = {
        "ociVersion": "1.0.0",
        "hostname": spec.hostname,
        "root": {"path": "/", "readonly": False},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "env": [],
            "noNewPrivileges": True,
            "args": _init_words(root_bits),
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted", "inheritable"), capabilities),
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "soft": OPEN_FILES[0], "hard": OPEN_FILES[1]},
                {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
            ],
        },
        # The first two are served by the gofer, like the root, and the starter knows of them.
        "mounts": [
            _mount(f"/{DIRECTORY}", "bind", ["ro"]),
            _mount("/tmp", "bind", []),
            _mount("/proc", "proc", []),
            _mount("/dev", "tmpfs", []),
            _mount("/dev/shm", "tmpfs", ["nosuid", "nodev", "mode=1777", f"size={shm_bytes}"]),
            _mount("/sys", "sysfs", ["ro"]),
            _mount("/sys/fs/cgroup", "cgroup", []),
            _mount(f"/{DIRECTORY}/{SPOOL}", "tmpfs", _spool_options()),
        ],
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }
    return msgspec.json.encode(value)


def _init_words(root_bits: int) -> list[str]:
    return [
        f"/{DIRECTORY}/{INIT}",
        *("--gvisor-uid", str(INIT_UID)),  # first: the rest is opened as that user
        *("--serial-fd", "0"),
        *("--spool-dir", f"/{DIRECTORY}/{SPOOL}"),
        *("--spool-max-bytes", str(SPOOL_BYTES)),
        *("--root-capabilities", str(root_bits)),
    ]


def _spool_options() -> list[str]:
    return ["mode=0700", f"uid={INIT_UID}", f"gid={INIT_UID}", f"size={SPOOL_BYTES + SPOOL_SPARE_BYTES}"]


def _mount(destination: str, kind: str, options: Sequence[str]) -> dict[str, Any]:
    source = destination if kind == "bind" else kind
    return {"destination": destination, "type": kind, "source": source, "options": options}
