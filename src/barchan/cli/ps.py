"""`barchan ps`."""

import barchan
from barchan.cli.common import DEFAULTS, OK, Common, human_age, key_values, print_json, print_table
from barchan.cli.run import Words


def ps(*, label: Words = (), common: Common = DEFAULTS) -> int:
    """List the live sandboxes of a node.

    For example:

        barchan ps
        barchan ps --label job=eval --json

    Args:
        label: KEY=VALUE that a sandbox must have; may be repeated.
    """
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
