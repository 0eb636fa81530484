"""What a node can leave behind on its host, and whether it did; also what of one sandbox is there.

Make a `Watch` of the state directory; while the node runs, `supervisor_pid()` makes sure that the watch looks for the
right cgroups; when it has ended, `settle()` must be empty.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from barchan.testing.expect import equal

CGROUPS = Path("/sys/fs/cgroup")


def processes() -> Iterator[tuple[int, list[str]]]:
    """Every process of the host with its arguments; one that ends meanwhile is left out."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
            except (FileNotFoundError, ProcessLookupError):
                continue


def parent_of(pid: int) -> int:
    """0 for one that has ended meanwhile."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Watch:
    """One existing state directory, and all that a node that uses it may make on the host."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir.resolve()
        stat = self.state_dir.stat()
        self.cgroup = f"n{stat.st_ino:x}-{stat.st_dev:x}"  # as the container backend names it

    def supervisor_pid(self) -> int | None:
        """The running supervisor of this state directory; None: there is none, as before the first sandbox."""
        found: dict[int, int] = {}
        for pid, argv in self._own_processes():
            if "--cgroup" in argv:
                equal(argv[argv.index("--cgroup") + 1], self.cgroup, "how the backend names its cgroups")
                found[pid] = parent_of(pid)
        # Its children are called as it is until they have become something else.
        return next((pid for pid, parent in found.items() if parent and parent not in found), None)

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

    def sandbox_groups(self, sandbox_id: str) -> list[Path]:
        """The cgroups of one sandbox, with those of what it is hosted in (`ID-KIND`), in every hierarchy."""
        tops = [top / name for top in self._cgroup_dirs() for name in _names(top)]
        return [path for path in tops if path.name == sandbox_id or path.name.startswith(f"{sandbox_id}-")]

    def sandbox_pids(self, sandbox_id: str) -> list[int]:
        """Every process of one sandbox, as the host numbers it: its init, and whatever hosts it, among them."""
        pids: set[int] = set()
        for group in self.sandbox_groups(sandbox_id):
            for file in group.rglob("cgroup.procs"):
                try:
                    pids |= {int(pid) for pid in file.read_text().split()}
                except OSError:  # removed meanwhile
                    continue
        return sorted(pids)

    def sandbox_remains(self, sandbox_id: str) -> list[str]:
        """Everything on the host that bears the name of a sandbox, one line each."""
        found = [f"cgroup: {path}" for path in self.sandbox_groups(sandbox_id)]
        found += [f"process {pid}: {' '.join(argv)}" for pid, argv in processes() if any(sandbox_id in a for a in argv)]
        found += [f"mount: {line}" for line in self._mounts() if sandbox_id in line]
        # The journal and the logs tell of those that ended, too; what is named after one must go with it.
        return found + [f"file: {path}" for path in _below(self.state_dir, depth=3) if sandbox_id in path.name]

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


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # removed meanwhile
        return []


def _below(directory: Path, *, depth: int) -> Iterator[Path]:
    """What lies below a directory, following no links, so far down."""
    for name in _names(directory):
        path = directory / name
        yield path
        if depth > 1 and path.is_dir() and not path.is_symlink():
            yield from _below(path, depth=depth - 1)
