"""A run's results as rows for a trainer: what was sampled, what it earned, how much better than its group that was.

docs/rollouts.md describes the columns.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from barchan.errors import InvalidSpec, RequirementMissing
from barchan.rollout.advantages import Advantages
from barchan.rollout.record import RolloutRecord, Timings
from barchan.rollout.store import iter_rollouts

ROWS_AT_ONCE = 512  # a row may hold every token of a long conversation

Row = dict[str, Any]


def rows(folder: Path, found: Advantages) -> Iterator[Row]:
    """One row per record of a run's folder.

    Args:
        found: The advantages of the same records.
    """
    columns = zip(found.groups, found.advantages, found.mask, found.informative, strict=True)
    # A run that goes on may have more records by now than when the advantages were taken.
    for (group, advantage, valid, informative), record in zip(columns, iter_rollouts(folder), strict=False):
        yield {
            **_outcome(record),
            "group": group,
            "advantage": advantage,
            "mask": valid,
            "informative": informative,
            **_sampled(record),
            **asdict(record.timings),
        }


def _outcome(record: RolloutRecord) -> Row:
    verdict = record.verdict
    return {
        "run_id": record.run_id,
        "rollout_id": record.rollout_id,
        "task_id": record.task_id,
        "group_index": record.group_index,
        "sample_index": record.sample_index,
        "attempt": record.attempt,
        "policy": record.policy,
        "status": verdict.status,
        "reward": verdict.reward,
        "fault": verdict.fault,
        "cause": verdict.cause,
        "truncated": verdict.truncated,
        "exposed": verdict.exposed,
        "metrics": verdict.metrics,
    }


def _sampled(record: RolloutRecord) -> Row:
    calls = record.completions
    return {
        "turns": record.turns,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "prompt_ids": [call.prompt_ids for call in calls],
        "completion_ids": [call.completion_ids for call in calls],
        "logprobs": [call.logprobs for call in calls],
        "texts": [call.text for call in calls],
        "policy_versions": [None if call.policy_version is None else str(call.policy_version) for call in calls],
        "wait_ms": [call.wait_ms for call in calls],
        "agent_s": record.agent_s,
        "started_unix_s": record.started_unix_s,
    }


def write_jsonl(path: Path, lines: Iterator[Row]) -> int:
    """Write the rows as lines of JSON; returns how many.

    Raises:
        InvalidSpec: They can't be written.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    try:
        with path.open("wb") as file:
            for row in lines:
                file.write(encoder.encode(row) + b"\n")
                count += 1
    except OSError as error:
        raise InvalidSpec(f"{path} can't be written: {error.strerror}") from error
    return count


def write_parquet(path: Path, lines: Iterator[Row]) -> int:
    """Write the rows as a Parquet file; returns how many.

    Raises:
        RequirementMissing: pyarrow is not installed.
        InvalidSpec: They can't be written.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise RequirementMissing("Parquet needs pyarrow (try: pip install 'barchan[parquet]')") from error
    schema = pyarrow.schema(list(_types(pyarrow).items()))
    count = 0
    try:
        with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
            batch: list[Row] = []
            for row in lines:
                batch.append({**row, "metrics": list(row["metrics"].items())})
                count += 1
                if len(batch) == ROWS_AT_ONCE:
                    writer.write_table(pyarrow.Table.from_pylist(batch, schema))
                    batch = []
            writer.write_table(pyarrow.Table.from_pylist(batch, schema))
    except (OSError, OverflowError, pyarrow.ArrowException) as error:
        raise InvalidSpec(f"{path} can't be written: {error}") from error
    return count


def _types(pa: Any) -> Mapping[str, Any]:
    """The columns of the Parquet file, in their order."""
    text, number, flag, real = pa.string(), pa.int64(), pa.bool_(), pa.float64()
    ids, reals = pa.list_(pa.list_(number)), pa.list_(pa.list_(pa.float32()))
    return {
        **dict.fromkeys(("run_id", "rollout_id", "task_id"), text),
        **dict.fromkeys(("group_index", "sample_index", "attempt"), number),
        **dict.fromkeys(("policy", "status"), text),
        "reward": real,
        **dict.fromkeys(("fault", "cause"), text),
        **dict.fromkeys(("truncated", "exposed"), flag),
        "metrics": pa.map_(text, real),
        "group": text,
        "advantage": real,
        **dict.fromkeys(("mask", "informative"), flag),
        **dict.fromkeys(("turns", "prompt_tokens", "completion_tokens"), number),
        **dict.fromkeys(("prompt_ids", "completion_ids"), ids),
        "logprobs": reals,
        **dict.fromkeys(("texts", "policy_versions"), pa.list_(text)),
        "wait_ms": pa.list_(real),
        **dict.fromkeys(("agent_s", "started_unix_s", *Timings.__struct_fields__), real),
    }
