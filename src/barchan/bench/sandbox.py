"""`barchan bench sandbox`: what a sandbox costs here, beside the bare kernel and others, in one run."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.bench import peers
from barchan.bench.ground import DYNAMIC, Ground
from barchan.bench.launcher import SPEC
from barchan.bench.peers import Bare, Samples
from barchan.bench.statistics import Bar, Percentiles
from barchan.errors import BarchanError

BALLAST_MIB = 500
ROUNDS = 4
CONTENDERS = (
    "barchan",
    "barchan, 500 MB client",
    "barchan, dynamic program",
    "fork+exec",
    "fork+exec, dynamic program",
)
Say = Callable[[str], None]


class Rates(Struct, frozen=True, kw_only=True):
    """Sandboxes created, used once and destroyed per second, by launchers at work at once."""

    launchers: int
    barchan: float
    bare: float


class Idle(Struct, frozen=True, kw_only=True):
    """Memory of many idle sandboxes, MiB each: what the host lost, and of it the sandboxes' own processes (PSS)."""

    count: int
    total_mib: float
    processes_mib: float

    @property
    def beyond_processes_mib(self) -> float:
        return self.total_mib - self.processes_mib


class Report(Struct, frozen=True, kw_only=True):
    """Everything one run measured. `latency_ms`: contender -> create, exec, destroy -> percentiles."""

    latency_ms: dict[str, dict[str, Percentiles]]
    bare: Bare
    rates: list[Rates]
    idle: Idle
    burst_ms: Percentiles
    peers_missing: list[str]
    bars: list[Bar]


def run(ground: Ground, count: int, idle_count: int, say: Say) -> Report:
    """Measure everything; the contenders take turns, so that a slow spell of the machine meets all of them."""
    samples: dict[str, Samples] = {name: Samples() for name in CONTENDERS}
    bares: list[Bare] = []
    absent = peers.missing()
    share = max(5, count // ROUNDS)
    say(f"memory of {idle_count} idle sandboxes")
    idle = asyncio.run(_idle(ground, idle_count))  # first: what ended sandboxes leave in kernel caches would hide some
    for turn in range(ROUNDS):
        say(f"latency, round {turn + 1} of {ROUNDS}")
        samples["barchan"].add(_launch(ground, "cycle", share, 0)[0])
        bares.append(peers.bare(ground, share, 1))
        samples["barchan"].add(_launch(ground, "execs", share, 0)[0])
        samples["fork+exec"].add(peers.fork_exec(ground, share, "true"))
        samples["barchan, dynamic program"].add(_launch(ground, "dynamic-execs", share, 0)[0])
        samples["fork+exec, dynamic program"].add(peers.fork_exec(ground, share, DYNAMIC))
        samples["barchan, 500 MB client"].add(_launch(ground, "cycle", share, BALLAST_MIB)[0])
        samples["barchan, 500 MB client"].add(_launch(ground, "execs", share, BALLAST_MIB)[0])
        for name, measure in peers.PEERS.items():
            if name not in absent:
                samples.setdefault(name, Samples()).add(measure(ground, max(5, share // 4)))
    rates = []
    for launchers in (1, 2):
        say(f"rate with {launchers} launcher{'s' * (launchers > 1)}")
        rates.append(_rates(ground, count, launchers))
    say(f"burst of {idle_count}")
    burst = _launch(ground, "burst", idle_count, 0)[0]
    _shut_down(ground)
    latency = {name: _percentiles(sample) for name, sample in samples.items()}
    burst_ms = Percentiles.of(burst.create_ms)
    middle = sorted(bares, key=lambda bare: bare.create_us_p50)[len(bares) // 2]
    return Report(
        latency_ms=latency,
        bare=middle,
        rates=rates,
        idle=idle,
        burst_ms=burst_ms,
        peers_missing=absent,
        bars=_bars(latency, middle, rates, idle, burst_ms),
    )


def _percentiles(samples: Samples) -> dict[str, Percentiles]:
    columns = {"create": samples.create_ms, "exec": samples.exec_ms, "destroy": samples.destroy_ms}
    return {name: Percentiles.of(values) for name, values in columns.items() if values}


def _launch(ground: Ground, mode: str, count: int, ballast_mib: int, launchers: int = 1) -> tuple[Samples, float]:
    """Run client processes side by side; returns their samples and the longest wall time in seconds."""
    command = [
        sys.executable,
        "-m",
        "barchan.bench.launcher",
        mode,
        str(ground.state_dir),
        str(count),
        str(ballast_mib),
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(launchers)]
    total, wall_s = Samples(), 0.0
    for process in running:
        out, err = process.communicate()
        if process.returncode != 0:
            raise BarchanError(f"a benchmark client failed: {err.decode()[-2000:]}")
        total.add(msgspec.json.decode(out.splitlines()[-1], type=Samples))
        wall_s = max(wall_s, float(err.split()[-1]) / 1e3)
    return total, wall_s


def _rates(ground: Ground, count: int, launchers: int) -> Rates:
    """Medians of three turns each, in alternation."""
    ours, theirs = [], []
    for _ in range(3):
        _, wall_s = _launch(ground, "cycle", count, 0, launchers)
        ours.append(count * launchers / wall_s)
        theirs.append(peers.bare(ground, count, launchers).rate_per_s)
    return Rates(launchers=launchers, barchan=sorted(ours)[1], bare=sorted(theirs)[1])


async def _idle(ground: Ground, count: int) -> Idle:
    """What the host loses to idle sandboxes, page cache dropped before and after."""
    async with barchan.connect_async(state_dir=ground.state_dir) as client:
        async with await client.create(SPEC) as first:  # what the first one warms up is not part of each
            (await first.exec(["/true"])).check()
        before_kib = _free_kib()
        made = [item async for item in client.create_many(SPEC, n=count)]
        failed = [item for item in made if isinstance(item, BarchanError)]
        if failed:
            raise failed[0]
        await asyncio.sleep(1)
        used_kib = before_kib - _free_kib()
        own_kib = sum(_pss_kib(pid) for pid in _inits())
    return Idle(count=count, total_mib=used_kib / 1024 / count, processes_mib=own_kib / 1024 / count)


def _free_kib() -> int:
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    time.sleep(0.5)
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemFree"].split()[0])


def _inits() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"barchan-init\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue  # ended meanwhile
    return found


def _pss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def _shut_down(ground: Ground) -> None:
    """End the node of this run, so that nothing of it is left when its directory goes."""
    subprocess.run(
        ["curl", "-s", "--unix-socket", str(ground.state_dir / "node.sock"), "-XPOST", "http://node/v1/node/shutdown"],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _bars(
    latency: dict[str, dict[str, Percentiles]], bare: Bare, rates: list[Rates], idle: Idle, burst_ms: Percentiles
) -> list[Bar]:
    create = {name: columns["create"].p50 for name, columns in latency.items() if "create" in columns}
    exec_ = {name: columns["exec"].p50 for name, columns in latency.items() if "exec" in columns}
    bare_ms = bare.create_us_p50 / 1e3
    heavy = "barchan, 500 MB client"
    bars = [
        Bar(name="create over bare kernel calls", value=create["barchan"] / bare_ms, bound=1.5),
        Bar(name="the same with a 500 MB client", value=create[heavy] / bare_ms, bound=1.5),
        Bar(name="exec over fork+exec, static program", value=exec_["barchan"] / exec_["fork+exec"], bound=2.0),
        Bar(name="the same with a 500 MB client", value=exec_[heavy] / exec_["fork+exec"], bound=2.0),
        Bar(
            name="exec over fork+exec, dynamic program",
            value=exec_["barchan, dynamic program"] / exec_["fork+exec, dynamic program"],
            bound=2.0,
        ),
        Bar(name="rate with 2 launchers over bare", value=rates[1].barchan / rates[1].bare, bound=0.7, at_most=False),
        Bar(name="MiB of an idle sandbox beyond its processes", value=idle.beyond_processes_mib, bound=1.5),
        Bar(name="burst, p99 over p50", value=burst_ms.p99 / burst_ms.p50, bound=3.0),
    ]
    if "crun" in latency:
        bars += [
            Bar(name="crun run over create", value=create["crun"] / create["barchan"], bound=2.0, at_most=False),
            Bar(name="crun exec over exec", value=exec_["crun"] / exec_["barchan"], bound=4.0, at_most=False),
        ]
    return bars
