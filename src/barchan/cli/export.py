"""`barchan export`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from barchan.cli.common import DEFAULTS, OK, Common, print_json
from barchan.errors import InvalidSpec
from barchan.rollout.advantages import advantages
from barchan.rollout.export import rows, write_jsonl, write_parquet
from barchan.rollout.store import iter_rollouts

WRITERS = {".jsonl": write_jsonl, ".parquet": write_parquet}


def export(
    source: Path,
    target: Path,
    /,
    *,
    normalize: Literal["std", "none"] = "std",
    leave_one_out: bool = False,
    min_valid: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    common: Common = DEFAULTS,
) -> int:
    """Write a run's rollouts as rows for a trainer, with group-relative advantages.

    For example:

        barchan export runs/a a.parquet
        barchan export runs/a a.jsonl --normalize none --leave-one-out

    Args:
        source: A run's folder.
        target: FILE.parquet or FILE.jsonl.
        normalize: Whether advantages are divided by the deviation of their group.
        leave_one_out: Measure each by the mean of the others.
        min_valid: Mask groups with fewer scored members. [default: half of them, at least 2]
    """
    write = WRITERS.get(target.suffix)
    if write is None:
        raise InvalidSpec(f"{target}: give FILE.parquet or FILE.jsonl")
    found = advantages(iter_rollouts(source), normalize=normalize, leave_one_out=leave_one_out, min_valid=min_valid)
    count = write(target, rows(source, found))
    sys.stdout.write(f"{target}: {count} rollouts, {sum(found.mask)} of them to train on\n")
    if common.json:
        print_json({"path": str(target), "rollouts": count, "trainable": sum(found.mask)})
    return OK
