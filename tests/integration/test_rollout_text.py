"""A model without tool calls at work in real sandboxes, and what its trajectory exports."""

import asyncio
from pathlib import Path

import pytest

import barchan
from barchan.trajectory.atif import atif
from barchan.trajectory.format import log_path
from barchan.trajectory.reader import load
from tests.integration.test_rollout_tools import chatted, limited, reply, serving
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(120), pytest.mark.requires("root", "cgroup", "userns")]

WRITE = "```bash\ncat > solution.py <<'E'\ndef double(x):\n    return 3 * x\nE\n```"
TRY = "Does it work?\n```python\nimport solution\nprint(solution.double(4))\n```\n```sh\npwd"
HAND_IN = "No: 12.\n```python solution.py\ndef double(x):\n    return 2 * x\n```\n"


async def test_a_model_works_by_blocks(node: NodeProcess, tmp_path: Path) -> None:
    """It writes, tries, talks, and hands in; each block is a tool call of the log and of its ATIF document."""
    turns = [reply(WRITE), reply(TRY, finish="length"), reply("Hm."), reply(HAND_IN)]
    async with (
        barchan.connect_async(state_dir=node.state_dir) as client,
        serving(lambda body, before: asyncio.sleep(0, turns[before])) as (url, bodies),
    ):
        record = await chatted(client, url, limited(turns_max=6), tmp_path, tool_format="text")
    assert (record.verdict.reward, record.verdict.cause, record.turns) == (1.0, "completed", 4)
    assert record.tool_calls == {"bash": 1, "python": 1, "submit": 1}
    said = bodies[-1]["messages"]
    assert [message["role"] for message in said] == ["user", "assistant"] * 3 + ["user"]
    assert said[2]["content"] == "Output of bash:\n[no output]"
    assert said[4]["content"].startswith("Output of python:\n12\n\n[Blocks not run: 1.")
    assert said[6]["content"].startswith("Your answer holds no whole block")
    steps = [step for step in atif(load(log_path(tmp_path, record.rollout_id)))["steps"] if step["source"] == "agent"]
    assert [step["message"] for step in steps] == [WRITE, TRY, "Hm.", HAND_IN]
    names = [[call["function_name"] for call in step.get("tool_calls", ())] for step in steps]
    assert names == [["bash"], ["python"], [], ["submit"]]
    assert steps[1]["observation"]["results"][0]["content"].strip() == "12"
