"""Read a sandbox's counters from the kernel's files, on cgroup version 1 and 2."""

from pathlib import Path

from barchan.model.sandbox import SandboxStats

ROOT = Path("/sys/fs/cgroup")


class Counters:
    """Where the kernel counts for one sandbox. A file that is gone (the sandbox ended) counts 0."""

    def __init__(self, node: str, sandbox_id: str, version: str) -> None:
        leaf = Path("barchan") / node / sandbox_id
        if version == "v1":
            memory, pids = ROOT / "memory" / leaf, ROOT / "pids" / leaf
            self._oom = memory / "memory.oom_control"
            self._memory = memory / "memory.usage_in_bytes"
            self._peak = memory / "memory.max_usage_in_bytes"
            self._cpu = ROOT / "unified" / leaf / "guest" / "cpu.stat"
            self._pids = pids / "pids.current"
        else:
            guest = ROOT / leaf / "guest"
            self._oom = guest / "memory.events"
            self._memory = guest / "memory.current"
            self._peak = guest / "memory.peak"
            self._cpu = guest / "cpu.stat"
            self._pids = guest / "pids.current"

    def oom_kills(self) -> int:
        return _field(self._oom, "oom_kill")

    def stats(self) -> SandboxStats:
        return SandboxStats(
            memory_bytes=_number(self._memory),
            memory_peak_bytes=_number(self._peak),
            oom_kills=self.oom_kills(),
            cpu_s=_field(self._cpu, "usage_usec") / 1e6,
            pids=_number(self._pids),
        )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def _number(path: Path) -> int:
    return int(_read(path).strip() or 0)


def _field(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
