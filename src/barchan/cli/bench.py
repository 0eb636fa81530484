"""`barchan bench`."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number

from barchan.bench import sandbox as bench
from barchan.bench.ground import prepare
from barchan.bench.sandbox import Report
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, print_json, print_table

app = App(name="bench", help_format="plaintext")
SOURCES = Path("bench/bare")


@app.command
def sandbox(
    *,
    count: Annotated[int, Parameter(validator=Number(gte=20))] = 200,
    idle_count: Annotated[int, Parameter(validator=Number(gte=10))] = 1000,
    out: Path | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Measure sandboxes beside the bare kernel, bwrap, crun, runc and subprocess.

    Runs in the source tree, as root, on a node of its own; takes some minutes.
    The exit code is 0 when every bar is held and 1 when one is missed.

        barchan bench sandbox
        barchan bench sandbox --count 100 --json --out bench.json
    """
    with prepare(SOURCES) as ground:
        report = bench.run(ground, count, idle_count, lambda line: print(f"bench: {line}", file=sys.stderr, flush=True))
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    _print(report)
    if common.json:
        print_json(report)
    return OK if all(bar.is_held for bar in report.bars) else FAILED


def _print(report: Report) -> None:
    bare = report.bare
    rows = [
        [
            "bare kernel calls",
            "create",
            str(bare.iterations),
            f"{bare.create_us_p50 / 1e3:.2f}",
            f"{bare.create_us_p95 / 1e3:.2f}",
            f"{bare.create_us_p99 / 1e3:.2f}",
        ]
    ]
    for name, columns in report.latency_ms.items():
        for what, values in columns.items():
            rows.append([name, what, str(values.count), f"{values.p50:.2f}", f"{values.p95:.2f}", f"{values.p99:.2f}"])
    burst = report.burst_ms
    rows.append(
        ["barchan", "create in a burst", str(burst.count), f"{burst.p50:.0f}", f"{burst.p95:.0f}", f"{burst.p99:.0f}"]
    )
    print_table(("contender", "what", "n", "p50 ms", "p95 ms", "p99 ms"), rows, empty="")
    print()
    print_table(
        ("launchers", "barchan/s", "bare/s"),
        [[str(rate.launchers), f"{rate.barchan:.0f}", f"{rate.bare:.0f}"] for rate in report.rates],
        empty="",
    )
    print(f"\nidle: {report.idle.total_mib:.2f} MiB each, {report.idle.processes_mib:.2f} of it processes\n")
    print_table(
        ("bar", "measured", "bound", "held"),
        [
            [
                bar.name,
                f"{bar.value:.2f}",
                f"{'<=' if bar.at_most else '>='} {bar.bound:g}",
                "yes" if bar.is_held else "NO",
            ]
            for bar in report.bars
        ],
        empty="",
    )
    if report.peers_missing:
        print(f"\nnot installed, so not measured: {', '.join(report.peers_missing)}")
