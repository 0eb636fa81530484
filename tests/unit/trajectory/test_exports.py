"""What exports and stories make of a log."""

from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan.trajectory.atif import atif
from barchan.trajectory.chrome import chrome_trace
from barchan.trajectory.format import GENESIS, Entry
from barchan.trajectory.reader import Trajectory, load
from barchan.trajectory.spans import as_text, spans
from barchan.trajectory.story import account, story
from barchan.trajectory.values import Cut
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.trajectory.logs import header, new_log, write_rollout


@pytest.fixture
def rollout(tmp_path: Path) -> Trajectory:
    with new_log(tmp_path) as log:
        write_rollout(log)
    return load(log.path)


def at(seconds: float, seq: int, part: Any, kind: Any, of: int | None = None, **body: Any) -> Entry:
    """An entry at a time of its own; the wall clock is 100 s ahead of the monotonic one, and steps back later."""
    unix_ns = 100_000_000_000 if seq == 0 else 0
    return Entry(
        seq=seq,
        part=part,
        kind=kind,
        of=of,
        epoch=1,
        unix_ns=unix_ns,
        mono_ns=int(seconds * 1e9),
        body=body,
        prev_hash=GENESIS,
    )


def made(*entries: Entry) -> Trajectory:
    return Trajectory(header=header(), entries=[at(0, 0, "header", None), *entries], open_intents=(), torn_bytes=0)


def test_spans_pair_intents_with_results() -> None:
    """A span lasts from its intent to its result and knows both; wall time is read through the monotonic clock."""
    log = made(
        at(1, 1, "intent", "exec", command="a"),
        at(2, 2, "intent", "exec", command="b"),
        at(4, 3, "result", "exec", of=1, exit_code=3),
        at(5, 4, "entry", "note"),
    )
    found = spans(log.entries)
    assert [(span.seq, span.start_ns // 10**9, span.end_ns // 10**9, span.known) for span in found] == [
        (1, 101, 104, True),
        (2, 102, 105, False),
        (4, 105, 105, True),
    ]
    assert found[0].body == {"command": "a", "exit_code": 3}


def test_a_model_call_told_afterwards_lasted_as_long_as_it_says() -> None:
    """`wait_ms` is the call's time; without it, all the time since the entry before it."""
    log = made(
        at(1, 1, "entry", "message"),
        at(4, 2, "entry", "model_call", wait_ms=500.0),
        at(6, 3, "entry", "model_call"),
    )
    assert [span.seconds for span in spans(log.entries)] == [0.0, 0.5, 2.0]


def test_what_encloses_what() -> None:
    """Work inside a tool call or a grading is told so; a call whose result never came ends with the next turn."""
    log = made(
        at(1, 1, "intent", "tool_call"),
        at(2, 2, "intent", "exec"),
        at(3, 3, "result", "exec", of=2),
        at(4, 4, "result", "tool_call", of=1),
        at(5, 5, "entry", "note"),
        at(6, 6, "intent", "tool_call"),
        at(7, 7, "intent", "exec"),
        at(8, 8, "entry", "model_call"),
        at(9, 9, "intent", "grade"),
        at(10, 10, "entry", "model_call"),
    )
    assert {span.seq: span.inside for span in spans(log.entries)} == {
        1: None,
        2: 1,
        5: None,
        6: None,
        7: 6,
        8: None,
        9: None,
        10: 9,
    }


def test_atif_has_a_step_per_turn(rollout: Trajectory) -> None:
    """A turn is one agent step: what was sampled, the calls, what they gave; Harbor's rules on fields are kept."""
    document = atif(rollout)
    steps = document["steps"]
    assert document["schema_version"] == "ATIF-v1.8"
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4]
    assert [step["source"] for step in steps] == ["system", "agent", "agent", "system"]
    assert steps[2]["metrics"] == {
        "prompt_tokens": 54,
        "completion_tokens": 3,
        "prompt_token_ids": [*range(1000, 1050), 0, 7, 8, 9],
        "completion_token_ids": [1, 7, 8],
        "logprobs": [-0.5, -0.25, 0.0],
    }
    assert steps[1]["tool_calls"] == [
        {"tool_call_id": "c0", "function_name": "bash", "arguments": {"command": "ls"}},
    ]
    (result,) = steps[1]["observation"]["results"]
    assert (result["source_call_id"], result["content"], result["extra"]["status"]) == ("c0", "seen 0", "ok")
    assert steps[3]["observation"]["results"][0]["content"] == "print(1)"
    assert document["agent"]["tool_definitions"] == [{"type": "function", "function": {}}]
    assert document["agent"]["model_name"] == "smol"
    assert document["extra"]["verdict"]["reward"] == 1.0
    assert document["final_metrics"] == {"total_prompt_tokens": 104, "total_completion_tokens": 6, "total_steps": 4}
    for step in steps:
        datetime.fromisoformat(step["timestamp"])
        assert step["source"] == "agent" or not {"tool_calls", "metrics", "model_name"} & set(step)


def test_atif_of_awkward_logs() -> None:
    """Calls nobody sampled, observations, arguments that are no object, NaN log-probs, and an empty log."""
    log = made(
        at(1, 1, "intent", "tool_call", name="bash", arguments="not json"),
        at(2, 2, "result", "tool_call", of=1, content="own"),
        at(3, 3, "entry", "observation", call_id="call_1", content="shown"),
        at(3, 4, "entry", "observation", content="free"),
        at(4, 5, "entry", "message", role="user", content=[{"type": "text", "text": "hi"}]),
        at(4, 6, "entry", "observation", call_id="none", content="later"),
        at(
            5,
            7,
            "entry",
            "model_call",
            model="m",
            text="x",
            logprobs=[None],
            tool_calls=[{"name": "f", "arguments": [1]}],
        ),
        at(6, 8, "entry", "model_call", model="other", text="y", reasoning="because"),
        at(7, 9, "entry", "message", role="tool", tool_call_id="zz", content="unasked"),
        at(8, 10, "entry", "cancel", reason="stale"),
    )
    document = atif(log)
    steps = document["steps"]
    assert [(step["source"], step["message"]) for step in steps] == [
        ("agent", ""),
        ("user", "hi"),
        ("system", "observation"),
        ("agent", "x"),
        ("agent", "y"),
    ]
    assert steps[0]["llm_call_count"] == 0
    assert steps[0]["tool_calls"][0]["arguments"] == {"raw": "not json"}
    assert [(r.get("source_call_id"), r["content"]) for r in steps[0]["observation"]["results"]] == [
        ("call_1", "shown"),
        (None, "free"),
    ]
    assert steps[3]["tool_calls"][0] == {"tool_call_id": "call_0", "function_name": "f", "arguments": {"raw": [1]}}
    assert steps[3]["metrics"] == {}
    assert (steps[4]["model_name"], steps[4]["reasoning_content"]) == ("other", "because")
    assert steps[4]["observation"]["results"] == [{"content": "unasked"}]
    assert document["extra"]["cancel"] == {"reason": "stale"}
    assert len(atif(made())["steps"]) == 1


def test_the_trace_has_a_row_per_rollout(tmp_path: Path) -> None:
    """Spans are complete events with times from the first start on; runs and rollouts are named."""
    for name in ("r-000000", "r-000001"):
        with new_log(tmp_path, name) as log:
            write_rollout(log, turns=1)
    logs = [load(path) for path in sorted(tmp_path.rglob("*.jsonl"))]
    trace = msgspec.json.decode(msgspec.json.encode(chrome_trace(logs)))
    events = trace["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {1: "r-000000 repo/1", 2: "r-000001 repo/1"}
    assert [event["args"] for event in events if event["name"] == "process_name"] == [{"name": "r"}]
    spans_of_first = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    names = ["model wait", "bash", "exec", "read", "grade", "model wait"]
    assert [event["name"] for event in spans_of_first] == names
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans_of_first)
    assert min(event["ts"] for event in events if "ts" in event) == 0
    assert spans_of_first[0]["args"]["prompt_ids_count"] == 50


def test_spans_that_overlap_get_rows_of_their_own() -> None:
    """A row only nests: of two parallel calls the second goes to another row, what lies inside one stays with it."""
    log = made(
        at(1, 1, "intent", "tool_call", name="a"),
        at(2, 2, "intent", "tool_call", name="b"),
        at(3, 3, "result", "tool_call", of=1),
        at(4, 4, "intent", "exec"),
        at(5, 5, "result", "exec", of=4),
        at(6, 6, "result", "tool_call", of=2),
        at(7, 7, "intent", "exec"),
        at(8, 8, "result", "exec", of=7),
    )
    placed = [(e["tid"], e["args"]["seq"], e["ts"]) for e in chrome_trace([log])["traceEvents"] if e["ph"] == "X"]
    assert sorted(placed) == [(1, 1, 0.0), (1, 4, 3e6), (1, 7, 6e6), (2, 2, 1e6)]


def test_the_story_says_how_things_ended(rollout: Trajectory) -> None:
    """Each line says what was done and how it ended; failures are marked, work inside a call is indented."""
    lines = story(rollout)
    texts = {line.seq: line.text.rsplit(", ", 1)[0] for line in lines if line.text.endswith("ms")}
    assert texts[5] == "exec: ls -> exit code 0"
    assert texts[11] == "exec: ls -> exit code 1"
    assert texts[4] == 'tool bash {"command":"ls"} -> ok'
    assert [(line.seq, line.good) for line in lines if not line.good] == [(11, False)]
    assert [line.seq for line in lines if line.nested] == [5, 11, 17]
    assert [line.detail for line in lines if line.seq == 5] == ["out\n\N{REPLACEMENT CHARACTER}"]
    assert lines[-1].text == "verdict: scored, completed, reward 1.0"


def test_an_account_counts(rollout: Trajectory) -> None:
    """A judge's model calls are no turns."""
    told = account(rollout)
    assert (told.turns, told.tool_calls, told.execs) == (2, 2, 2)
    assert (told.prompt_tokens, told.completion_tokens) == (104, 6)
    assert (told.status, told.reward, told.cause) == ("scored", 1.0, "completed")


def test_turns_are_not_model_calls(tmp_path: Path) -> None:
    """A turn has as many model calls and tool calls as it took: a script has none of the former, a last answer none of
    the latter.
    """

    def call(log: TrajectoryWriter, turn: int | None) -> None:
        log.result(log.intent("tool_call", {"name": "bash", **({} if turn is None else {"turn": turn})}), {})

    for index, (steps, turns) in enumerate(
        (
            (("c0", "c0", "c1", "c2"), 3),
            (("m", "m", "c0", "c0", "m", "c1"), 2),
            (("m", "message", "m", "c1", "m"), 3),
            (("m", "m", "c", "c", "observation", "m", "c"), 2),
            (("message",), 0),
        )
    ):
        with new_log(tmp_path, f"r-{index:06}") as log:
            for step in steps:
                if step.startswith("c"):
                    call(log, int(step[1:]) if step[1:] else None)
                else:
                    log.entry("model_call" if step == "m" else step, {})  # type: ignore[arg-type]
        assert account(load(log.path)).turns == turns, steps


def test_an_account_of_what_did_not_end(tmp_path: Path) -> None:
    """A rollout without a verdict is unfinished, and says which intents have no result."""
    with new_log(tmp_path) as log:
        seq = log.intent("exec", {"command": "make"})
    told = account(load(log.path))
    assert (told.status, told.reward, told.open_intents) == ("unfinished", None, (seq,))
    with TrajectoryWriter.reopen(log.path) as log:
        log.entry("cancel", {"reason": "stale"})
    assert account(load(log.path)).status == "cancelled"
    assert story(load(log.path))[0].text == "exec: make -> no result in the log"


def test_long_values_are_shown_with_a_mark() -> None:
    """Where the middle is missing, the text says how much."""
    cut = Cut(size_bytes=10, sha256="", head=b"ab", tail=b"\xffz", text=False)
    assert as_text(cut) == "ab\n[... 6 bytes are left out here ...]\n\N{REPLACEMENT CHARACTER}z"
