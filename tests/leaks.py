"""What a node can leave behind on its host, and whether it did.

Make a `Watch` of the state directory; while the node runs, `supervisor_pid()` makes sure that the watch looks for the
right cgroups; when it has ended, `settle()` must be empty.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def processes() -> Iterator[tuple[int, list[str]]]:
    """Every process of the host with its arguments; one that ends meanwhile is left out."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
            except (FileNotFoundError, ProcessLookupError):
                continue


class Watch:
    """One existing state directory, and all that a node that uses it may make on the host."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir.resolve()
        stat = self.state_dir.stat()
        self.cgroup = f"n{stat.st_ino:x}-{stat.st_dev:x}"  # as the container backend names it

    def supervisor_pid(self) -> int | None:
        """The running supervisor of this state directory; None: there is none, as before the first sandbox."""
        for pid, argv in self._own_processes():
            if "--cgroup" in argv:
                assert argv[argv.index("--cgroup") + 1] == self.cgroup, "the backend names its cgroups otherwise"
                return pid
        return None

    def remains(self, *, files: frozenset[str] | None = None) -> list[str]:
        """Everything of this node that is on the host now, one line each.

        Args:
            files: Names that may stay in the state directory; None: its files are not looked at.
        """
        found = [f"process {pid}: {' '.join(argv)}" for pid, argv in self._own_processes()]
        found += [f"mount: {line}" for line in self._mounts()]
        found += [f"cgroup: {path}" for path in self._cgroup_dirs()]
        found += [f"loop device: {device}" for device in self._loop_devices()]
        if files is not None and self.state_dir.exists():
            found += [f"file: {path}" for path in sorted(self.state_dir.iterdir()) if path.name not in files]
        return found

    def settle(self, timeout_s: float = 10.0, *, files: frozenset[str] | None = None) -> list[str]:
        """Wait until nothing remains; returns what still does after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (found := self.remains(files=files)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _own_processes(self) -> list[tuple[int, list[str]]]:
        """Node, supervisor and helpers name the state directory in an argument; guests are found by their cgroups."""
        own = str(self.state_dir)
        return [
            (pid, argv)
            for pid, argv in processes()
            if pid != os.getpid() and any(arg == own or arg.startswith(f"{own}/") or f"={own}" in arg for arg in argv)
        ]

    def _mounts(self) -> list[str]:
        """Mounts below the state directory or of its files, in any mount namespace of the host."""
        namespaces: set[str] = set()
        found: set[str] = set()
        for pid, _ in processes():
            try:
                namespace = os.readlink(f"/proc/{pid}/ns/mnt")
                if namespace in namespaces:
                    continue
                text = Path(f"/proc/{pid}/mountinfo").read_text()
            except OSError:  # ended meanwhile
                continue
            namespaces.add(namespace)
            found |= {line for line in text.splitlines() if f"{self.state_dir}/" in line}
        return sorted(found)

    def _cgroup_dirs(self) -> list[Path]:
        roots = [CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())]
        tops = [root / top for root in roots for top in ("barchan", "barchan-batch")]
        return [path for top in tops if (path := top / self.cgroup).exists()]

    def _loop_devices(self) -> list[str]:
        found = []
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                target = backing.read_text().strip()
            except OSError:  # detached meanwhile
                continue
            if target.startswith(f"{self.state_dir}/"):
                found.append(f"{backing.parts[3]} of {target}")
        return found
