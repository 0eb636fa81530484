"""All that a node has on its host, so that what nobody owns is seen: groups, layers, cuts, files, processes, mounts."""

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from barchan.image.store import ImageStore
from barchan.model.image import ASLEEP_PREFIX
from barchan.snapshot.shelf import FOLDER
from scripts.own_node import CGROUPS, OwnNode, processes

PAGER = "barchan.snapshot.pager"
LASTING = ("memory", "pager", "pager.log", "reader.log", "cache")  # folders and logs, made when they are first needed
PAGER_FILES = frozenset({"lock", "pager.sock"})
OWN_PROCESSES = {"barchan.node": 1, "barchan-supervisor": 1, PAGER: 2}  # the pager has a keeper
ASLEEP_MAX = 1  # images of one sandbox's files
SUPERVISOR_GROUP = "init"
IN_POOL = ("upper", "spool", "cut", "copy")


class Remains:
    """What one node has made, a line of text each, which holds the id of the sandbox that owns it, if one does."""

    def __init__(self, own: OwnNode) -> None:
        self._own = own
        self._state = own.state_dir
        lasting = (f"file {own.state_dir.name}/{name}" for name in LASTING)
        self._fixed = {*self._files(), *self._images(), *lasting}

    def now(self) -> list[str]:
        """Everything there is, as long as every sandbox is awake and no slot is kept."""
        found = [*self._groups(), *self._pool(), *self._images(), *self._processes(), *self._pager(), *self._shelf()]
        return found + [line for line in self._files() if line not in self._fixed]

    def unowned(self, known: Collection[str]) -> list[str]:
        """What is there beyond what these sandboxes may have, and beyond what was there at first."""
        lines = [line for line in self.now() if line not in self._fixed]
        asleep = Counter(owner for line in lines if line.startswith("image ") and (owner := _owner(line, known)))
        crowded = [f"{count} images of {owner}" for owner, count in asleep.items() if count > ASLEEP_MAX]
        return crowded + [line for line in lines if line.startswith("!") or _owner(line, known) is None]

    def settle(self, known: Collection[str], timeout_s: float) -> list[str]:
        """What is still unowned after that long."""
        return _settled(lambda: self.unowned(known), timeout_s)

    def settle_after_end(self, timeout_s: float) -> list[str]:
        """What is still there that long after the node was shut down."""
        return _settled(self._after_end, timeout_s)

    def _after_end(self) -> list[str]:
        found = [*self._groups(with_top=True), *self._images(), *self._shelf(), *self._pager()]
        found += [f"process {' '.join(argv)}" for _, argv in processes() if str(self._state) in " ".join(argv)]
        found += [f"mount {line}" for line in _mounts() if str(self._state) in line]
        return [line for line in found if line not in self._fixed] + [f"loop {path}" for path in self._loops()]

    # where to look

    def _groups(self, *, with_top: bool = False) -> Iterator[str]:
        for root in (CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir())):
            for parent in ("barchan", "barchan-batch"):
                top = root / parent / self._own.cgroup
                for directory, _, _ in os.walk(top):
                    if with_top or (Path(directory).parent == top and Path(directory).name != SUPERVISOR_GROUP):
                        yield f"cgroup {directory}"

    def _pool(self) -> Iterator[str]:
        """By a descriptor of the supervisor's: its mount hangs on nothing else."""
        for fd in Path(f"/proc/{self._own.supervisor_pid}/fd").iterdir():
            if all((fd / name).is_dir() for name in IN_POOL):
                for name in os.listdir(fd):
                    if name not in IN_POOL:
                        yield f"!in the pool: {name}"
                yield from (f"layer {name}" for name in os.listdir(fd / "upper"))
                yield from (f"spool {name}" for name in os.listdir(fd / "spool"))
                yield from (f"copy {name}" for name in os.listdir(fd / "copy"))
                yield from (f"!cut {name}" for name in os.listdir(fd / "cut"))
                return
        yield "!the supervisor has no pool"

    def _files(self) -> Iterator[str]:
        """At the top of the state directory, and memory directories."""
        for folder in (self._state, self._state / "memory", self._state / "images"):
            if folder.is_dir():
                yield from (f"file {folder.name}/{name}" for name in os.listdir(folder))

    def _shelf(self) -> Iterator[str]:
        """Of sandboxes that are awake nothing lies there."""
        if (self._state / FOLDER).is_dir():
            yield from (f"!snapshot {name}" for name in os.listdir(self._state / FOLDER))

    def _images(self) -> Iterator[str]:
        images = ImageStore(self._state / "images")
        templates = images.templates()
        yield from (f"image {template.name}" for template in templates if template.name.startswith(ASLEEP_PREFIX))
        needed = {images.layer_path(layer).name for template in templates for layer in template.layers}
        for path in (images.root / "layers").iterdir():
            if path.name not in needed:
                yield f"image layer {path.name}"
        yield from (f"image file {name}" for name in os.listdir(images.root / "tmp"))

    def _pager(self) -> Iterator[str]:
        """A folder for each sandbox whose memory is coming in."""
        if (self._state / "pager").is_dir():
            yield from (f"!pager {name}" for name in os.listdir(self._state / "pager") if name not in PAGER_FILES)

    def _processes(self) -> Iterator[str]:
        """Those of sandboxes by their groups; of the others no more than a node and its helpers have."""
        others = Counter[str]()
        ours = {self._own.pid, self._own.supervisor_pid}
        rows = {pid: (argv, _stat(pid)) for pid, argv in processes()}
        for pid, (argv, stat) in rows.items():
            if stat is None or (stat.is_zombie and stat.parent not in ours):
                continue  # one that PID 1 has to reap is none of a node's
            group = _group(pid, self._own.cgroup)
            above = pid in ours or stat.parent in ours or str(self._state) in " ".join(argv)
            if any("criu" in word for word in argv) and (group is not None or above):
                yield f"!process {pid} {' '.join(argv[:6])} in {group}"
            elif group is not None:
                yield f"process {pid} {stat.name} in {group}"
            elif above:
                others[_program(argv, stat.name)] += 1
        for name, count in others.items():
            if count > OWN_PROCESSES.get(name, 1):
                yield f"!{count} processes {name}"

    def _loops(self) -> Iterator[str]:
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                if backing.read_text().startswith(f"{self._state}/"):
                    yield backing.parts[3]
            except OSError:  # detached meanwhile
                continue


def _settled(look: Callable[[], list[str]], timeout_s: float) -> list[str]:
    until = time.monotonic() + timeout_s
    while (found := look()) and time.monotonic() < until:
        time.sleep(0.25)
    return found


class _Stat:
    """A process's name, parent and state."""

    def __init__(self, text: str) -> None:
        head, _, rest = text.rpartition(")")
        self.name = head.partition("(")[2]
        state, parent = rest.split()[:2]
        self.parent, self.is_zombie = int(parent), state == "Z"


def _stat(pid: int) -> _Stat | None:
    try:
        return _Stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def _group(pid: int, node: str) -> str | None:
    """What a process is in below the node's groups, in any hierarchy, beside the supervisor's own."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    groups = [line.partition(f"/{node}/")[2] for line in lines]
    return next((group for group in groups if group not in ("", SUPERVISOR_GROUP)), None)


def _program(argv: list[str], name: str) -> str:
    if "-m" in argv[:-1]:
        return argv[argv.index("-m") + 1]
    return Path(argv[0]).name if argv else name


def _owner(line: str, known: Iterable[str]) -> str | None:
    return next((sandbox_id for sandbox_id in known if sandbox_id in line), None)


def _mounts() -> set[str]:
    """Of every mount namespace of the host."""
    namespaces, found = set[str](), set[str]()
    for pid, _ in processes():
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in namespaces:
                found |= set(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
            namespaces.add(namespace)
        except OSError:  # ended meanwhile
            continue
    return found
