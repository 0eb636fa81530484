"""`edit`: look at files and change them, as the agent's user with the kernel's own permission checks."""

import errno
import posixpath
from typing import Annotated, Literal

from msgspec import Meta, Struct

from barchan.errors import BarchanError, NotFound
from barchan.model.sandbox import FileInfo
from barchan.rollout.ports import Files
from barchan.rollout.tools.base import ToolOutput, Workspace
from barchan.rollout.tools.text import shown

FILE_BYTES_MAX = 1 << 20
LINKS_MAX = 8
AROUND_LINES = 3
NEW_FILE_MODE = 0o644


class EditArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """One of four commands; which arguments it needs, its description says."""

    command: Annotated[Literal["view", "create", "str_replace", "insert"], Meta(description="What to do.")]
    path: Annotated[str, Meta(description="The file, or for view also a directory.")]
    view_range: Annotated[
        tuple[int, int] | None, Meta(description="view: first and last line, from 1; -1 is the file's last.")
    ] = None
    file_text: Annotated[str | None, Meta(description="create: the whole content of the file.")] = None
    old_str: Annotated[
        str | None, Meta(description="str_replace: text that occurs once in the file, to the letter.")
    ] = None
    new_str: Annotated[str | None, Meta(description="str_replace, insert: the text to put in.")] = None
    insert_line: Annotated[
        int | None, Meta(description="insert: the line after which the text goes; 0 is the beginning.")
    ] = None


class _Refused(Exception):
    """What the policy asked for does not fit the file; the message is for it."""


class EditTool:
    """Views, creates and changes text files. Bytes that are not UTF-8 stay as they are in what is not replaced."""

    name = "edit"
    description = (
        "Look at and change files. view shows a file with line numbers, or a directory; create writes a whole file; "
        "str_replace replaces old_str, which must occur exactly once, by new_str; insert puts new_str after a line."
    )
    arguments = EditArguments
    keeps_time = False

    async def call(self, workspace: Workspace, arguments: EditArguments, /, *, timeout_s: float) -> ToolOutput:
        commands = {"view": _view, "create": _create, "str_replace": _str_replace, "insert": _insert}
        try:
            text = await commands[arguments.command](workspace.sandbox.files, arguments)
        except _Refused as refusal:
            return ToolOutput(content=f"error: {refusal}", status="failed", agent_s=0.0)
        out = shown(text.encode("utf-8", "surrogateescape"), workspace.output_chars_max)
        return ToolOutput(content=out.text, truncated=out.truncated, agent_s=0.0)


async def _view(files: Files, asked: EditArguments) -> str:
    try:
        text = await _read(files, asked.path)
    except BarchanError as error:
        if error.details.get("errno") != errno.EISDIR:
            raise
        entries = await files.list(asked.path)
        return "\n".join(_entry(info) for info in entries) or "[an empty directory]"
    lines = text.splitlines()
    first, last = asked.view_range or (1, -1)
    last = len(lines) if last == -1 else last
    if asked.view_range is not None and not 1 <= first <= last <= len(lines):
        raise _Refused(f"view_range {list(asked.view_range)}: {asked.path} has {len(lines)} lines")
    return _numbered(lines, first, last) or "[an empty file]"


async def _create(files: Files, asked: EditArguments) -> str:
    if asked.file_text is None:
        raise _Refused("create needs file_text")
    await _write(files, asked.path, asked.file_text)
    return f"[wrote {asked.path}, {len(asked.file_text.splitlines())} lines]"


async def _str_replace(files: Files, asked: EditArguments) -> str:
    if not asked.old_str:
        raise _Refused("str_replace needs old_str, which must not be empty")
    text = await _read(files, asked.path)
    count = text.count(asked.old_str)
    if count != 1:
        raise _Refused(f"old_str occurs {count} times in {asked.path}; it must occur exactly once")
    at = text.index(asked.old_str)
    new = asked.new_str or ""
    changed = text[:at] + new + text[at + len(asked.old_str) :]
    await _write(files, asked.path, changed)
    return _changed(asked.path, changed, at, at + len(new))


async def _insert(files: Files, asked: EditArguments) -> str:
    if asked.insert_line is None or asked.new_str is None:
        raise _Refused("insert needs insert_line and new_str")
    lines = (await _read(files, asked.path)).splitlines(keepends=True)
    if not 0 <= asked.insert_line <= len(lines):
        raise _Refused(f"insert_line {asked.insert_line}: {asked.path} has {len(lines)} lines")
    before, after = "".join(lines[: asked.insert_line]), "".join(lines[asked.insert_line :])
    if before and not before.endswith("\n"):
        before += "\n"
    new = asked.new_str if asked.new_str.endswith("\n") or not after else asked.new_str + "\n"
    await _write(files, asked.path, before + new + after)
    return _changed(asked.path, before + new + after, len(before), len(before) + len(new))


async def _read(files: Files, path: str) -> str:
    _check(path)
    data = await files.read(path, length=FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise _Refused(f"{path} is larger than {FILE_BYTES_MAX} bytes: use other tools on it")
    return data.decode("utf-8", "surrogateescape")


async def _write(files: Files, path: str, text: str) -> None:
    """Replace a file's content: the one a symbolic link leads to, with the mode it has."""
    _check(path)
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > FILE_BYTES_MAX:
        raise _Refused(f"{path} would be larger than {FILE_BYTES_MAX} bytes")
    mode = NEW_FILE_MODE
    try:
        for _ in range(LINKS_MAX):
            info = await files.stat(path)
            if info.kind != "symlink":
                mode = info.mode & 0o777
                break
            path = posixpath.join(posixpath.dirname(path), info.target)
    except NotFound as error:
        if "errno" not in error.details:
            raise
    await files.write(path, data, mode=mode)


def _check(path: str) -> None:
    if not path or "\0" in path:
        raise _Refused("path is empty or holds a NUL character")


def _changed(path: str, text: str, start: int, end: int) -> str:
    """The changed lines with some around them."""
    lines = text.splitlines()
    first = max(1, text.count("\n", 0, start) + 1 - AROUND_LINES)
    last = min(len(lines), text.count("\n", 0, end) + 1 + AROUND_LINES)
    return f"[changed {path}]\n{_numbered(lines, first, last)}"


def _numbered(lines: list[str], first: int, last: int) -> str:
    return "\n".join(f"{number:6}\t{lines[number - 1]}" for number in range(first, last + 1))


def _entry(info: FileInfo) -> str:
    name = posixpath.basename(info.path)
    if info.kind == "directory":
        return f"{name}/"
    return f"{name} -> {info.target}" if info.kind == "symlink" else f"{name} ({info.size} bytes)"
