"""What the benchmarks of state share: a program that fills a Python with real objects, and what sandboxes take."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path

import barchan
from barchan.bench.statistics import Percentiles

CGROUPS = Path("/sys/fs/cgroup")
REPL = "repl"  # process id of the Python that a benchmark talks to
IMPORTS = (
    "ast",
    "asyncio",
    "decimal",
    "email.message",
    "http.client",
    "json",
    "sqlite3",
    "unittest",
    "xml.dom.minidom",
)

# Parses the sources of Python's own library into trees, over and over, until the process holds as much as asked for;
# then it answers each line of its input, an expression. What it holds is live: `digest()` is a hash of some of it.
HEAP = """
import ast, glob, hashlib, importlib, sys
for name in {imports}:
    importlib.import_module(name)
def resident_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
trees, paths = [], sorted(glob.glob("/usr/lib/python3*/**/*.py", recursive=True))
while resident_kib() < {mib} << 10:
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            try:
                trees.append((path, ast.parse(file.read())))
            except (SyntaxError, ValueError):
                continue
        if resident_kib() >= {mib} << 10:
            break
def digest():
    found = hashlib.sha256()
    for path, tree in trees[:200]:
        found.update(path.encode() + str(len(tree.body)).encode())
    return found.hexdigest()
print("ready", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


def heap_program(mib: int, imports: Sequence[str] = IMPORTS) -> str:
    """Source of a Python that grows to `mib` resident and then answers expressions."""
    return HEAP.format(imports=tuple(imports), mib=mib)


class Repl:
    """A conversation with the heap program of one sandbox, a line at a time."""

    def __init__(self, process: barchan.AsyncProcess, read: int = 0) -> None:
        self._process = process
        self._read = read

    @classmethod
    async def start(cls, sandbox: barchan.AsyncSandbox, program: str, timeout_s: float = 300.0) -> "Repl":
        process = await sandbox.start(["python3", "-c", program], process_id=REPL, env={"PYTHONHASHSEED": "0"})
        repl = cls(process)
        await repl.ready(timeout_s)
        return repl

    async def ready(self, timeout_s: float = 300.0) -> None:
        """Wait until it has said so."""
        if await self._line(timeout_s) != "ready":
            raise SystemExit("the program did not start")

    def of(self, sandbox: barchan.AsyncSandbox) -> "Repl":
        """The same conversation with a copy of its sandbox."""
        return Repl(sandbox.process(REPL), self._read)

    async def ask(self, expression: str) -> str:
        """What the program answers."""
        await self._process.write_stdin(expression + "\n")
        return await self._line(60.0)

    async def _line(self, timeout_s: float) -> str:
        text = b""
        async with aclosing(self._process.output(self._read, quiet_timeout_s=timeout_s)) as output:
            async for stream, _, data in output:
                text += data if stream == "stdout" else b""
                if b"\n" in text:
                    break
        line, newline, _ = text.partition(b"\n")
        if not newline:
            raise SystemExit(f"the program ended: {text!r}")
        self._read += len(line) + 1
        return line.decode()


def pids_of(group: str, sandbox_id: str) -> list[int]:
    """Processes of a sandbox, its init too. `group`: the node's own, as `OwnNode.cgroup` names it."""
    roots = [root / "barchan" / group / sandbox_id for root in (CGROUPS / "unified", CGROUPS)]
    found: set[int] = set()
    for root in roots:
        for directory, _, files in os.walk(root):
            if "cgroup.procs" in files:
                found |= {int(word) for word in (Path(directory) / "cgroup.procs").read_text().split()}
    return sorted(found)


def memory_bytes(pids: Iterable[int]) -> dict[str, int]:
    """Resident, proportional and private bytes of processes, all together."""
    total = {"Rss": 0, "Pss": 0, "Private_Clean": 0, "Private_Dirty": 0, "Swap": 0}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name in total:
                total[name] += int(rest.split()[0]) << 10
    private = total.pop("Private_Clean") + total.pop("Private_Dirty")
    return {"rss": total["Rss"], "pss": total["Pss"], "private": private, "swap": total["Swap"]}


def memory_available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


async def timed_ms(work: Awaitable[object]) -> float:
    began = time.monotonic()
    await work
    return (time.monotonic() - began) * 1e3


async def repeated(count: int, work: Callable[[int], Awaitable[float]]) -> Percentiles:
    """Percentiles of `count` measurements, one after the other."""
    return Percentiles.of([await work(number) for number in range(count)])


async def gathered(count: int, work: Callable[[int], Awaitable[float]], at_once: int) -> list[float]:
    """Measurements of `count` pieces of work, at most `at_once` at a time."""
    turns = asyncio.Semaphore(at_once)

    async def one(number: int) -> float:
        async with turns:
            return await work(number)

    return list(await asyncio.gather(*(one(number) for number in range(count))))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as lines of columns, the first one to the left."""
    cells = [[str(cell) for cell in row] for row in ([*columns], *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join([title, *lines, ""])


def mib(value: float) -> str:
    return f"{value / 2**20:.1f}"


def ms(value: float) -> str:
    return f"{value:.2f}"


def say(text: str) -> None:
    """Progress, beside the result on stdout."""
    sys.stderr.write(text + "\n")


def run_quietly(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
