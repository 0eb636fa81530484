"""Logs that the tests write."""

from pathlib import Path

from barchan.trajectory.format import Header, log_path
from barchan.trajectory.writer import TrajectoryWriter


def header(rollout_id: str = "r-000000", epoch: int = 1) -> Header:
    return Header(
        rollout_id=rollout_id,
        run_id="r",
        task_id="repo/1",
        group_index=0,
        sample_index=2,
        epoch=epoch,
        created_unix_s=1.5,
        barchan_version="0.1.0",
        policy="chat",
    )


def new_log(folder: Path, rollout_id: str = "r-000000") -> TrajectoryWriter:
    return TrajectoryWriter.create(log_path(folder, rollout_id), header(rollout_id))


def write_rollout(log: TrajectoryWriter, turns: int = 2, reward: float = 1.0) -> None:
    """A whole rollout: messages, turns with a tool call and its exec, a grading by a judge, a verdict."""
    prompt = list(range(1000, 1050))
    log.entry("message", {"role": "system", "content": "Fix it.", "tools": [{"type": "function", "function": {}}]})
    for turn in range(turns):
        call = log.intent("model_call", {"model": "smol", "prompt_ids": prompt, "sampling": {"temperature": 0.5}})
        sampled = [turn, 7, 8]
        said = {"id": f"c{turn}", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
        answer = {
            "text": f"turn {turn}",
            "tool_calls": [said],
            "completion_ids": sampled,
            "logprobs": [-0.5, -0.25, 0.0],
        }
        log.result(call, {**answer, "policy_version": 3, "finish_reason": "tool_calls"})
        prompt = [*prompt, *sampled, 9]
        tool = log.intent("tool_call", {"id": f"c{turn}", "name": "bash", "arguments": '{"command":"ls"}'})
        program = log.intent("exec", {"command": "ls", "timeout_s": 5.0}, op_id=f"op{turn}")
        log.result(program, {"exit_code": turn, "stdout": b"out\n", "stderr": b"\xff"})
        log.result(tool, {"call_id": f"c{turn}", "name": "bash", "content": f"seen {turn}", "status": "ok"})
    save = log.intent("file_read", {"path": "solution.py"})
    log.result(save, {"data": b"print(1)\n"})
    grade = log.intent("grade", {"grader": "judge"})
    log.entry("model_call", {"model": "judge", "text": "good", "wait_ms": 0.0})
    log.result(grade, {"outcome": "passed"})
    log.entry("verdict", {"status": "scored", "reward": reward, "fault": "none", "cause": "completed"})
