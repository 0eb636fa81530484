"""What a person sees of a run: live counts while it goes on, a table at its end."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from barchan.rollout.summary import Percentiles, Summary, Tally

LINE_EVERY_S = 5.0


class Progress:
    """On stderr: a bar on a terminal, else a line every few seconds."""

    def __init__(self, rollouts_total: int, tally: Tally) -> None:
        self._total = rollouts_total
        self._tally = tally
        self._line_at = time.monotonic() + LINE_EVERY_S
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            self._bar = Bar(
                BarColumn(),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar_task = self._bar.add_task(self._counts(), total=rollouts_total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar_task, completed=self._tally.rollouts, description=self._counts())
        elif time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_EVERY_S
            sys.stderr.write(f"{self._tally.rollouts}/{self._total} rollouts: {self._counts()}\n")

    def _counts(self) -> str:
        mean = self._tally.reward_mean
        shown = "-" if mean is None else f"{mean:.3f}"
        return f"{self._tally.scored} scored, {self._tally.void} void, mean reward {shown}"


def print_summary(summary: Summary) -> None:
    """The run as a table on stdout."""
    table = Table(title=f"{summary.task_set}, policy {summary.policy}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _rows(summary: Summary) -> list[tuple[str, str]]:
    counts = f"{summary.rollouts}: {summary.scored} scored, {summary.void} void"
    if summary.cancelled or summary.not_started:
        counts += f", {summary.cancelled} cancelled, {summary.not_started} not started"
    groups = summary.groups
    rows = [
        ("rollouts", counts),
        ("mean reward", _reward(summary)),
        ("groups", f"{groups.all_one} all 1, {groups.mixed} mixed, {groups.all_zero} all 0, {groups.void} void"),
        ("wall time", f"{summary.wall_s:.1f} s, {summary.rollouts_per_s:.1f} rollouts/s"),
        ("first instruction", _percentiles(summary.ttfi_ms)),
        *((stage, _percentiles(times)) for stage, times in summary.stage_ms.items()),
    ]
    if summary.completion_tokens:
        rows.append(("tokens", f"{summary.prompt_tokens} in, {summary.completion_tokens} out"))
    if summary.turns > summary.scored + summary.void:  # more than the one turn that each must have
        calls = ", ".join(f"{count} {name}" for name, count in summary.tool_calls.items())
        rows.append(("turns", f"{summary.turns}; calls: {calls}, {summary.malformed_calls} malformed"))
    if summary.truncated:
        rows.append(("truncated", str(summary.truncated)))
    for kind, causes in (("scored", summary.scored_by_cause), ("void", summary.void_by_cause)):
        rows += [(f"{kind}: {cause}", str(count)) for cause, count in causes.items() if cause != "completed"]
    return [*rows, ("results", summary.out)]


def _reward(summary: Summary) -> str:
    if summary.reward_mean is None:
        return "nothing was scored"
    text = f"{summary.reward_mean:.4f}"
    if summary.void:
        text += f" (void rollouts could make it {summary.reward_mean_low:.4f} to {summary.reward_mean_high:.4f})"
    return text


def _percentiles(times: Percentiles) -> str:
    if times.p50 is None:
        return "-"
    return f"p50 {times.p50:.1f} ms, p95 {times.p95:.1f} ms, p99 {times.p99:.1f} ms"
