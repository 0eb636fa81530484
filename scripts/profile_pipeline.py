"""What the rollout pipeline makes of a machine: `sudo python scripts/profile_pipeline.py [rate|profile|slow]`

- `rate`: oracle rollouts with grading per second, against the sandbox benchmark's creates per second in the same
  session; a rollout makes two sandboxes, so half of these is the most there can be. Whose CPU time it was, from the
  kernel's counters.
- `profile`: where the node's own time goes, by py-spy, and how the guests' divides into their inits and their
  programs, by perf. Both slow the run down, which is therefore shorter and not part of `rate`.
- `slow`: how long agents' sandboxes are held when a grading takes five seconds, and when it takes none.

Without a word all three. On a node of its own; needs the source tree, root, and for `profile` perf on the path and
py-spy (`pip install py-spy`) on it or named by --py-spy. Writes profile.json to the folder of --out. Exit code
1 if slow gradings hold agents more than 10 % longer.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from msgspec.structs import asdict
from own_node import OwnNode, cpu_s_of, machine_cpu_s, own_node

from barchan.bench.ground import prepare
from barchan.rollout.percentiles import percentiles
from barchan.rollout.record import Timings
from barchan.rollout.store import read_rollouts

SANDBOXES_PER_ROLLOUT = 2
CREATES = 200
LAUNCHERS = 2
ROUNDS = 3
GRADERS_MANY = 512  # so many that slow gradings hold nothing up: rollouts go on at the same rate
SPY_HZ = 200
PERF_HZ = 499
FUNCTIONS = 20
HELD_MAX = 1.10
INIT = "init"
Report = dict[str, Any]


def creates_per_s() -> float:
    """The sandbox benchmark's create, one program, destroy; the median of several rounds."""
    with prepare(Path("bench/bare")) as ground, own_node(images=ground.state_dir / "images") as node:
        rates = [CREATES * LAUNCHERS / max(_launchers(node)) for _ in range(ROUNDS)]
    return median(rates)


def _launchers(node: OwnNode) -> list[float]:
    """Wall seconds of each of the clients side by side."""
    words = ["-m", "barchan.bench.launcher", "cycle", str(node.state_dir), str(CREATES), "0"]
    running = [
        subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(LAUNCHERS)
    ]
    said = [process.communicate()[1] for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"a client of the sandbox benchmark failed: {said}")
    return [float(text.split()[-1]) / 1e3 for text in said]


def rollouts(node: OwnNode, out: Path, tasks: str, *options: str) -> tuple[Report, float]:
    """A run of `barchan rollout` with the oracle: its summary, and the CPU seconds of the process."""
    command = [sys.executable, "-m", "barchan.cli", "rollout", tasks, "--policy", "oracle", *options]
    where = ["--state-dir", str(node.state_dir), "--out", str(out)]
    with subprocess.Popen([*command, *where], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"barchan rollout failed: {said[-2000:]}")
    summary: Report = json.loads((out / "summary.json").read_bytes())
    return summary, used.ru_utime + used.ru_stime


class Counters:
    """CPU seconds of node, supervisor, guests and machine since it was made."""

    def __init__(self, node: OwnNode) -> None:
        self._node = node
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        node = self._node
        return {
            "node": cpu_s_of(node.pid),
            "supervisor": cpu_s_of(node.supervisor_pid) if node.supervisor_pid else 0.0,
            "guests": guests_cpu_s(node),
            **machine_cpu_s(),
        }

    def spent(self, client_s: float) -> dict[str, float]:
        now = self._now()
        spent = {name: now[name] - before for name, before in self._before.items()}
        known = client_s + spent["node"] + spent["supervisor"] + spent["guests"]
        return {"client": client_s, **spent, "others and kernel": max(0.0, spent["busy"] - known)}


def guests_cpu_s(node: OwnNode) -> float:
    """All that ever ran in the node's sandboxes, from the groups' counters, which keep what ended ones used."""
    for path in node.cgroup_dirs():
        with contextlib.suppress(FileNotFoundError):  # of version 1 hierarchies
            for line in (path / "cpu.stat").read_text().splitlines():
                if line.startswith("usage_usec"):
                    return int(line.split()[1]) / 1e6
    return 0.0


def rate(out: Path, options: Sequence[str]) -> Report:
    creates = creates_per_s()
    with own_node() as node:
        counters = Counters(node)
        summary, client_s = rollouts(node, out / "rate", "humaneval", *options)
        spent = counters.spent(client_s)
    per_s = summary["rollouts_per_s"]
    print(f"{summary['rollouts']} rollouts, mean reward {summary['reward_mean']}, {summary['void']} void")
    print(f"{per_s:.1f} rollouts/s; {creates:.0f} creates/s of the sandbox bench, so at most {creates / 2:.0f}/s")
    print(f"share: {per_s * SANDBOXES_PER_ROLLOUT / creates:.2f}")
    _print_shares(spent, summary["rollouts"])
    return {"creates_per_s": creates, "summary": summary, "cpu_s": spent}


def _print_shares(spent: dict[str, float], count: int) -> None:
    whole = spent["busy"] + spent["idle"] + spent["steal"]
    print(f"\n{'':20}{'CPU s':>9}{'share':>8}{'ms/rollout':>12}")
    for name in ("client", "node", "supervisor", "guests", "others and kernel", "idle", "steal"):
        print(f"{name:20}{spent[name]:9.1f}{spent[name] / whole:8.1%}{spent[name] / count * 1e3:12.2f}")


@contextlib.contextmanager
def recording(*commands: Sequence[str]) -> Iterator[None]:
    """Profilers beside what is done here. They write their files when they are interrupted."""
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in commands]
    time.sleep(1.0)  # until they look
    try:
        yield
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        codes = [process.wait() for process in running]
    if any(code not in (0, -signal.SIGINT, 128 + signal.SIGINT) for code in codes):
        sys.exit(f"a profiler failed, exit codes {codes}")


def profile(out: Path, options: Sequence[str], py_spy: str) -> Report:
    stacks, samples = out / "node.stacks", out / "perf.data"
    with own_node() as node:
        # Only while it holds the interpreter's lock: the other samples are of threads that wait.
        spy = [py_spy, "record", "--gil", "--pid", str(node.pid), "--rate", str(SPY_HZ), "--duration", "3600"]
        perf = [
            "perf",
            "record",
            "--all-cpus",
            "--event",
            "cpu-clock",
            "--freq",
            str(PERF_HZ),
            "--output",
            str(samples),
        ]
        with recording([*spy, "--format", "raw", "--output", str(stacks)], perf):
            rollouts(node, out / "profiled", "humaneval", *options)
    alone, below, total = by_function(stacks.read_text())
    print(f"\nthe node's time by function, {total} samples:\n{'in itself':>10}{'with callees':>14}")
    ours = Counter({name: count for name, count in below.items() if "(barchan/" in name})
    for name in [*dict(alone.most_common(FUNCTIONS)), "", *dict(ours.most_common(FUNCTIONS))]:
        print(f"{alone[name] / total:10.1%}{below[name] / total:14.1%}  {name}" if name else "")
    commands = by_command(samples)
    whole = sum(commands.values())
    print(f"\nall processors by program, {whole} samples:")
    for name, count in commands.most_common(12):
        print(f"{count / whole:10.1%}  {name}{' (of the guests)' if name == INIT else ''}")
    return {"functions_alone": dict(alone), "functions_with_callees": dict(below), "programs": dict(commands)}


def by_function(stacks: str) -> tuple[Counter[str], Counter[str], int]:
    """From collapsed stacks (`a;b;c COUNT`): samples of each function itself, and of it with what it calls."""
    alone, below, total = Counter[str](), Counter[str](), 0
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        names = [frame.rpartition(":")[0] + ")" if ":" in frame else frame for frame in frames.split(";")]
        alone[names[-1]] += int(count)
        for name in set(names):
            below[name] += int(count)
        total += int(count)
    return alone, below, total


def by_command(samples: Path) -> Counter[str]:
    """Samples of a perf recording by the program's name, idle time left out."""
    command = ["perf", "script", "--input", str(samples), "--fields", "comm"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Counter(name for line in listed.splitlines() if (name := line.strip()) and not name.startswith("swapper"))


def slow(out: Path, options: Sequence[str]) -> Report:
    """With many graders nothing waits, and agents come and go as fast as ever; with few, artifacts queue."""
    many, few = ("--graders", str(GRADERS_MANY)), ("--limit", "20", "--graders", "4")
    runs = {
        "graded at once": ("quick", (*options, *many)),
        "in 5 s": ("slow", (*options, *many)),
        "in 5 s, 4 graders": ("slow", few),
    }
    held: dict[str, list[float]] = {}
    report: Report = {}
    with own_node() as node:
        rollouts(node, out / "warm-up", "humaneval", "--limit", "50")
        for name, (tasks, given) in runs.items():
            folder = out / re.sub(r"\W+", "-", name)
            summary, _ = rollouts(node, folder, f"scripts/slow_grading.py:{tasks}", *given)
            held[name] = [held_ms(record.timings) for record in read_rollouts(folder)]
            report[name] = {"held_ms": asdict(percentiles(held[name])), "summary": summary}
    print(f"\n{'an agent is held':20}{'mean ms':>9}{'p50':>9}{'p95':>9}{'p99':>9}{'rollouts/s':>12}{'grading p50':>13}")
    for name, values in held.items():
        times, summary = percentiles(values), report[name]["summary"]
        figures = "".join(f"{figure:9.1f}" for figure in (mean(values), times.p50, times.p95, times.p99))
        print(f"{name:20}{figures}{summary['rollouts_per_s']:12.1f}{summary['stage_ms']['grade']['p50']:13.1f}")
    quick, slowly = (median(held[name]) for name in list(runs)[:2])
    print(f"p50 with 5 s over p50 at once: {slowly / quick:.3f}, at most {HELD_MAX} allowed")
    return {**report, "ratio": slowly / quick}


def held_ms(timings: Timings) -> float:
    """From asking for the agent's sandbox to having its artifact."""
    stages = (timings.create_ms, timings.setup_ms, timings.policy_ms, timings.exec_ms)
    return sum(stage for stage in stages if stage is not None)


def main() -> int:
    parts: dict[str, Callable[[], Report]] = {
        "rate": lambda: rate(out, options),
        "profile": lambda: profile(out, options, asked.py_spy),
        "slow": lambda: slow(out, options),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="|".join(parts))
    parser.add_argument("--group", type=int, default=16, help="attempts at each of the 164 tasks (default: 16)")
    parser.add_argument("--limit", type=int, help="only the first so many tasks")
    parser.add_argument("--py-spy", default=shutil.which("py-spy") or "py-spy")
    parser.add_argument("--out", type=Path, help="a folder for the results (default: runs/profile-DATE)")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(parts):
        parser.error(f"no part {sorted(unknown)[0]!r}")
    options = ["--group", str(asked.group), *(["--limit", str(asked.limit)] if asked.limit else [])]
    out = asked.out or Path("runs", f"profile-{time.strftime('%Y%m%d-%H%M%S')}")
    out.mkdir(parents=True)
    report = {name: parts[name]() for name in asked.parts or parts}
    (out / "profile.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report.get("slow", {}).get("ratio", 0.0) <= HELD_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
