"""What a warm interpreter saves: time from create to first result, and memory of siblings.

    python bench/zygote.py [--state-dir DIR] [--siblings 16] [--rounds 30]

The heap is that of real imports and of their work: some libraries, and the syntax trees of the standard library's own
sources. Against it stands a Python that imports the same by itself.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import barchan

MODULE = """
import ast, asyncio, email.message, http.client, json, pathlib, sqlite3, sysconfig, unittest.mock, xml.dom.minidom
SOURCES = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]
TREES = {path.name: ast.parse(path.read_bytes()) for path in SOURCES}
"""
PROGRAM = "import heap; print(len(heap.TREES))"
FILES = 60
MEMORY_MIB = 1024


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[round(share * 100) - 1]


def show(name: str, taken: list[float]) -> None:
    print(f"{name}: p50 {statistics.median(taken):.1f} ms, p99 {percentile(taken, 0.99):.1f} ms")


def timed(run: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def rollups(sandbox: barchan.Sandbox) -> dict[str, int]:
    """KiB of the sandbox's Python, from the kernel."""
    text = sandbox.exec("cat /proc/$(pgrep -o python3)/smaps_rollup").check().text
    return {words[0].rstrip(":"): int(words[1]) for words in map(str.split, text.splitlines()[1:])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state-dir")
    parser.add_argument("--siblings", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()
    with barchan.connect(state_dir=given.state_dir) as client:
        with client.create("debian", memory_mib=MEMORY_MIB) as sandbox:
            path = "/usr/lib/python3/dist-packages/heap.py"
            source = MODULE.replace("FILES", str(FILES))
            sandbox.exec(["tee", path], stdin=source, user="root").check()
            sandbox.exec(["python3", "-m", "compileall", "-q", str(Path(path).parent)], user="root").check()
            snapshot = sandbox.snapshot()
        try:
            measure(client, snapshot.image.name, given.siblings, given.rounds)
        finally:
            snapshot.remove()


def measure(client: barchan.Client, image: str, siblings: int, rounds: int) -> None:
    spec = client.zygote(image, imports=["heap"])

    made: list[barchan.Sandbox] = []

    def warm() -> None:
        made.append(client.create(spec, memory_mib=MEMORY_MIB))
        assert made[-1].python(PROGRAM).check().ok

    def cold() -> None:
        made.append(client.create(image, memory_mib=MEMORY_MIB))
        assert made[-1].exec(["python3", "-c", PROGRAM]).check().ok

    def each(run: Callable[[], None], count: int) -> list[float]:
        taken = []
        for _ in range(count):
            taken.append(timed(run))
            made.pop().kill()
        return taken

    show("first sandbox of the zygote, imports included", each(warm, 1) * 2)
    show("create to first result, python()", each(warm, rounds))
    show("create to first result, python3", each(cold, max(4, rounds // 8)))
    made += [client.create(spec, memory_mib=MEMORY_MIB) for _ in range(siblings)]
    show("python() in a live one", [timed(lambda: made[0].python(PROGRAM)) for _ in range(rounds)])
    for when in ("waiting", "having run one program"):
        if when != "waiting":
            for sandbox in made:
                sandbox.python(PROGRAM).check()
        sizes = [rollups(sandbox) for sandbox in made]
        mean = {key: statistics.mean(size[key] for size in sizes) / 1024 for key in sizes[0]}
        private = mean["Private_Clean"] + mean["Private_Dirty"]
        words = f"{mean['Rss']:.1f} resident, {mean['Pss']:.2f} proportional, {private:.2f} private"
        print(f"{siblings} siblings {when}, MiB each: {words}")
    for sandbox in made:
        sandbox.kill()
    with client.create(image, memory_mib=MEMORY_MIB) as sandbox:
        process = sandbox.start(["python3", "-c", "import heap, time; print(1, flush=True); time.sleep(600)"])
        next(iter(process.output()))
        size = {key: value / 1024 for key, value in rollups(sandbox).items()}
        private = size["Private_Clean"] + size["Private_Dirty"]
        print(f"one executed by itself: resident {size['Rss']:.1f}, private {private:.2f} MiB")


if __name__ == "__main__":
    main()
