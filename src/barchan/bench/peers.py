"""What others need for the same: bare kernel calls, bwrap, crun, runc and Python's subprocess.

Run as a program it measures crun and runc, crun in a mount namespace without the version 2 cgroup mount that it
refuses to work beside: `python -m barchan.bench.peers RUNTIME ROOTFS STATE COUNT`, samples as JSON on stdout.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from barchan.bench.ground import Ground


class Samples(Struct, kw_only=True):
    """Milliseconds. What a contender can't do stays empty."""

    create_ms: list[float] = []
    exec_ms: list[float] = []
    destroy_ms: list[float] = []

    def add(self, other: "Samples") -> None:
        self.create_ms = self.create_ms + other.create_ms
        self.exec_ms = self.exec_ms + other.exec_ms
        self.destroy_ms = self.destroy_ms + other.destroy_ms


class Bare(Struct, kw_only=True):
    """What `bench/bare/bare.c` prints."""

    iterations: int
    workers: int
    create_us_p50: float
    create_us_p95: float
    create_us_p99: float
    destroy_us_p50: float
    rate_per_s: float


def bare(ground: Ground, count: int, workers: int) -> Bare:
    """The kernel's own cost of the same isolation."""
    output = subprocess.run(
        [
            ground.programs / "bare",
            *("--layer", ground.layer),
            *("--init", ground.programs / "bare-init"),
            *("--payload", ground.rootfs / "payload"),
            *("--pool", ground.state_dir / "bare.img"),
            *("-n", str(count)),
            *("-j", str(workers)),
        ],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    return msgspec.json.decode(output.splitlines()[-1], type=Bare)


def fork_exec(ground: Ground, count: int, program: str) -> Samples:
    """fork, execve and wait, in C."""
    output = subprocess.run(
        [ground.programs / "forkexec", str(count), ground.rootfs / program], check=True, stdout=subprocess.PIPE
    ).stdout
    return Samples(exec_ms=[int(line) / 1e6 for line in output.split()])


def _first_instruction_ms(command: list[str]) -> float:
    """From now to the clock that the payload reads first."""
    began_ns = time.monotonic_ns()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL).stdout
    return (int(output.split()[-1]) - began_ns) / 1e6


def _timed_ms(command: list[str]) -> float:
    began_ns = time.monotonic_ns()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return (time.monotonic_ns() - began_ns) / 1e6


def python_subprocess(ground: Ground, count: int) -> Samples:
    """No isolation at all."""
    payload, true = os.fspath(ground.rootfs / "payload"), os.fspath(ground.rootfs / "true")
    return Samples(
        create_ms=[_first_instruction_ms([payload]) for _ in range(count)],
        exec_ms=[_timed_ms([true]) for _ in range(count)],
    )


def bwrap(ground: Ground, count: int) -> Samples:
    """bubblewrap with all namespaces, a read-only root and a tmpfs; no cgroups, no seccomp filter."""
    command = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", os.fspath(ground.rootfs), "/"]
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "/payload"]
    return Samples(create_ms=[_first_instruction_ms(command) for _ in range(count)])


def oci(runtime: str, ground: Ground, count: int) -> Samples:
    """crun or runc with their default configuration, root directory read-only, on the same programs."""
    state = ground.state_dir / runtime
    command = [
        sys.executable,
        "-m",
        "barchan.bench.peers",
        runtime,
        os.fspath(ground.rootfs),
        os.fspath(state),
        str(count),
    ]
    if runtime == "crun":
        drop = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'
        command = ["unshare", "-m", "--propagation", "private", "sh", "-c", drop, "sh", *command]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.json.decode(output.splitlines()[-1], type=Samples)


PEERS: dict[str, Callable[[Ground, int], Samples]] = {
    "subprocess": python_subprocess,
    "bwrap": bwrap,
    "crun": lambda ground, count: oci("crun", ground, count),
    "runc": lambda ground, count: oci("runc", ground, count),
}


def missing() -> list[str]:
    """Peers whose program is not installed."""
    return [name for name in ("bwrap", "crun", "runc") if shutil.which(name) is None]


def _bundle(runtime: str, rootfs: Path, folder: Path, program: str) -> Path:
    """An OCI bundle that runs `program`."""
    folder.mkdir(parents=True)
    subprocess.run([runtime, "spec"], cwd=folder, check=True)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["process"]["terminal"] = False
    config["process"]["args"] = [program]
    config["root"] = {"path": os.fspath(rootfs), "readonly": True}
    config["linux"]["resources"] = {
        "memory": {"limit": 512 << 20},
        "pids": {"limit": 512},
        "cpu": {"quota": 100_000, "period": 100_000},
    }
    path.write_text(json.dumps(config))
    return folder


def _measure_oci(runtime: str, rootfs: Path, state: Path, count: int) -> Samples:
    options = ["--root", os.fspath(state / "root")]
    if runtime == "crun":
        options.append("--cgroup-manager=cgroupfs")
    runner = [runtime, *options]
    once = _bundle(runtime, rootfs, state / "once", "/payload")
    samples = Samples()
    for index in range(count):
        samples.create_ms.append(
            _first_instruction_ms([*runner, "run", "--bundle", os.fspath(once), f"bench-once-{index}"])
        )
    idle = _bundle(runtime, rootfs, state / "idle", "/pause")
    subprocess.run(
        [*runner, "run", "--detach", "--bundle", os.fspath(idle), "bench-idle"], check=True, stdin=subprocess.DEVNULL
    )
    try:
        samples.exec_ms = [_timed_ms([*runner, "exec", "bench-idle", "/true"]) for _ in range(count)]
    finally:
        samples.destroy_ms.append(_timed_ms([*runner, "delete", "--force", "bench-idle"]))
        shutil.rmtree(state)
    return samples


if __name__ == "__main__":
    measured = _measure_oci(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")
