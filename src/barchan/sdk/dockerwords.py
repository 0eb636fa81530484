"""The words of a Dockerfile's instructions: quotes, escapes and variables, by Docker's rules."""

import re
from collections.abc import Mapping

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUOTABLE = '"$\\'  # what a backslash takes the meaning from, between double quotes


def expand(text: str, variables: Mapping[str, str]) -> str:
    """One word: quotes go, variables are replaced, blanks stay.

    Raises:
        ValueError: An open quote or brace, or a form of variable that is not supported.
    """
    return _Scanner(text, variables).read(splits=False)[0]


def split_words(text: str, variables: Mapping[str, str]) -> list[str]:
    """The words between blanks, each expanded. What a variable holds is never split.

    Raises:
        ValueError: As `expand`.
    """
    return _Scanner(text, variables).read(splits=True)


class _Scanner:
    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        self._text = text
        self._variables = variables
        self._at = 0

    def read(self, *, splits: bool) -> list[str]:
        words: list[str] = []
        word: list[str] = []
        has_word = not splits
        while self._at < len(self._text):
            char = self._text[self._at]
            if splits and char.isspace():
                if has_word:
                    words.append("".join(word))
                word, has_word = [], False
                self._at += 1
                continue
            has_word = True
            word.append(self._piece(char))
        if has_word:
            words.append("".join(word))
        return words

    def _piece(self, char: str) -> str:
        """What the text from here on stands for, up to where its meaning may change."""
        if char == "'":
            return self._single_quoted()
        if char == '"':
            return self._double_quoted()
        if char == "$":
            return self._variable()
        if char == "\\" and self._at + 1 < len(self._text):
            self._at += 2
            return self._text[self._at - 1]
        self._at += 1
        return char

    def _single_quoted(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise ValueError("a single quote is not closed")
        quoted = self._text[self._at + 1 : end]
        self._at = end + 1
        return quoted

    def _double_quoted(self) -> str:
        self._at += 1
        quoted: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == '"':
                self._at += 1
                return "".join(quoted)
            if char == "$":
                quoted.append(self._variable())
                continue
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in (*_QUOTABLE,):
                self._at += 1
                char = self._text[self._at]
            quoted.append(char)
            self._at += 1
        raise ValueError("a double quote is not closed")

    def _variable(self) -> str:
        self._at += 1
        if self._text.startswith("{", self._at):
            return self._braced()
        name = _NAME.match(self._text, self._at)
        if name is None:
            return "$"
        self._at = name.end()
        return self._variables.get(name.group(), "")

    def _braced(self) -> str:
        start, depth = self._at + 1, 0
        for end in range(self._at, len(self._text)):
            depth += (self._text[end] == "{") - (self._text[end] == "}")
            if depth == 0:
                break
        else:
            raise ValueError("a ${ is not closed")
        self._at = end + 1
        inner = self._text[start:end]
        name = _NAME.match(inner)
        if name is None:
            raise ValueError(f"${{{inner}}} names no variable")
        value, form = self._variables.get(name.group()), inner[name.end() :]
        if not form:
            return value or ""
        is_set = bool(value) if form[0] == ":" else value is not None
        operator, word = form[:1].removeprefix(":") or form[1:2], form.removeprefix(":")[1:]
        if operator == "-":
            return value or "" if is_set else expand(word, self._variables)
        if operator == "+":
            return expand(word, self._variables) if is_set else ""
        raise ValueError(f"${{{inner}}}: of the forms with more than a name only :- - :+ + are supported")
