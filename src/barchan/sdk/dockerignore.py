"""What of a build context stays behind: `.dockerignore`, by Docker's rules."""

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from barchan.errors import InvalidSpec


class _Pattern(NamedTuple):
    regex: re.Pattern[str]
    takes_back: bool


class Ignored:
    """The patterns of one file; without any, nothing stays behind."""

    def __init__(self, patterns: tuple[_Pattern, ...] = ()) -> None:
        self._patterns = patterns
        self._takes_back = any(pattern.takes_back for pattern in patterns)

    def __contains__(self, path: str) -> bool:
        """Whether a path of the context, relative to it, stays behind: the last pattern that it or a folder above it
        matches decides.
        """
        above = [path]
        while parent := posixpath.dirname(above[-1]):
            above.append(parent)
        is_ignored = False
        for pattern in self._patterns:
            if pattern.takes_back == is_ignored and any(pattern.regex.fullmatch(name) for name in above):
                is_ignored = not pattern.takes_back
        return is_ignored

    def below(self, context: Path, folder: str) -> Iterator[str]:
        """What stays behind of a folder of the context, by paths relative to that folder; of a folder that stays behind
        with all that is in it, that one alone.
        """
        if not self._patterns:
            return
        top = context / folder
        for at, folders, names in os.walk(top):
            for name in sorted((*folders, *names)):
                path = Path(at, name)
                if path.relative_to(context).as_posix() not in self:
                    continue
                if name not in folders or path.is_symlink():
                    yield path.relative_to(top).as_posix()
                elif not self._takes_back or not any(True for _ in self._kept(context, path)):
                    yield path.relative_to(top).as_posix()
                    folders.remove(name)

    def _kept(self, context: Path, folder: Path) -> Iterator[Path]:
        """What of an ignored folder travels all the same."""
        for at, folders, names in os.walk(folder):
            for name in (*folders, *names):
                if Path(at, name).relative_to(context).as_posix() not in self:
                    yield Path(at, name)


def read_ignored(context: Path, dockerfile: Path) -> Ignored:
    """The patterns for a Dockerfile: of the file beside it that bears its name, else of the context's.

    Raises:
        InvalidSpec: The file can't be read, or holds no proper pattern.
    """
    for path in (dockerfile.with_name(f"{dockerfile.name}.dockerignore"), context / ".dockerignore"):
        try:
            text = path.read_text("utf-8-sig")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpec(f"{path} can't be read: {error}") from error
        try:
            return Ignored(tuple(_patterns(text)))
        except ValueError as error:
            raise InvalidSpec(f"{path}:{error}") from error
    return Ignored()


def _patterns(text: str) -> Iterator[_Pattern]:
    for number, line in enumerate(text.splitlines(), 1):
        word = "" if line.startswith("#") else line.strip()
        takes_back = word.startswith("!")
        word = word.removeprefix("!").strip()
        if not word:
            if takes_back:
                raise ValueError(f"{number}: a `!` needs a pattern after it")
            continue
        word = posixpath.normpath(f"/{word}").lstrip("/")
        if not word:  # the context itself, which can't stay behind
            continue
        try:
            yield _Pattern(re.compile(_regex(word), re.DOTALL), takes_back)
        except re.error as error:
            raise ValueError(f"{number}: {line.strip()!r} is no pattern: {error}") from error


def _regex(pattern: str) -> str:
    """`*` and `?` stay within a name, `**` does not, `[...]` is one of these characters, a backslash quotes."""
    out, at = "", 0
    while at < len(pattern):
        if pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at, out = at + 1, out + "(?:.*/)?"
            else:
                out += ".*"
            continue
        char = pattern[at]
        at += 1
        if char == "*":
            out += "[^/]*"
        elif char == "?":
            out += "[^/]"
        elif char == "[" and (end := pattern.find("]", at + 1)) > 0:
            inner = pattern[at:end]
            negation = "^" if inner.startswith(("^", "!")) else ""
            out += f"[{negation}{re.escape(inner.lstrip('^!') if negation else inner).replace(chr(92) + '-', '-')}]"
            at = end + 1
        elif char == "\\" and at < len(pattern):
            out += re.escape(pattern[at])
            at += 1
        else:
            out += re.escape(char)
    return out
