"""`barchan ps`."""

import math
import sys
import time

import barchan
from barchan.cli.common import DEFAULTS, OK, Common, human_age, key_values, print_json, print_table
from barchan.cli.run import Words
from barchan.model.node import LeaseInfo


def ps(*, label: Words = (), runs: bool = False, common: Common = DEFAULTS) -> int:
    """List the live sandboxes of a node, or the leases they belong to.

    For example:

        barchan ps
        barchan ps --label job=eval --json
        barchan ps --runs

    Args:
        label: KEY=VALUE that a sandbox, or with --runs a lease, must have; may be repeated.
        runs: Who holds sandboxes here, what they have used, and what ended within the last day and how.
    """
    if runs:
        return _runs(key_values(label, "--label"), common)
    with barchan.connect(**common.connection) as client:
        found = client.list(labels=key_values(label, "--label"))
    if common.json:
        print_json(found)
        return OK
    rows = [
        [
            info.sandbox_id,
            info.phase,
            " + ".join((info.template, *info.spec.layers)),
            human_age(info.age_s),
            human_age(info.idle_s),
            str(info.processes_running),
            ",".join(f"{key}={value}" for key, value in info.spec.labels.items()),
        ]
        for info in found
    ]
    columns = ("SANDBOX", "PHASE", "TEMPLATE", "AGE", "IDLE", "PROCESSES", "LABELS")
    print_table(columns, rows, empty="no sandboxes (try: barchan run debian --keep)")
    return OK


def _runs(labels: dict[str, str], common: Common) -> int:
    with barchan.connect(**common.connection) as client:
        found = [lease for lease in client.leases(ended=True) if labels.items() <= lease.labels.items()]
    # What lives, then the latest end.
    found.sort(key=lambda lease: -math.inf if lease.end is None else -lease.end.at_unix_s)
    if common.json:
        print_json(found)
        return OK
    shown = [lease for lease in found if "run" in lease.labels or _has_sandboxes(lease)]
    columns = ("RUN", "LEASE", "PHASE", "HOLDERS", "BEAT", "SANDBOXES", "SECONDS", "TOKENS", "WHAT NOW")
    rows = [
        [
            lease.labels.get("run", "-"),
            lease.lease_id,
            lease.phase,
            str(lease.holders),
            "-" if lease.beat_unix_s is None else human_age(max(0.0, time.time() - lease.beat_unix_s)),
            str(lease.end.sandboxes if lease.end is not None else lease.used.sandboxes),
            f"{lease.used.sandbox_s:.0f}",
            str(lease.used.tokens),
            _what_now(lease),
        ]
        for lease in shown
    ]
    print_table(columns, rows, empty="no runs: nobody has sandboxes here, or left some behind within the last day")
    if clients := len(found) - len(shown):
        sys.stdout.write(f"not listed: {clients} clients without a run that have no sandboxes (--json has them)\n")
    return OK


def _has_sandboxes(lease: LeaseInfo) -> bool:
    """Whether somebody may look for them: they live, or ended though no client had ended them."""
    return lease.used.sandboxes > 0 if lease.end is None else lease.end.cause != "ended" and lease.end.sandboxes > 0


def _what_now(lease: LeaseInfo) -> str:
    if lease.end is not None:
        ago = human_age(max(0.0, time.time() - lease.end.at_unix_s))
        collected = f", with sandboxes that it had ({lease.end.sandboxes})" if lease.end.sandboxes else ""
        return f"{lease.end.why}, {ago} ago{collected}"
    left = "" if lease.ends_unix_s is None else human_age(max(0.0, lease.ends_unix_s - time.time()))
    if lease.preemption is not None:
        return f"put aside by {lease.preemption.by or 'somebody'}, kept for {left}"
    what = "its sandboxes end" if lease.used.sandboxes else "ends, without sandboxes,"
    return f"{what} in {left}, unless somebody holds it again" if left else ""
