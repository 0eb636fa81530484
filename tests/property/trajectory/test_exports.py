"""Whatever bodies hold, every export can be made and keeps its format's rules."""

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from barchan.trajectory.atif import atif
from barchan.trajectory.chrome import chrome_trace
from barchan.trajectory.format import Header, Kind
from barchan.trajectory.reader import Trajectory, load
from barchan.trajectory.story import account, story
from barchan.trajectory.writer import TrajectoryWriter

NAMES = (
    "role content tools model text reasoning tool_calls function prompt_ids completion_ids logprobs usage wait_ms id "
    "call_id tool_call_id name arguments status exit_code timed_out stdout data path command error reward cause"
)
WORDS = st.sampled_from(["", "user", "tool", "assistant", "c1", '{"a": 1}', "[1", "\ud800", "x" * 70_000])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.binary(max_size=3)
KEYS = st.sampled_from(NAMES.split())
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=6)
BODIES = st.dictionaries(KEYS, VALUES, max_size=6)
KINDS = st.sampled_from([kind for kind in get_args(Kind) if kind != "verdict"])  # with which a log ends
STEPS = st.lists(st.tuples(st.sampled_from(["entry", "intent", "result"]), KINDS, BODIES))
AGENT_ONLY = {"model_name", "reasoning_content", "tool_calls", "metrics"}


def logged(steps: list[tuple[str, Kind, dict[str, Any]]]) -> Trajectory:
    header = Header(
        rollout_id="r",
        run_id="run",
        task_id="t",
        group_index=0,
        sample_index=0,
        epoch=0,
        created_unix_s=0.0,
        barchan_version="0",
    )
    with tempfile.TemporaryDirectory() as folder:
        with TrajectoryWriter.create(Path(folder) / "log", header) as log:
            for part, kind, body in steps:
                if part == "entry":
                    log.entry(kind, body)
                elif part == "intent":
                    log.intent(kind, body)
                elif log.open_intents:
                    log.result(log.open_intents[-1].seq, body)
        return load(log.path)


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, float):
        yield value


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_exports_take_any_body(steps: list[tuple[str, Kind, dict[str, Any]]]) -> None:
    """A policy's or an endpoint's strange values break no export, and ATIF's rules on steps hold all the same."""
    log = logged(steps)
    document = msgspec.json.decode(msgspec.json.encode(atif(log)))
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
    assert document["steps"]
    for step in document["steps"]:
        assert isinstance(step["message"], str)
        assert step["source"] == "agent" or not AGENT_ONLY & set(step)
        assert step.get("llm_call_count") != 0 or not {"metrics", "reasoning_content"} & set(step)
        calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
        assert all(isinstance(call["arguments"], dict) for call in step.get("tool_calls", ()))
        results = step.get("observation", {"results": []})["results"]
        assert {result["source_call_id"] for result in results if "source_call_id" in result} <= calls
    trace = msgspec.json.decode(msgspec.json.encode(chrome_trace([log])))
    assert all(math.isfinite(number) for number in numbers(trace))
    assert [line.seq for line in story(log)] == sorted(line.seq for line in story(log))
    assert account(log).entries == len(log.entries)
