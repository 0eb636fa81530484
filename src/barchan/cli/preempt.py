"""`barchan preempt`."""

import sys

import barchan
from barchan.cli.common import DEFAULTS, FAILED, OK, Common, one_line, print_json, seconds_of
from barchan.model.lease import KEEP_S
from barchan.model.tiers import TierChange


def preempt(run: str, /, *, keep: str = f"{KEEP_S / 3600:g}h", by: str = "", common: Common = DEFAULTS) -> int:
    """Put a run aside to make room, and lose nothing of it: all its sandboxes
    stand still at once and then go to disk, and whoever drives it is told.

    The run goes on when it is started again (barchan rollout --resume): each
    sandbox wakes with the first request, in the middle of what it was doing.

    For example:

        barchan preempt run_1f2e3d
        barchan preempt nightly --keep 12h --by "the evaluation"

    Args:
        run: Its name, or the id of a lease (barchan ps --runs).
        keep: How long its sandboxes are kept for that; then they end.
        by: Who wants it, for those who are told. [default: this user and host]
    """
    with barchan.connect(**common.connection) as client:
        told = print_json if common.json else _tell
        found = client.preempt(run, keep_s=seconds_of(keep, "--keep"), by=by, progress=told)
    awake = sum(change.tier == "running" for change in found)
    if not common.json:
        on_disk = sum(change.tier == "hibernated" for change in found)
        paused = len(found) - on_disk - awake
        sys.stdout.write(f"{run}: {on_disk} on disk, {paused} paused, {awake} that did not stop; kept for {keep}\n")
    return FAILED if awake else OK


def _tell(change: TierChange) -> None:
    why = f"  {one_line(change.refused)}" if change.refused else ""
    sys.stdout.write(f"{change.sandbox_id}  {change.tier}{why}\n")
    sys.stdout.flush()
