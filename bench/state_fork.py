"""Sixteen attempts from one prepared sandbox: by files, by a warm interpreter, by memory, and from nothing.

    sudo python -m bench.state_fork --children 16 --heap-mib 200 --files-mib 500 --out fork.json

The set-up is real work: a Python that has parsed its own library's sources until it holds as much as asked for, and
files copied in the sandbox. From nothing, each sandbox does all of it by itself. CRIU by hand: the same Python
outside any sandbox, dumped once and restored as often, side by side, into pid and mount namespaces of its own.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.backends.container.criu import find
from barchan.bench.statistics import Percentiles
from barchan.model.fork import ForkKind
from barchan.sdk.endpoint import default_state_dir
from bench.state_common import IMPORTS, Repl, gathered, heap_program, memory_bytes, mib, ms, pids_of, say, table
from scripts.own_node import OwnNode, own_node

FILES = (
    "mkdir -p data && i=0; while [ $(du -sm data | cut -f1) -lt {mib} ]; do cp -r /usr/lib data/$i; i=$((i+1)); done"
)


class Way(Struct, frozen=True, kw_only=True):
    """One way to the same number of children. Milliseconds; bytes of memory of each.

    Attributes:
        child_ms: What each took: forks, by the node; all others, until it could be used.
        all_ms: Until the last child could be used, the parent's set-up left out.
        first_answer_ms: Of each child after that: what it takes it to answer from its heap, or to run a program.
    """

    way: str
    children: int
    failed: int
    child_ms: Percentiles
    all_ms: float
    first_answer_ms: Percentiles
    pss_bytes: int
    private_bytes: int


async def prepared(client: barchan.AsyncClient, arguments: argparse.Namespace) -> tuple[barchan.AsyncSandbox, Repl]:
    sandbox = await client.create(
        "debian", memory_mib=arguments.heap_mib * 2 + 512, disk_mib=arguments.files_mib * 2 + 512
    )
    (await sandbox.exec(FILES.format(mib=arguments.files_mib), timeout_s=600)).check()
    return sandbox, await Repl.start(sandbox, heap_program(arguments.heap_mib))


def memory_each(own: OwnNode, children: list[barchan.AsyncSandbox]) -> tuple[int, int]:
    found = [memory_bytes(pids_of(own.cgroup, child.id)) for child in children]
    return sum(item["pss"] for item in found) // len(found), sum(item["private"] for item in found) // len(found)


async def by_fork(own: OwnNode, parent: barchan.AsyncSandbox, repl: Repl, kind: ForkKind, count: int) -> Way:
    expected = await repl.ask("digest()")  # before: what the parent says later, its children have not said
    began = time.monotonic()
    made = await parent.fork(count, kind=kind)
    all_ms = (time.monotonic() - began) * 1e3
    children = [child for child in made if isinstance(child, barchan.AsyncSandbox)]
    for error in made:
        if isinstance(error, barchan.BarchanError):
            say(f"{kind}: {error}")
    at_ms = [(await child.info()).create_ms for child in children]
    failed = count - len(children)

    async def use(number: int) -> float:
        began = time.monotonic()
        if kind == "memory":
            answer = await repl.of(children[number]).ask("digest()")
            if answer != expected:
                raise SystemExit("a child does not have its parent's heap")
        else:
            (await children[number].exec("test -d data/0")).check()
        return (time.monotonic() - began) * 1e3

    answers = await gathered(len(children), use, 1)
    pss, private = memory_each(own, children)
    await asyncio.gather(*(child.kill() for child in children))
    return Way(
        way=kind, children=len(children), failed=failed, child_ms=Percentiles.of(at_ms), all_ms=all_ms,
        first_answer_ms=Percentiles.of(answers), pss_bytes=pss, private_bytes=private,
    )  # fmt: skip


async def by_zygote(own: OwnNode, client: barchan.AsyncClient, arguments: argparse.Namespace) -> Way:
    """The heap's size is that of the imports: a zygote imports, it does not run a task's own set-up."""
    template = client.zygote("debian", imports=IMPORTS)
    first = await client.create(template)  # the imports are run by now
    await first.python("print(1)")
    await first.kill()
    began = time.monotonic()
    children: list[barchan.AsyncSandbox] = []

    async def one(_: int) -> float:
        child = await client.create(template)
        (await child.python("print(len(__import__('sys').modules))")).check()
        children.append(child)
        return (time.monotonic() - began) * 1e3

    at_ms = await gathered(arguments.children, one, arguments.children)
    all_ms = (time.monotonic() - began) * 1e3

    async def use(number: int) -> float:
        began = time.monotonic()
        (await children[number].python("import ast; print(ast.dump(ast.parse('1')))")).check()
        return (time.monotonic() - began) * 1e3

    answers = await gathered(len(children), use, 1)
    pss, private = memory_each(own, children)
    await asyncio.gather(*(child.kill() for child in children))
    return Way(
        way="zygote", children=len(children), failed=0, child_ms=Percentiles.of(at_ms), all_ms=all_ms,
        first_answer_ms=Percentiles.of(answers), pss_bytes=pss, private_bytes=private,
    )  # fmt: skip


async def from_nothing(own: OwnNode, client: barchan.AsyncClient, arguments: argparse.Namespace) -> Way:
    children: list[barchan.AsyncSandbox] = []
    repls: list[Repl] = []
    began = time.monotonic()

    async def one(_: int) -> float:
        sandbox, repl = await prepared(client, arguments)
        children.append(sandbox)
        repls.append(repl)
        return (time.monotonic() - began) * 1e3

    at_ms = await gathered(arguments.children, one, arguments.children)
    all_ms = (time.monotonic() - began) * 1e3

    async def use(number: int) -> float:
        began = time.monotonic()
        await repls[number].ask("digest()")
        return (time.monotonic() - began) * 1e3

    answers = await gathered(len(repls), use, 1)
    pss, private = memory_each(own, children)
    await asyncio.gather(*(child.kill() for child in children))
    return Way(
        way="from nothing", children=len(children), failed=0, child_ms=Percentiles.of(at_ms), all_ms=all_ms,
        first_answer_ms=Percentiles.of(answers), pss_bytes=pss, private_bytes=private,
    )  # fmt: skip


def below(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def criu_by_hand(arguments: argparse.Namespace) -> Way:
    """CRIU alone: no sandbox, no limits, no files of their own; each copy in a pid namespace."""
    criu = find(default_state_dir())
    if criu is None:
        raise SystemExit("no CRIU (try: sudo barchan tools install criu)")
    work = Path(tempfile.mkdtemp(prefix="barchan-criu-", dir="/var/tmp"))
    images = work / "images"
    images.mkdir()
    program = heap_program(arguments.heap_mib).partition('print("ready"')[0]
    program += 'open("ready", "w").close()\nimport time\nwhile True: time.sleep(3600)\n'
    (work / "heap.py").write_text(program)
    inside = "exec setsid /usr/bin/python3 heap.py < /dev/null > /dev/null 2>&1"
    parent = subprocess.Popen(["unshare", "--pid", "--fork", "sh", "-c", inside], cwd=work)
    children: list[int] = []
    try:
        while not (work / "ready").exists():
            time.sleep(0.1)
        (tree,) = below(parent.pid)
        began = time.monotonic()
        common = ["--images-dir", str(images), "--manage-cgroups=ignore", "--log-file", "criu.log"]
        subprocess.run([*criu.command, "dump", "--tree", str(tree), "--leave-running", *common], check=True)
        at_ms = []
        for number in range(arguments.children):
            pid_file = work / f"{number}.pid"
            words = ["restore", "--restore-detached", "--pidfile", str(pid_file), *common]
            subprocess.run([*criu.command, *words], check=True)
            children.append(int(pid_file.read_text()))
            at_ms.append((time.monotonic() - began) * 1e3)
        found = [memory_bytes([pid]) for pid in children]
    finally:
        for pid in [*children, *below(parent.pid)]:
            os.kill(pid, 9)
        parent.wait()
        shutil.rmtree(work)
    return Way(
        way="criu by hand", children=len(children), failed=arguments.children - len(children),
        child_ms=Percentiles.of(at_ms), all_ms=at_ms[-1], first_answer_ms=Percentiles.of([0.0]),
        pss_bytes=sum(item["pss"] for item in found) // len(found),
        private_bytes=sum(item["private"] for item in found) // len(found),
    )  # fmt: skip


async def measure(arguments: argparse.Namespace) -> list[Way]:
    found = []
    with own_node() as own:
        async with barchan.connect_async(state_dir=own.state_dir) as client:
            say("setting the parent up")
            parent, repl = await prepared(client, arguments)
            kinds: tuple[ForkKind, ...] = ("fs", "memory")
            for kind in kinds:
                for _ in range(arguments.rounds):
                    say(f"fork, {kind}")
                    found.append(await by_fork(own, parent, repl, kind, arguments.children))
            await parent.kill()
            say("zygote")
            found.append(await by_zygote(own, client, arguments))
            say("from nothing")
            found.append(await from_nothing(own, client, arguments))
    if arguments.by_hand:
        say("criu by hand")
        found.append(criu_by_hand(arguments))
    return found


def report(found: list[Way]) -> str:
    rows = [
        (
            item.way, item.children, item.failed, ms(item.child_ms.p50), ms(item.child_ms.p99), ms(item.all_ms),
            ms(item.first_answer_ms.p50), mib(item.pss_bytes), mib(item.private_bytes),
        )
        for item in found
    ]  # fmt: skip
    columns = (
        "way",
        "children",
        "failed",
        "p50 ms",
        "p99 ms",
        "all ms",
        "first use, p50 ms",
        "PSS MiB each",
        "private MiB each",
    )
    return table("from one set-up", columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--children", type=int, default=16)
    parser.add_argument("--heap-mib", type=int, default=200)
    parser.add_argument("--files-mib", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3, help="forks of each kind")
    parser.add_argument("--by-hand", action="store_true", help="measure CRIU by hand, too")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments))
    sys.stdout.write(report(found))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
