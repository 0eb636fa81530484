"""From the samples of a soak to its verdict, a table and a picture. No I/O."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

GROWTH_MAX = 1.10
POOL_SLACK_MIB = 8.0  # what the file system of an empty pool takes differs by so much
SLACK = 2  # of counts under load: a tenth of ten descriptors is not one request
SLICE_S = 15.0
MIB = ("node_rss_mib", "supervisor_rss_mib")
COUNTS = (
    "node_descriptors",
    "node_threads",
    "node_mounts",
    "supervisor_descriptors",
    "supervisor_mounts",
    "cgroups",
    "image_files",
)
AT_REST = (*COUNTS, "pool_mib")
# Shown and not judged: the journal keeps what ended for an hour, and the slab is the whole machine's.
SHOWN = ("pool_mib", "journal_mib", "slab_unreclaimable_mib")


@dataclass
class Soak:
    """What was seen. Times are seconds since the start; the first window is not recorded.

    Attributes:
        execs: (when it began, milliseconds) of each exec.
        done: Operations by kind.
        late: Operations left out since too many of their kind were under way.
        rest_before, rest_after: With no sandbox and no client.
    """

    duration_s: float
    window_s: float
    began: float
    done: Counter[str]
    late: int = 0
    failures: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    execs: list[tuple[float, float]] = field(default_factory=list)
    rest_before: dict[str, float] = field(default_factory=dict)
    rest_after: dict[str, float] = field(default_factory=dict)

    def as_dict(self, rows: "Sequence[Row]") -> dict[str, Any]:
        return {**vars(self), "rows": [{**asdict(row), "is_held": row.is_held} for row in rows]}

    @property
    def windows(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The first one that is compared, and the last."""
        return (self.window_s, 2 * self.window_s), (self.duration_s - self.window_s, self.duration_s)


@dataclass(frozen=True)
class Row:
    """One comparison; `bound` None: shown only."""

    name: str
    when: str
    first: float
    last: float
    bound: float | None

    @property
    def is_held(self) -> bool:
        return self.bound is None or self.last <= self.bound


def judge(soak: Soak) -> list[Row]:
    rows = []
    for name in (*MIB, *COUNTS, *SHOWN):
        first, last = (median(of(soak, name, window)) for window in soak.windows)
        slack = SLACK if name in COUNTS else 0
        bound = None if name in SHOWN else max(first * GROWTH_MAX, first + slack)
        rows.append(Row(name, "load", first, last, bound))
    for share in (0.50, 0.99):
        first, last = (exec_ms(soak, share, window) for window in soak.windows)
        rows.append(Row(f"exec_ms_p{share * 100:.0f}", "load", first, last, first * GROWTH_MAX))
    for name in AT_REST:
        first, last = soak.rest_before[name], soak.rest_after[name]
        rows.append(Row(name, "rest", first, last, first + POOL_SLACK_MIB * (name == "pool_mib")))
    return rows


def of(soak: Soak, name: str, window: tuple[float, float]) -> list[float]:
    start, end = window
    return [sample[name] for sample in soak.samples if start <= sample["t_s"] < end]


def exec_ms(soak: Soak, share: float, window: tuple[float, float]) -> float:
    """The median of the percentiles of a window's slices, so that one slow spell of the host is one slice."""
    start, end = window
    slices: dict[int, list[float]] = {}
    for t_s, spent_ms in soak.execs:
        if start <= t_s < end:
            slices.setdefault(int((t_s - start) / SLICE_S), []).append(spent_ms)
    return median(percentile(values, share) for values in slices.values())


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * share) - 1]


def by_minute(soak: Soak) -> list[tuple[int, int, float, float]]:
    """Minute, execs, p50 and p99."""
    minutes: dict[int, list[float]] = {}
    for t_s, spent_ms in soak.execs:
        minutes.setdefault(int(t_s // 60), []).append(spent_ms)
    return [
        (minute, len(values), percentile(values, 0.5), percentile(values, 0.99))
        for minute, values in sorted(minutes.items())
    ]


def table(soak: Soak, rows: Sequence[Row]) -> str:
    (start, end), (last_start, last_end) = (tuple(edge / 60 for edge in window) for window in soak.windows)
    lines = [
        f"{'':26}{'':6}{f'{start:g}-{end:g} min':>14}{f'{last_start:g}-{last_end:g} min':>14}{'bound':>10}",
        *(
            f"{row.name:26}{row.when:6}{row.first:14.2f}{row.last:14.2f}"
            f"{'-' if row.bound is None else f'{row.bound:.2f}':>10}  {'' if row.is_held else 'GREW'}"
            for row in rows
        ),
        "",
        "minute  execs   p50 ms   p99 ms",
        *(f"{minute:6}{count:7}{p50:9.2f}{p99:9.2f}" for minute, count, p50, p99 in by_minute(soak)),
        "",
        ", ".join(f"{count} {kind}" for kind, count in sorted(soak.done.items())) + f", {soak.late} left out as late",
        f"{len(soak.failures)} operations failed",
        *(f"  {text}" for text in soak.failures[:20]),
    ]
    return "\n".join(lines)


# The picture

WIDTH, HEIGHT, COLUMNS = 300, 110, 3


def picture(soak: Soak) -> str:
    """Every number over the run, as SVG; the compared windows are grey."""
    names = [name for name in soak.samples[0] if name != "t_s"]
    panels = [(name, [(sample["t_s"], sample[name]) for sample in soak.samples]) for name in names]
    minutes = by_minute(soak)
    panels += [
        (f"exec_ms_p{share}", [(60.0 * row[0] + 30, row[at]) for row in minutes]) for share, at in ((50, 2), (99, 3))
    ]
    rows = math.ceil(len(panels) / COLUMNS)
    drawn = [
        f'<g transform="translate({at % COLUMNS * WIDTH},{at // COLUMNS * HEIGHT})">{_panel(soak, name, points)}</g>'
        for at, (name, points) in enumerate(panels)
    ]
    size = f'width="{COLUMNS * WIDTH}" height="{rows * HEIGHT}"'
    style = 'font-family="sans-serif" font-size="10"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(drawn) + "\n</svg>\n"


def _panel(soak: Soak, name: str, points: Sequence[tuple[float, float]]) -> str:
    wide, high = WIDTH - 20, HEIGHT - 40
    most = max(value for _, value in points)

    def x(t_s: float) -> float:
        return 10 + wide * min(t_s, soak.duration_s) / soak.duration_s

    windows = "".join(
        f'<rect x="{x(start):.1f}" y="20" width="{x(end) - x(start):.1f}" height="{high}" fill="#eee"/>'
        for start, end in soak.windows
    )
    line = " ".join(f"{x(t_s):.1f},{20 + high * (1 - value / (most or 1)):.1f}" for t_s, value in points)
    label = f'<text x="10" y="14">{name}: 0 to {most:.5g}, last {points[-1][1]:.5g}</text>'
    frame = f'<path d="M10 20V{20 + high}H{10 + wide}" fill="none" stroke="#999"/>'
    return f'{windows}{frame}{label}<polyline points="{line}" fill="none" stroke="#06c"/>'
