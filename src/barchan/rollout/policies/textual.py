"""A text protocol for models without tool calls: fenced blocks are run, and what they gave is the next message.

Pure text. The calls that come out are ordinary tool calls, so that logs, limits and exports know nothing of it. What
a turn becomes in text depends on that turn alone: a conversation only ever grows at its end.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from barchan.rollout.calls import Message, ToolCall, call_to
from barchan.rollout.policies.extract import Block, parts
from barchan.rollout.prompts import NO_CALL
from barchan.rollout.task import FileArtifact, Task

BLOCKS_MAX = 4
SUBMIT = "submit"
SUBMIT_LINE = "SUBMIT"
ALIASES = {"sh": "bash", "shell": "bash", "zsh": "bash", "console": "bash", "py": "python", "python3": "python"}

INTRODUCTION = (
    "You work in turns, {turns} at most. Answer with one fenced block, then stop: it is run, and what it gives is the "
    "next message. The line that opens the block says what it is:"
)
NO_BLOCK = "Your answer holds no whole block that can be run. Write one, closed by ```, that is opened by {fences}."
LAST_TURN = "This is your last turn. Hand your work in now: {way}."
NOT_RUN = "[Blocks not run: {count}. At most {most} are, and only whole ones.]"

_SUBMITS = re.compile(rf"[\s*_`#>]*{SUBMIT_LINE}[\s*_`.!]*")
_WORDS = re.compile(r"[^\s:=,;\"'(){}\[\]]+")


class TextTools:
    """A task's tools as text, both ways.

    A tool with one argument, a text, is called by a block named after it; its content is the text. Any other takes a
    JSON object. Handing in is a block that names the file, or a line of its own.
    """

    def __init__(self, schemas: Sequence[Mapping[str, Any]], task: Task) -> None:
        functions = [schema["function"] for schema in schemas]
        self._functions = {str(function["name"]): function for function in functions}
        self._texts = {name: _text_argument(function["parameters"]) for name, function in self._functions.items()}
        self._turns_max = task.limits.turns_max
        self._answer_file = ""
        if isinstance(task.artifact, FileArtifact) and self._texts.get(SUBMIT):
            self._answer_file = task.artifact.path

    # what the model is told

    def conversation(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation without tools in it: user and assistant take turns, whatever the tools said."""
        told: list[Message] = []
        lines = [self.introduction]  # first, since it is the same for all tasks: servers keep what they have read
        names: dict[str, str] = {}
        note, turns = "", 0

        def flush() -> None:
            if lines:
                told.append({"role": "user", "content": "\n\n".join([*lines, *filter(None, [note])])})
                lines.clear()

        for message in messages:
            content = message.get("content") or ""
            if message["role"] == "assistant":
                flush()
                turns += 1
                names = {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
                note = self._note(content, len(names), turns)
                told.append({"role": "assistant", "content": content})
            elif message["role"] == "tool":
                lines.append(f"Output of {names.get(message['tool_call_id'], 'a block')}:\n{content}")
            elif message["role"] == "user":
                lines.append(self._no_block if content == NO_CALL else content)
            else:
                told.append(dict(message))
        flush()
        return told

    @property
    def introduction(self) -> str:
        """The tools, a line each."""
        lines = [f"- {self._described(name)}" for name in self._functions if name != SUBMIT]
        if submit := self._functions.get(SUBMIT):
            lines.append(f"- {self._way_to_submit}: {submit.get('description', '')}")
        return "\n".join([INTRODUCTION.format(turns=self._turns_max), *lines])

    def _described(self, name: str) -> str:
        function = self._functions[name]
        description = function.get("description", "")
        if self._texts[name]:
            return f"```{name}: {description}"
        parameters = function["parameters"]
        required = parameters.get("required", ())
        members = [
            f'"{key}"{"" if key in required else "?"}: {_kind(of)}'
            for key, of in parameters.get("properties", {}).items()
        ]
        return f"```{name}: {description} The block is JSON: {{{', '.join(members)}}}"

    @property
    def _way_to_submit(self) -> str:
        if not self._answer_file:
            return f"the line {SUBMIT_LINE} alone"
        return f"```{self._answer_fence} with the whole file, or the line {SUBMIT_LINE} alone if the file is there"

    @property
    def _answer_fence(self) -> str:
        return f"python {self._answer_file}" if self._answer_file.endswith(".py") else self._answer_file

    @property
    def _no_block(self) -> str:
        fences = [name for name in self._functions if name != SUBMIT] + [self._answer_fence] * bool(self._answer_file)
        return NO_BLOCK.format(fences=" or ".join(f"```{fence}" for fence in fences))

    def _note(self, answer: str, calls: int, turns: int) -> str:
        """What goes behind the results of a turn."""
        spare = len(list(self._found(answer))) - calls
        lines = [NOT_RUN.format(count=spare, most=BLOCKS_MAX)] * (calls > 0 and spare > 0)
        if turns == self._turns_max - 1 and SUBMIT in self._functions:
            lines.append(LAST_TURN.format(way=self._way_to_submit))
        return "\n\n".join(lines)

    # what the model wants

    def calls(self, answer: str, *, is_cut: bool = False) -> tuple[ToolCall, ...]:
        """The calls that an answer stands for: its first blocks that name a tool, up to the one that hands in.

        Args:
            is_cut: The answer ended at a limit, so that a block without an end is not whole and is not run. Elsewhere
                a model that left out the last fence is taken to have meant it.
        """
        calls = [call for call, is_whole in self._found(answer) if is_whole or not is_cut]
        return tuple(calls[:BLOCKS_MAX])

    def _found(self, answer: str) -> Iterator[tuple[ToolCall, bool]]:
        for part in parts(answer):
            if isinstance(part, Block):
                call, is_whole = self._call(part), part.is_closed
            else:
                call, is_whole = self._submit() if _SUBMITS.fullmatch(part) else None, True
            if call is not None:
                yield call, is_whole
                if call.name == SUBMIT and is_whole:
                    return

    def _submit(self) -> ToolCall | None:
        return call_to(SUBMIT) if SUBMIT in self._functions else None

    def _call(self, block: Block) -> ToolCall | None:
        words = _WORDS.findall(block.info)
        if self._answer_file and any(self._is_answer_file(word) for word in words):
            return call_to(SUBMIT, **{self._texts[SUBMIT]: f"{block.code}\n"})
        if block.code.strip() == SUBMIT_LINE:
            return self._submit()
        name = self._tool_named(words[0] if words else "")
        if name is None:
            return None
        field = self._texts[name]
        if not field:
            return ToolCall(name=name, arguments=block.code.strip() or "{}")
        if block.code.strip():
            return call_to(name, **{field: block.code})
        return self._submit() if name == SUBMIT else None

    def _is_answer_file(self, word: str) -> bool:
        return word.removeprefix("./") in (self._answer_file, self._answer_file.rpartition("/")[2])

    def _tool_named(self, word: str) -> str | None:
        lower = word.lower()
        return next((name for name in (word, lower, ALIASES.get(lower)) if name in self._functions), None)


def _text_argument(parameters: Mapping[str, Any]) -> str:
    """The name of a tool's only argument, where that is a text; else empty."""
    properties = parameters.get("properties", {})
    if len(properties) != 1:
        return ""
    ((name, of),) = properties.items()
    return str(name) if any(kind.get("type") == "string" for kind in of.get("anyOf", (of,))) else ""


def _kind(of: Mapping[str, Any]) -> str:
    """A JSON schema's type, in a word or two."""
    kinds = [kind for kind in of.get("anyOf", (of,)) if kind.get("type") != "null"]
    words = [" or ".join(map(repr, kind["enum"])) if "enum" in kind else str(kind.get("type", "any")) for kind in kinds]
    return " or ".join(words)
