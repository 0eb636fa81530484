"""From chat answers to programs, as HumanEval is usually asked of chat models."""

import pytest

from barchan.rollout.policies.extract import Block, code_of, parts, solution_of

pytestmark = pytest.mark.timeout(30)

PROMPT = 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n'
WHOLE = "def total(xs):\n    return sum(xs)"


def outcome(answer: str) -> object:
    """Runs the program made of a trusted test text; what `total([1, 2])` gives, or the error's name."""
    names: dict[str, object] = {}
    try:
        exec(solution_of(answer, PROMPT, "total"), names)
        return names["total"]([1, 2])  # type: ignore[operator]
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{WHOLE}\n```",
        f"Sure! Here it is:\n\n```python\n{WHOLE}\n```\nIt sums.",
        f"```\n{WHOLE}\n```",
        f"```Python\n{WHOLE}",
        f"{WHOLE}\n",
        f"First an example:\n```python\nprint(total([1]))\n```\nand then\n```python\n{WHOLE}\n```",
        "  ```python\n  def total(xs):\n      return sum(xs)\n  ```",
        "    return sum(xs)\n",
        "return sum(xs)",
        "```python\n    return sum(xs)\n```",
        "```python\nresult = 0\n    for x in xs:\n        result += x\n    return result\n```",
        "for x in xs:\n    pass\nreturn sum(xs)",
        "    return sum(xs)\n\nprint(total([5, 'x']))\n",
        "    return sum(xs)\n\nI hope this helps.\n",
    ],
)
def test_forms_in_which_models_answer(answer: str) -> None:
    """Fenced or not, whole function or body only, with talk around it: the right program comes out."""
    assert outcome(answer) == 3


@pytest.mark.parametrize("answer", ["", "I can't help with that.", "```python\n```", "```json\n{}\n```", "\0\x1b[2J"])
def test_answers_without_code_give_a_program_that_cannot_pass(answer: str) -> None:
    """Talk, nothing, or another language become a program that fails, and never an exception here."""
    assert outcome(answer) != 3


def test_a_shell_block_is_passed_over() -> None:
    """The first block in Python or in no language counts when none defines the function."""
    assert code_of("```bash\npip install x\n```\n```\n    return 1\n```", "total") == "    return 1"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("a\n```py x.py\n1\n```\nb", ["a", Block("py x.py", "1"), "b"]),
        ("```\n1\n\n2", [Block("", "1\n\n2", is_closed=False)]),
        ("````md\n```sh\nls\n```\n````", [Block("md", "```sh\nls\n```")]),
        ("~~~\n```\n~~~~", [Block("", "```")]),
        ("```sh\nls\n```py\n1\n```", [Block("sh", "ls\n```py\n1")]),
        ("```ls``` is inline", ["```ls``` is inline"]),
        ("\t``` sh \r\nls\x0b\u2028-a\r\n ``` ", [Block("sh", "ls\x0b\u2028-a")]),
        ("", [""]),
    ],
)
def test_blocks_and_the_lines_between_them(answer: str, expected: list[Block | str]) -> None:
    """Fences as Markdown has them; one never closed reaches to the end, and lines end at a newline only."""
    assert list(parts(answer)) == expected
