"""From a chat answer to its fenced blocks, and to a program. Pure text: nothing is run, whatever a model wrote."""

import re
import textwrap
from collections.abc import Iterator

from msgspec import Struct

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*(.*?)[ \t]*")


class Block(Struct, frozen=True):
    """A fenced block: what stands behind its opening fence, its lines, and whether there was a closing one."""

    info: str
    code: str
    is_closed: bool = True

    @property
    def language(self) -> str:
        return self.info.split(maxsplit=1)[0].lower() if self.info else ""


def parts(answer: str) -> Iterator[Block | str]:
    """The blocks of an answer, and the lines that stand between them.

    As in Markdown: a block ends at a line of nothing but as many fence characters as opened it, or more; one that is
    never closed ends with the text.
    """
    fence, info, code = "", "", list[str]()
    for line in answer.replace("\r\n", "\n").split("\n"):
        found = _FENCE.fullmatch(line)
        mark, rest = (found[1], found[2]) if found else ("", "")
        if fence:
            if not rest and mark.startswith(fence):
                yield Block(info, "\n".join(code))
                fence = ""
            else:
                code.append(line)
        elif mark and "`" not in rest:
            fence, info, code = mark, rest, []
        else:
            yield line
    if fence:
        yield Block(info, "\n".join(code), is_closed=False)


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
    blocks = [part for part in parts(answer) if isinstance(part, Block)]
    for block in blocks:
        if defines(block.code, entry_point):
            return block.code
    for block in blocks:
        if block.language in ("", "python", "py", "python3"):
            return block.code
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
