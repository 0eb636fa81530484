"""From a chat answer to a program. Pure text: nothing is parsed or run, whatever a model wrote."""

import re
import textwrap

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)


def solution_of(answer: str, prompt: str, entry_point: str) -> str:
    """The whole program that a chat answer stands for.

    The prompt comes first, so that its imports and helpers are there; an answer that defines the function again
    replaces the prompt's stub, and anything else is taken as the continuation of the prompt, up to where it leaves
    the function.
    """
    code = code_of(answer, entry_point)
    if defines(code, entry_point):
        return f"{prompt}\n\n{textwrap.dedent(code)}\n"
    return f"{prompt}{_body(code)}\n"


def code_of(answer: str, entry_point: str) -> str:
    """The fenced block that defines the entry point, else the first in Python or in no language, else all."""
    blocks: list[tuple[str, str]] = [(language.lower(), code) for language, code in _FENCE.findall(answer)]
    for _, code in blocks:
        if defines(code, entry_point):
            return code
    for language, code in blocks:
        if language in ("", "python", "py", "python3"):
            return code
    return answer


def defines(code: str, entry_point: str) -> bool:
    return (
        re.search(rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}[ \t]*\(", code, re.MULTILINE) is not None
    )


def _body(code: str) -> str:
    """A function's body, indented; what stands at the margin after it is no part of it and is cut off."""
    lines = code.strip("\n").splitlines()
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines:
        return ""
    second = next((line for line in lines[1:] if line.strip()), "")
    if not lines[0].startswith((" ", "\t")):
        if not second.startswith((" ", "\t")) or lines[0].rstrip().endswith(":"):
            return textwrap.indent("\n".join(lines), "    ")
        lines[0] = "    " + lines[0]  # models often lose the first line's indentation alone
    end = next((at for at, line in enumerate(lines) if line.strip() and not line.startswith((" ", "\t"))), len(lines))
    return "\n".join(lines[:end])
