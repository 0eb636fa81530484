"""Every backend by the same measures, on one node, in one run; beside them what others take for the same.

    sudo python -m bench.backends --count 20 --out backends.json --picture backends.png

Roots are the image `debian`, machines `debian-disk`. A start is told until the end of `true` in it, as the peers' is.
Cold: with no slot ready and a memory size that no earlier sandbox had, so that nothing prepared fits; warm: with slots,
one after the other. Forks are with memory where the backend has it, else of files. Memory of an idle sandbox is
proportional (PSS), of all its processes on the host.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.backends.container.outer_ids import outer_id
from barchan.bench.statistics import Percentiles
from barchan.errors import BarchanError
from barchan.image.store import ImageStore
from barchan.sdk.endpoint import default_state_dir
from bench import backends_peers
from bench.backends_peers import Peer
from bench.state_common import memory_bytes, mib, ms, pids_of, say, table
from scripts.own_node import OwnNode

BACKENDS = ("function", "container", "gvisor", "microvm", "vm")
ROOT_IMAGE, DISK_IMAGE = "debian", "debian-disk"
FORKS = 16
IDLE = 16
SLOTS = 8
MEMORY_MIB = 256
SLOW_SHARE = 10  # of machines, which boot for half a minute, so much less is measured
SETTLE_S = 2.0  # until the slots are filled again
STEP_S_MAX = 600.0
MEASURES = ("cold start", "warm start", "exec", "fork of 16", "pause", "resume", "memory snapshot", "restore")


class Backend(Struct, kw_only=True):
    """What one backend took. Milliseconds; bytes of memory of an idle sandbox.

    Attributes:
        why_not: By measure, what could not be had.
    """

    name: str
    took: dict[str, Percentiles] = {}
    fork_kind: str = ""
    idle_bytes: int | None = None
    why_not: dict[str, str] = {}


class Report(Struct, frozen=True, kw_only=True):
    """One run."""

    machine: str
    count: int
    backends: list[Backend]
    peers: list[Peer]


class Bench:
    """The measures of one backend."""

    def __init__(self, own: OwnNode, client: barchan.AsyncClient, name: str, count: int) -> None:
        self._own = own
        self._client = client
        self._name = name
        self._image = DISK_IMAGE if name == "vm" else ROOT_IMAGE
        self._count = max(2, count // SLOW_SHARE) if name == "vm" else count
        self._memory_mib = MEMORY_MIB * 2 if name == "vm" else MEMORY_MIB
        self.found = Backend(name=name)

    async def run(self) -> Backend:
        """All of them; one that can't be had does not keep the others from being tried."""
        steps: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("cold start", self._cold),
            ("warm start", self._warm),
            ("exec", self._exec),
            ("fork of 16", self._fork),
            ("pause", self._pause),
            ("memory snapshot", self._snapshot),
            ("idle memory", self._idle),
        ]
        for what, step in steps:
            say(f"{self._name}: {what}")
            try:
                async with asyncio.timeout(STEP_S_MAX):
                    await step()
            except (BarchanError, TimeoutError) as error:
                self.found.why_not[what] = str(error) or f"not done after {STEP_S_MAX:g} s"
                if what == "cold start":
                    break
        return self.found

    async def _create(self, memory_mib: int | None = None) -> barchan.AsyncSandbox:
        return await self._client.create(
            self._image,
            backend=self._name,
            memory_mib=memory_mib or self._memory_mib,
            waiting=barchan.Waiting(pause=False, page_out=False, hibernate=False),
        )

    async def _start_ms(self, memory_mib: int | None = None) -> float:
        began = time.monotonic()
        sandbox = await self._create(memory_mib)
        try:
            (await sandbox.exec(["true"])).check()
            return (time.monotonic() - began) * 1e3
        finally:
            await sandbox.kill()

    def _keep(self, what: str, samples: Sequence[float]) -> None:
        self.found.took[what] = Percentiles.of(samples)

    async def _cold(self) -> None:
        await self._client.set_pool(0)
        await self._start_ms(self._memory_mib - 1)  # what the first one of a node brings up is not part of each
        self._keep("cold start", [await self._start_ms(self._memory_mib + 1 + number) for number in range(self._count)])

    async def _warm(self) -> None:
        await self._client.set_pool(SLOTS)
        await self._start_ms()
        samples = []
        for _ in range(self._count):
            await self._slots_ready()
            samples.append(await self._start_ms())
        self._keep("warm start", samples)

    async def _slots_ready(self) -> None:
        """Wait until nothing is being made ready: a start beside that is told for what both take."""
        if self._name in ("container", "function"):
            while (await self._client.pool()).ready < SLOTS:  # noqa: ASYNC110 (nothing tells of it)
                await asyncio.sleep(0.02)
        else:
            await asyncio.sleep(SETTLE_S)

    async def _exec(self) -> None:
        async with await self._create() as sandbox:
            await sandbox.exec(["true"])

            async def one() -> float:
                began = time.monotonic()
                (await sandbox.exec(["true"])).check()
                return (time.monotonic() - began) * 1e3

            self._keep("exec", [await one() for _ in range(10 * self._count)])

    async def _fork(self) -> None:
        async with await self._create() as parent:
            (await parent.exec("echo prepared > /tmp/notes")).check()
            samples: list[float] = []
            for _ in range(max(1, self._count // SLOW_SHARE)):
                samples.append(await self._fork_ms(parent))
            self._keep("fork of 16", samples)

    async def _fork_ms(self, parent: barchan.AsyncSandbox) -> float:
        """Until the last of them has told what was prepared."""
        began = time.monotonic()
        try:
            made = await parent.fork(FORKS, kind="memory")
            self.found.fork_kind = "memory"
        except BarchanError:
            began = time.monotonic()
            made = await parent.fork(FORKS, kind="fs")
            self.found.fork_kind = "fs"
        children = [child for child in made if isinstance(child, barchan.AsyncSandbox)]
        try:
            for error in made:
                if isinstance(error, BarchanError):
                    raise error
            for done in await asyncio.gather(*(child.exec("cat /tmp/notes") for child in children)):
                if done.check().text != "prepared\n":
                    raise BarchanError("a child lacks what its parent had prepared")
            return (time.monotonic() - began) * 1e3
        finally:
            await asyncio.gather(*(child.kill() for child in children))

    async def _pause(self) -> None:
        async with await self._create() as sandbox:
            paused, resumed = [], []
            for _ in range(self._count):
                began = time.monotonic()
                await sandbox.pause()
                between = time.monotonic()
                await sandbox.resume()
                paused.append((between - began) * 1e3)
                resumed.append((time.monotonic() - between) * 1e3)
            self._keep("pause", paused)
            self._keep("resume", resumed)

    async def _snapshot(self) -> None:
        """Of a Python that waits; restored until `true` has run."""
        stored, restored = [], []
        async with await self._create() as sandbox:
            await sandbox.start(["python3", "-c", "import json, asyncio, time; time.sleep(1e6)"])
            await asyncio.sleep(SETTLE_S)
            for _ in range(max(1, self._count // 2)):
                began = time.monotonic()
                snapshot = await sandbox.snapshot(kind="memory")
                between = time.monotonic()
                try:
                    async with await self._client.create(snapshot) as again:
                        (await again.exec(["true"])).check()
                        restored.append((time.monotonic() - between) * 1e3)
                finally:
                    await snapshot.remove()
                stored.append((between - began) * 1e3)
        self._keep("memory snapshot", stored)
        self._keep("restore", restored)

    async def _idle(self) -> None:
        count = min(IDLE, self._count)
        made = [await self._create() for _ in range(count)]
        try:
            await asyncio.gather(*(sandbox.exec(["true"]) for sandbox in made))
            await asyncio.sleep(SETTLE_S)
            self.found.idle_bytes = sum(memory_bytes(self._pids(sandbox.id))["pss"] for sandbox in made) // count
        finally:
            await asyncio.gather(*(sandbox.kill() for sandbox in made))

    def _pids(self, sandbox_id: str) -> list[int]:
        """Of the container that a guest of another kind lives in, too."""
        ids = (sandbox_id, outer_id(sandbox_id, self._name))
        return sorted({pid for name in ids for pid in pids_of(self._own.cgroup, name)})


async def ours(own: OwnNode, names: Sequence[str], count: int) -> list[Backend]:
    async with barchan.connect_async(state_dir=own.state_dir) as client:
        return [await Bench(own, client, name, count).run() for name in names]


def peers(names: Sequence[str], count: int, state_dir: Path, root: Path, scratch: Path) -> list[Peer]:
    """Each in a program of its own, so that none finds what another one has left in it."""
    found = []
    for name in names:
        say(f"{name}: beside us")
        place = scratch / name
        place.mkdir()
        command = [
            sys.executable,
            "-m",
            "bench.backends_peers",
            name,
            str(root),
            str(place),
            str(count),
            str(state_dir),
        ]
        if name == "crun":
            drop = 'umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"'
            command = ["unshare", "-m", "--propagation", "private", "sh", "-c", drop, "sh", *command]
        done = subprocess.run(command, check=False, capture_output=True)
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            found.append(Peer(name=name, why_not=said[-1] if said else f"exit code {done.returncode}"))
            continue
        found.append(msgspec.json.decode(done.stdout.splitlines()[-1], type=Peer))
    return found


@contextmanager
def node() -> Iterator[OwnNode]:
    """A node of this run's own, with the machine's images."""
    with tempfile.TemporaryDirectory(prefix="barchan-bench-", dir="/var/tmp") as name:
        state_dir = Path(name)
        (state_dir / "images").symlink_to(default_state_dir() / "images")
        own = OwnNode(state_dir, ())
        try:
            yield own
        finally:
            if own.process.poll() is None:
                own.shut_down()


@contextmanager
def debian_root(scratch: Path) -> Iterator[Path]:
    """The files of the image `debian` as a directory, which nobody can write."""
    images = ImageStore(default_state_dir() / "images")
    (layer,) = images.resolve(ROOT_IMAGE).layers
    root = scratch / "root"
    root.mkdir()
    subprocess.run(["mount", "-t", "erofs", "-o", "ro,loop", images.layer_path(layer), root], check=True)
    try:
        yield root
    finally:
        subprocess.run(["umount", root], check=True)


def shown(report: Report) -> str:
    """Medians side by side, then percentiles, then what could not be had."""

    def median(found: Percentiles | None) -> str:
        return ms(found.p50) if found is not None else "-"

    columns = ("p50, ms", *MEASURES, "idle, MiB")
    rows = [
        [
            backend.name,
            *(median(backend.took.get(what)) for what in MEASURES),
            mib(backend.idle_bytes) if backend.idle_bytes is not None else "-",
        ]
        for backend in report.backends
    ]
    for peer in report.peers:
        taken = mib(peer.idle_bytes) if peer.idle_bytes is not None else "-"
        rest = ["-"] * (len(MEASURES) - 3)
        rows.append([peer.name, median(peer.run_ms), "-", median(peer.exec_ms), *rest, taken])
    timed = [(backend.name, what, found) for backend in report.backends for what, found in backend.took.items()]
    timed += [(peer.name, "start", peer.run_ms) for peer in report.peers if peer.run_ms is not None]
    timed += [(peer.name, "exec", peer.exec_ms) for peer in report.peers if peer.exec_ms is not None]
    missing = [(item.name, what, why) for item in report.backends for what, why in item.why_not.items()]
    missing += [(peer.name, "", peer.why_not) for peer in report.peers if peer.why_not]
    kinds = ", ".join(f"{item.name} {item.fork_kind}" for item in report.backends if item.fork_kind)
    return "\n".join(
        [
            table(f"{report.machine}; forks: {kinds or 'none'}", columns, rows),
            table(
                "percentiles, ms",
                ("who", "what", "n", "p50", "p95", "p99"),
                [(who, what, at.count, ms(at.p50), ms(at.p95), ms(at.p99)) for who, what, at in timed],
            ),
            *(f"not measured: {who}{what and ', ' + what}: {why}" for who, what, why in missing),
        ]
    )


def draw(report: Report, path: Path) -> None:
    """Medians on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [(f"{item.name}: {what}", found.p50) for item in report.backends for what, found in item.took.items()]
    bars += [(f"{peer.name}: start", peer.run_ms.p50) for peer in report.peers if peer.run_ms is not None]
    bars += [(f"{peer.name}: exec", peer.exec_ms.p50) for peer in report.peers if peer.exec_ms is not None]
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.22 * len(bars)))
    names = [name for name, _ in reversed(bars)]
    ours_count = sum(len(item.took) for item in report.backends)
    colours = ["#4477aa" if number < ours_count else "#bbbbbb" for number in range(len(bars))]
    axes.barh(names, [value for _, value in reversed(bars)], color=list(reversed(colours)))
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds, median")
    axes.set_title(report.machine)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def machine() -> str:
    """What it was measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} x {model}, {gib:.0f} GiB, Linux {os.uname().release}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="samples of a measure; of some more, of machines fewer")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="may be repeated [default: all]")
    parser.add_argument("--peer", action="append", choices=(*backends_peers.NAMES, "none"), help="[default: all]")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    wanted = [] if asked.peer == ["none"] else asked.peer or list(backends_peers.NAMES)
    with node() as own:
        backends = asyncio.run(ours(own, asked.backend or BACKENDS, asked.count))
    with tempfile.TemporaryDirectory(prefix="barchan-peers-", dir="/var/tmp") as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        with debian_root(scratch) as root:
            beside = peers(wanted, asked.count, default_state_dir(), root, scratch)
        for left in scratch.iterdir():
            shutil.rmtree(left, ignore_errors=True)
    report = Report(machine=machine(), count=asked.count, backends=backends, peers=beside)
    print(shown(report))
    if asked.out is not None:
        asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    if asked.picture is not None:
        draw(report, asked.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
