"""Tools as text: what a model is told, and which calls its answers stand for."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.rollout.calls import ToolCall
from barchan.rollout.limits import Limits
from barchan.rollout.policies.textual import BLOCKS_MAX, TextTools
from barchan.rollout.prompts import NO_CALL, opening
from barchan.rollout.task import FileArtifact, PatchArtifact
from barchan.rollout.tools import Toolbox
from tests.unit.rollout.fakes import task

pytestmark = pytest.mark.timeout(30)

TURNS = 4
HAND_IN = "```python solution.py\ndef f():\n    return 0\n```"


def text_tools(**fields: Any) -> TextTools:
    of = task(limits=Limits(turns_max=TURNS), **fields)
    return TextTools(Toolbox(of).schemas, of)


def calls(answer: str, of: TextTools | None = None, *, is_cut: bool = False) -> list[tuple[str, Any]]:
    """What an answer stands for, as names and arguments."""
    found = (of or text_tools()).calls(answer, is_cut=is_cut)
    return [(call.name, json.loads(call.arguments)) for call in found]


BASH_LS = ("bash", {"command": "ls -a"})
PRINTS = ("python", {"code": "print(1)"})
SOLVED = ("submit", {"solution": "def f():\n    return 0\n"})
AS_IT_LIES = ("submit", {})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("```bash\nls -a\n```", [BASH_LS]),
        ("Let me look.\n\n```sh\nls -a\n```\nThat shows all.", [BASH_LS]),
        ("  ```Shell  \nls -a\n  ```", [BASH_LS]),
        ("~~~bash\nls -a\n~~~", [BASH_LS]),
        ("```bash\r\nls -a\r\n```\r\n", [BASH_LS]),
        ("```bash\nls -a", [BASH_LS]),
        ("```py\nprint(1)\n```\n```bash\nls -a\n```", [PRINTS, BASH_LS]),
        ("````bash\ncat <<'E'\n```\nE\n````", [("bash", {"command": "cat <<'E'\n```\nE"})]),
        (HAND_IN, [SOLVED]),
        ("```python:./solution.py\ndef f():\n    return 0\n```", [SOLVED]),
        ('```python {title="solution.py"}\ndef f():\n    return 0\n```', [SOLVED]),
        ("```solution.py\ndef f():\n    return 0\n```", [SOLVED]),
        ("```submit\ndef f():\n    return 0\n```", [("submit", {"solution": "def f():\n    return 0"})]),
        (f"```python\nprint(1)\n```\n{HAND_IN}\n```bash\nls -a\n```", [PRINTS, SOLVED]),
        ("SUBMIT", [AS_IT_LIES]),
        ("It works.\n\n**SUBMIT**\n", [AS_IT_LIES]),
        ("```bash\nls -a\n```\nSUBMIT", [BASH_LS, AS_IT_LIES]),
        ("```\nSUBMIT\n```", [AS_IT_LIES]),
        ("```submit\n```", [AS_IT_LIES]),
        ('```edit\n{"command": "view", "path": "a"}\n```', [("edit", {"command": "view", "path": "a"})]),
    ],
)
def test_forms_in_which_models_call(answer: str, expected: list[tuple[str, Any]]) -> None:
    """Languages by their usual names, fences of any kind or length, a file's name wherever it stands on the fence."""
    assert calls(answer) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I would SUBMIT it if I could.",
        "submit",
        "```bash\n```",
        "```\nls\n```",
        "```json\n{}\n```",
        "Use ```ls -a``` to see.",
        "```rust\nfn main() {}\n```",
        "```\0\x1b[2J",
    ],
)
def test_answers_that_call_nothing(answer: str) -> None:
    """Talk, empty blocks, blocks in no or another language stand for no call."""
    assert calls(answer) == []


def test_only_the_first_blocks_count() -> None:
    """Of many blocks so many are run, in their order; the model is told how many were not."""
    answer = "\n".join(f"```bash\necho {number}\n```" for number in range(BLOCKS_MAX + 2))
    assert calls(answer) == [("bash", {"command": f"echo {number}"}) for number in range(BLOCKS_MAX)]
    said = text_tools().conversation([*opening(task()), *turn(answer)])
    assert "Blocks not run: 2." in said[-1]["content"]


def test_what_a_limit_cut_is_not_run() -> None:
    """The open block of a cut answer is half a program; the whole ones before it count."""
    answer = "```bash\nls -a\n```\n```python solution.py\ndef f():"
    assert calls(answer, is_cut=True) == [BASH_LS]
    assert calls(answer, is_cut=False) == [BASH_LS, ("submit", {"solution": "def f():\n"})]


def test_a_task_without_an_answer_file() -> None:
    """Where the work itself is handed in, only the line does it, and a block of that name is a program."""
    tools = text_tools(artifact=PatchArtifact(repo="/repo", base="HEAD"))
    assert calls(HAND_IN, tools) == [("python", {"code": "def f():\n    return 0"})]
    assert calls("SUBMIT", tools) == [AS_IT_LIES]
    assert "the line SUBMIT alone: Hand in" in tools.introduction
    assert "solution.py" not in tools.introduction


def test_a_task_without_a_tool() -> None:
    """A tool that the task does not have is neither described nor called."""
    tools = text_tools(tools=("bash",))
    assert calls(f"```python\nprint(1)\n```\nSUBMIT\n{HAND_IN}\n```bash\nls -a\n```", tools) == [BASH_LS]
    assert [line.partition(":")[0] for line in tools.introduction.splitlines()[1:]] == ["- ```bash"]


def test_the_introduction_says_what_the_parser_takes() -> None:
    """Every tool has a line, with its own description; the whole is short, for small contexts."""
    first, *lines = text_tools(artifact=FileArtifact(path="notes.txt")).introduction.splitlines()
    assert f"{TURNS} at most" in first
    assert [line.split()[1].rstrip(":") for line in lines] == ["```bash", "```python", "```edit", "```notes.txt"]
    assert "view_range" in lines[2]
    assert sum(map(len, lines)) < 1200


def turn(answer: str, *contents: str, calls: tuple[ToolCall, ...] | None = None) -> list[dict[str, Any]]:
    """An answer and what came of it, as a rollout keeps them."""
    made = text_tools().calls(answer) if calls is None else calls
    named = [ToolCall(id=f"c{index}", name=call.name, arguments=call.arguments) for index, call in enumerate(made)]
    assistant: dict[str, Any] = {"role": "assistant", "content": answer}
    if not named:
        return [assistant, {"role": "user", "content": NO_CALL}]
    outputs = [*contents, *["[no output]"] * (len(named) - len(contents))]
    told = [
        {"role": "tool", "tool_call_id": call.id, "content": text} for call, text in zip(named, outputs, strict=True)
    ]
    return [{**assistant, "tool_calls": [call.as_message for call in named]}, *told]


def test_a_conversation_in_text() -> None:
    """Results become one message of the user, in order and by tool; a turn without a call is told what is missing."""
    two = "```bash\nls -a\n```\n```py\nprint(1)\n```"
    said = text_tools().conversation(
        [*opening(task()), *turn(two, ".\n..", "1"), *turn("Hm."), *turn("```sh\nls\n```")]
    )
    assert [message["role"] for message in said] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert all(set(message) == {"role", "content"} for message in said)
    assert said[0]["content"] == f"{text_tools().introduction}\n\nWrite f."
    assert said[1]["content"] == two
    assert said[2]["content"] == "Output of bash:\n.\n..\n\nOutput of python:\n1"
    assert said[4]["content"].startswith("Your answer holds no whole block")
    assert "```bash or ```python or ```edit or ```python solution.py" in said[4]["content"]
    assert said[6]["content"].startswith("Output of bash:\n[no output]\n\nThis is your last turn.")


def test_a_system_message_stays() -> None:
    """What the task says as the system is handed on as it is, in its place."""
    system = {"role": "system", "content": "Be brief."}
    said = text_tools().conversation([system, *opening(task()), *turn("SUBMIT", "[submitted]")])
    assert said[0] == system
    assert [message["role"] for message in said[1:]] == ["user", "assistant", "user"]


PIECES = st.sampled_from(
    ["```", "```bash", "```python", "```python solution.py", "~~~sh", "~~~", "````", "SUBMIT", "ls -a", "print(1)", ""]
)
ANSWERS = st.lists(PIECES | st.text(max_size=12), max_size=30).map("\n".join) | st.text(max_size=200)
OF = task(limits=Limits(turns_max=TURNS))
TOOLS = TextTools(Toolbox(OF).schemas, OF)


@given(ANSWERS, st.booleans())
def test_any_answer_gives_calls_that_tools_can_read(answer: str, is_cut: bool) -> None:
    """Whatever a model writes: at most so many calls, of known tools, a hand-in only as the last; what a cut answer
    calls is the beginning of what it would call whole."""
    found = TOOLS.calls(answer, is_cut=is_cut)
    assert len(found) <= BLOCKS_MAX
    assert {call.name for call in found} <= {"bash", "python", "edit", "submit"}
    assert all(call.name != "submit" for call in found[:-1])
    assert found == TOOLS.calls(answer)[: len(found)]


@given(st.lists(ANSWERS, max_size=TURNS))
def test_a_conversation_only_grows(answers: list[str]) -> None:
    """User and assistant alternate, and each turn leaves what was said before as it was."""
    messages = list(opening(OF))
    before = TOOLS.conversation(messages)
    for answer in answers:
        messages += turn(answer, calls=TOOLS.calls(answer))
        said = TOOLS.conversation(messages)
        assert said[: len(before)] == before
        assert [message["role"] for message in said] == ["user", "assistant"] * (len(said) // 2) + ["user"]
        before = said


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\r"), max_size=60))
def test_code_goes_through_unchanged(code: str) -> None:
    """What stands between the fences reaches the tool to the letter."""
    fence = "`" * 80
    expected = [] if not code.strip() else [AS_IT_LIES] if code.strip() == "SUBMIT" else [("bash", {"command": code})]
    assert calls(f"{fence}bash\n{code}\n{fence}", TOOLS) == expected
