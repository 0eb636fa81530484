"""Read a sandbox's counters from the kernel's files, on cgroup version 1 and 2."""

from barchan.model.sandbox import SandboxStats

ROOT = "/sys/fs/cgroup"


class Counters:
    """Where the kernel counts for one sandbox. A file that is gone (the sandbox ended) counts 0."""

    __slots__ = ("_leaf", "_version")

    def __init__(self, node: str, sandbox_id: str, version: str) -> None:
        self._leaf = f"barchan/{node}/{sandbox_id}"
        self._version = version

    def oom_kills(self) -> int:
        if self._version == "v1":
            return _field(f"{ROOT}/memory/{self._leaf}/memory.oom_control", "oom_kill")
        return _field(f"{ROOT}/{self._leaf}/guest/memory.events", "oom_kill")

    def stats(self) -> SandboxStats:
        if self._version == "v1":
            memory, guest = f"{ROOT}/memory/{self._leaf}", f"{ROOT}/unified/{self._leaf}/guest"
            usage, peak = f"{memory}/memory.usage_in_bytes", f"{memory}/memory.max_usage_in_bytes"
            pids = f"{ROOT}/pids/{self._leaf}/pids.current"
        else:
            guest = f"{ROOT}/{self._leaf}/guest"
            usage, peak, pids = f"{guest}/memory.current", f"{guest}/memory.peak", f"{guest}/pids.current"
        return SandboxStats(
            memory_bytes=_number(usage),
            memory_peak_bytes=_number(peak),
            oom_kills=self.oom_kills(),
            cpu_s=_field(f"{guest}/cpu.stat", "usage_usec") / 1e6,
            pids=_number(pids),
        )


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _number(path: str) -> int:
    return int(_read(path).strip() or 0)


def _field(path: str, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
