"""What a shell is sent for a command, and its output up to the mark that tells the command's end."""

import asyncio
import re
import secrets
import shlex
import time
from collections.abc import Callable

from barchan.model.sandbox import OutputChunk
from barchan.sdk.headtail import HeadTail


class MarkedStream:
    """One output stream up to a mark and the number behind it. What follows belongs to the next command."""

    def __init__(self, mark: bytes, kept: HeadTail, bytes_max: int) -> None:
        self.kept = kept
        self.after = HeadTail(bytes_max)
        self.after_bytes = 0
        self.code: int | None = None
        self._pattern = re.compile(re.escape(mark) + rb" ([0-9]{1,3})\n")
        self._hold_bytes = len(mark) + 4
        self._held = b""  # what may be the beginning of the mark

    def feed(self, data: bytes) -> None:
        if self.code is not None:
            self._feed_after(data)
            return
        held = self._held + data
        if found := self._pattern.search(held):
            self.code = int(found[1]) & 0xFF
            self.kept.feed(held[: found.start()])
            self._held = b""
            self._feed_after(held[found.end() :])
        else:
            keep = min(len(held), self._hold_bytes)
            self.kept.feed(held[: len(held) - keep])
            self._held = held[len(held) - keep :]

    def _feed_after(self, data: bytes) -> None:
        self.after.feed(data)
        self.after_bytes += len(data)

    def content(self) -> tuple[bytes, bool]:
        """What came before the mark, and whether bytes were left out."""
        self.kept.feed(self._held)
        self._held = b""
        return self.kept.content()


class Run:
    """One command, or the time before it: the output, and the event that something happened."""

    def __init__(self, bytes_max: int, before: "Run | None" = None, mark: str | None = None) -> None:
        self.mark = mark or secrets.token_hex(16)
        self.streams: dict[str, MarkedStream] = {
            name: MarkedStream(
                self.mark.encode(), before.streams[name].after if before is not None else HeadTail(bytes_max), bytes_max
            )
            for name in ("stdout", "stderr")
        }
        self.has_gap = False  # bytes of it went before anybody read them
        self.time: Callable[[], float] = time.monotonic
        self.last_output_at = 0.0
        self.changed = asyncio.Event()

    def feed(self, chunk: OutputChunk) -> None:
        self.streams[chunk.stream].feed(chunk.data)
        self.last_output_at = self.time()
        self.changed.set()

    @property
    def exit_code(self) -> int | None:
        """The code, once both streams have come to the mark."""
        return self.streams["stdout"].code if self.streams["stderr"].code is not None else None


def line_of(command: str, mark: str, last_code: int) -> str:
    """What the shell is sent: read as one line, so that nothing of it is left in the pipe while the command runs."""
    script = f"(exit {last_code})\n{command}" if last_code else command
    told = "command printf '%s %d\\n'"
    return (
        f"eval {shlex.quote(script)} </dev/null 8>&- 9>&-; "
        f"{{ {told} {mark} $? >&8; {told} {mark} 0 >&9; }} 2>/dev/null\n"
    )
