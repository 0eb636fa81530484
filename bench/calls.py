"""Calls against other ways to run a piece of Python once.

    sudo python -m bench.calls --count 1000 --concurrency 16 --swerex build/swerex/bin/swerex-remote --out calls.json

Each way runs the same source, which prints a number, one after the other and so many at once: a call of ours; a
`subprocess` of this Python for each; a process of `multiprocessing` for each, started anew; and SWE-ReX (package
`swe-rex`), a published server for executing code, over HTTP on this host, which starts a Python for each as well. Only
ours runs it in a sandbox. The ways take turns, so that a slow spell of the machine meets all of them.
"""

import argparse
import asyncio
import http.client
import json
import multiprocessing
import multiprocessing.connection
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.bench.statistics import Bar, Percentiles
from bench.state_common import gathered, ms, say, table, timed_ms

SOURCE = "print(6 * 7)"
ROUNDS = 5
SERVER_WAIT_S = 60.0
BARS_MS_P50, BARS_PER_S = 1.5, 1000.0


class Way(Struct, frozen=True, kw_only=True):
    """Milliseconds of one at a time, and calls in a second of many at once."""

    name: str
    one_ms: Percentiles
    per_s: float


class Calls(Struct, frozen=True, kw_only=True):
    """`bars`: what is promised of calls on a quiet machine."""

    concurrency: int
    ways: list[Way]
    bars: list[Bar]


def run_subprocess() -> None:
    done = subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, check=True)
    assert done.stdout == b"42\n"


def _child(end: "multiprocessing.connection.Connection") -> None:
    end.send(eval(SOURCE.removeprefix("print")))


def run_process() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == 42
    process.join()
    process.close()
    ours.close()


@contextmanager
def swerex(program: Path) -> Iterator[Callable[[], None]]:
    """What asks the server once; every thread has a connection of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [str(program), "--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask() -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
            headers = {"X-API-Key": token, "Content-Type": "application/json"}
            connection.request("POST", "/execute", json.dumps({"command": [sys.executable, "-c", SOURCE]}), headers)
            response = connection.getresponse()
            assert json.loads(response.read())["stdout"] == "42\n", response.status

    try:
        deadline = time.monotonic() + SERVER_WAIT_S
        while True:
            try:
                ask()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield ask
    finally:
        server.terminate()
        server.wait()


def blocking(run: Callable[[], None], count: int, concurrency: int) -> tuple[list[float], float]:
    """Milliseconds of each, one after the other, and the rate of as many at once."""
    one = []
    for _ in range(count):
        began = time.monotonic()
        run()
        one.append((time.monotonic() - began) * 1e3)
    with ThreadPoolExecutor(concurrency) as pool:
        began = time.monotonic()
        list(pool.map(lambda _: run(), range(count)))
        return one, count / (time.monotonic() - began)


def ours_sync(client: barchan.Client, count: int) -> list[float]:
    """As a plain program has them, from the thread that waits."""
    one = []
    for _ in range(count):
        began = time.monotonic()
        assert client.call(SOURCE).stdout == b"42\n"
        one.append((time.monotonic() - began) * 1e3)
    return one


async def ours_rate(state_dir: str | None, count: int, concurrency: int) -> float:
    async with barchan.connect_async(state_dir=state_dir) as client:
        await gathered(4 * concurrency, lambda _: timed_ms(client.call(SOURCE)), concurrency)  # workers are there
        began = time.monotonic()
        await gathered(count, lambda _: timed_ms(client.call(SOURCE)), concurrency)
        return count / (time.monotonic() - began)


def measure(arguments: argparse.Namespace) -> Calls:
    names = ["call", "subprocess", "multiprocessing"] + (["swe-rex"] if arguments.swerex else [])
    one: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    few = max(5, arguments.count // 20)  # of those that take tens of milliseconds
    for turn in range(ROUNDS):
        say(f"round {turn + 1} of {ROUNDS}")
        with barchan.connect(state_dir=arguments.state_dir) as client:
            ours_sync(client, 20)
            one["call"] += ours_sync(client, arguments.count)
        rates["call"].append(asyncio.run(ours_rate(arguments.state_dir, 4 * arguments.count, arguments.concurrency)))
        for name, run in (("subprocess", run_subprocess), ("multiprocessing", run_process)):
            took, rate = blocking(run, few, arguments.concurrency)
            one[name] += took
            rates[name].append(rate)
        if arguments.swerex:
            with swerex(arguments.swerex) as ask:
                took, rate = blocking(ask, few, arguments.concurrency)
            one["swe-rex"] += took
            rates["swe-rex"].append(rate)
    ways = [
        Way(name=name, one_ms=Percentiles.of(one[name]), per_s=sorted(rates[name])[len(rates[name]) // 2])
        for name in names
    ]
    bars = [
        Bar(name="call, p50 ms", value=ways[0].one_ms.p50, bound=BARS_MS_P50),
        Bar(name="calls in a second", value=ways[0].per_s, bound=BARS_PER_S, at_most=False),
    ]
    return Calls(concurrency=arguments.concurrency, ways=ways, bars=bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="calls of ours in each of five rounds")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--state-dir", help="of the node to use")
    parser.add_argument("--swerex", type=Path, help="the program swerex-remote of the package swe-rex")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    arguments = parser.parse_args()
    found = measure(arguments)
    columns = ("way", "p50 ms", "p95 ms", "p99 ms", f"a second, {found.concurrency} at once")
    rows = [
        (way.name, ms(way.one_ms.p50), ms(way.one_ms.p95), ms(way.one_ms.p99), f"{way.per_s:.0f}") for way in found.ways
    ]
    print(table("a piece of Python, run once", columns, rows))
    print(
        table(
            "bars", ("what", "found", "bound", "held"), [(b.name, ms(b.value), b.bound, b.is_held) for b in found.bars]
        )
    )
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
