"""What a person sees of a run: live counts while it goes on, tables at its end."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from barchan.cli.common import human_age, one_line, print_table
from barchan.rollout.bias import Share
from barchan.rollout.percentiles import Percentiles
from barchan.rollout.summary import Summary, Tally
from barchan.rollout.table import TaskRow, worst_first

LINE_EVERY_S = 5.0
TASKS_SHOWN = 30
EXAMPLE_CHARS = 200


class Progress:
    """On stderr: a bar on a terminal, else a line every few seconds."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._total = 0
        self._activity: Callable[[], str] = str
        self._started = time.monotonic()
        self._earlier = 0
        self._line_at = self._started + LINE_EVERY_S
        self._bar: Bar | None = None

    @contextmanager
    def shown(self, rollouts_total: int, activity: Callable[[], str]) -> Iterator[None]:
        """Show it until this is left.

        Args:
            activity: What goes on now, in words.
        """
        self._total, self._activity = rollouts_total, activity
        self._started, self._earlier = time.monotonic(), self._tally.rollouts
        self._line_at = self._started + LINE_EVERY_S
        if not sys.stderr.isatty():
            yield
            return
        columns = (BarColumn(), MofNCompleteColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        with Bar(*columns, console=Console(stderr=True)) as self._bar:
            self._task = self._bar.add_task(self._words(), total=rollouts_total)
            yield
            self.update()

    def update(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._tally.rollouts, description=self._words())
        elif time.monotonic() >= self._line_at:
            self._line_at = time.monotonic() + LINE_EVERY_S
            sys.stderr.write(f"{self._tally.rollouts}/{self._total} rollouts: {self._words()}\n")

    def say(self, text: str) -> None:
        """A line that stays."""
        line = one_line(text)
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stderr.write(f"{line}\n")

    def _words(self) -> str:
        mean = self._tally.reward_mean
        shown = "-" if mean is None else f"{mean:.3f}"
        counts = f"{self._tally.scored} scored, {self._tally.void} void, mean reward {shown}"
        done = self._tally.rollouts - self._earlier
        if done > 0:
            rate = done / max(time.monotonic() - self._started, 1e-3)
            counts += f"; {rate:.1f}/s, {human_age((self._total - self._tally.rollouts) / rate)} left"
        return f"{counts}; {self._activity()}"


def print_summary(summary: Summary, rows: Sequence[TaskRow]) -> None:
    """The run as tables on stdout: as a whole, then its tasks, the worst first."""
    table = Table(title=f"{summary.task_set}, policy {summary.policy}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(summary):
        table.add_row(name, value)
    Console(highlight=False).print(table)
    if len(rows) > 1:
        _print_tasks(rows)


def _print_tasks(rows: Sequence[TaskRow]) -> None:
    print_table(
        ("TASK", "N", "MEAN", "SCORED", "VOID", "CANCELLED", "TRUNCATED", "TURNS", "TOKENS", "AGENT P50", "P95"),
        [
            [
                row.task_id,
                str(row.n),
                _number(row.reward_mean, ".3f"),
                str(row.scored),
                str(row.void),
                str(row.cancelled),
                str(row.truncated),
                _number(row.turns_mean, ".1f"),
                _number(row.completion_tokens_mean, ".0f"),
                _number(row.agent_s_p50, ".2f", " s"),
                _number(row.agent_s_p95, ".2f", " s"),
            ]
            for row in worst_first(rows)[:TASKS_SHOWN]
        ],
        empty="",
    )
    if len(rows) > TASKS_SHOWN:
        print(f"the worst {TASKS_SHOWN} of {len(rows)} tasks; tasks.json has them all")


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _rows(summary: Summary) -> list[tuple[str, str]]:
    groups, waits = summary.groups, summary.waits
    rows = [
        ("rollouts", _counts(summary)),
        ("mean reward", _reward(summary)),
        *_bias(summary),
        ("groups", f"{groups.all_one} all 1, {groups.mixed} mixed, {groups.all_zero} all 0, {groups.void} void"),
        ("wall time", f"{summary.wall_s:.1f} s, {summary.rollouts_per_s:.1f} rollouts/s"),
        ("first instruction", _percentiles(summary.ttfi_ms)),
        *((stage.replace("_", " "), _percentiles(times)) for stage, times in summary.stage_ms.items()),
        (
            "openings waited",
            f"{waits.slot_s:.1f} s for agents, {waits.graders_s:.1f} s for graders, "
            f"{waits.environments_s:.1f} s for environments",
        ),
    ]
    if summary.completion_tokens:
        rows.append(("tokens", f"{summary.prompt_tokens} in, {summary.completion_tokens} out"))
    if summary.turns > summary.scored + summary.void:  # more than the one turn that each must have
        calls = ", ".join(f"{count} {name}" for name, count in summary.tool_calls.items())
        rows.append(("turns", f"{summary.turns}; calls: {calls}, {summary.malformed_calls} malformed"))
    if summary.truncated and summary.truncated_share is not None:
        rows.append(("truncated", f"{summary.truncated}, {summary.truncated_share:.1%} of those scored"))
    for kind, causes in (("scored", summary.scored_by_cause), ("void", summary.void_by_cause)):
        for cause, count in causes.items():
            example = summary.void_example.get(cause, "") if kind == "void" else ""
            if cause != "completed":
                rows.append((f"{kind}: {cause}", f"{count}, as {example[:EXAMPLE_CHARS]}" if example else str(count)))
    return [*rows, ("results", summary.out)]


def _counts(summary: Summary) -> str:
    text = f"{summary.rollouts}: {summary.scored} scored, {summary.void} void"
    if summary.cancelled:
        text += f", {summary.cancelled} cancelled ({summary.surplus} surplus)"
    if summary.not_started:
        text += f", {summary.not_started} not started"
    if summary.resumed:
        text += f"; {summary.resumed} went on, {summary.answered} steps of theirs from their logs"
    return f"{text}; {summary.retried} tried again" if summary.retried else text


def _reward(summary: Summary) -> str:
    if summary.reward_mean is None:
        return "nothing was scored"
    text = f"{summary.reward_mean:.4f}"
    if summary.void:
        text += f" (void rollouts could make it {summary.reward_mean_low:.4f} to {summary.reward_mean_high:.4f})"
    return text


def _bias(summary: Summary) -> list[tuple[str, str]]:
    """What other treatments of lost rollouts would report, and whom the loss hit. Nothing was lost: nothing to say."""
    bias = summary.bias
    if not bias.void and not bias.cancelled:
        return []
    otherwise = (
        f"{_number(bias.reward_if_zero, '.4f')} with voids as 0; {_number(bias.reward_if_dropped, '.4f')} without the "
        f"{bias.groups_dropped} of {bias.groups} groups that lost one; {_number(bias.reward_by_task, '.4f')} by task"
    )
    return [
        ("mean otherwise", otherwise),
        ("lost, by difficulty", _shares(bias.by_difficulty)),
        ("lost, by length", _shares(bias.by_length)),
    ]


def _shares(shares: Sequence[Share]) -> str:
    return ", ".join(
        f"{share.name} {share.void_rate:.1%} void" + (f", {share.cancelled_rate:.1%} cancelled" * bool(share.cancelled))
        for share in shares
    )


def _percentiles(times: Percentiles) -> str:
    if times.p50 is None:
        return "-"
    return f"p50 {times.p50:.1f} ms, p95 {times.p95:.1f} ms, p99 {times.p99:.1f} ms"
