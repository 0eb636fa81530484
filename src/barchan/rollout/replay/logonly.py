"""A sandbox that is not there: it answers each operation with what the log says that it gave.

So a rollout's own code runs over its log alone, as fast as that can be read; what it asks for must be what was asked.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from barchan.errors import LocalProtocolError, from_wire
from barchan.rollout.replay.operations import Operation, operations
from barchan.trajectory.format import Entry
from barchan.trajectory.values import Cut


class Answer(Struct, frozen=True, kw_only=True):
    """One operation's result, from the log."""

    seq: int
    outcome: dict[str, Any]


class LogOnly:
    """The agent's operations of one log, answered one after the other.

    Args:
        entries: The whole log.

    Attributes:
        answered: How many were, so far.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.answered = 0
        self._left: deque[Operation] = deque(item for item in operations(entries) if not item.is_left)

    @property
    def left(self) -> int:
        """Operations that were not asked for yet."""
        return len(self._left)

    def exec(self, command: str | Sequence[str], **args: Any) -> Answer:
        """What a program gave. Raises what `answer` does."""
        return self.answer("exec", {"command": command if isinstance(command, str) else list(command), **args})

    def read(self, path: str, **args: Any) -> Answer:
        """What a file held. Raises what `answer` does."""
        return self.answer("file_read", {"path": path, **args})

    def write(self, path: str, data: bytes, **args: Any) -> Answer:
        """What became of writing a file. Raises what `answer` does."""
        return self.answer("file_write", {"path": path, "data": data, **args})

    def answer(self, kind: str, args: Mapping[str, Any]) -> Answer:
        """The log's next operation, if it is the one that is asked for.

        Args:
            args: Those that matter; each must be as in the log.

        Raises:
            LocalProtocolError: It is another one (`details["seq"]` says where), or the log has no more.
            BarchanError: The operation failed so.
        """
        if not self._left:
            raise LocalProtocolError(f"{kind} {_shown(args)} is asked, and the log has no further operation")
        found = self._left[0]
        wrong = [name for name, value in args.items() if _plain(found.args.get(name)) != _plain(value)]
        if found.kind != kind or wrong:
            raise LocalProtocolError(
                f"entry {found.seq} is {found.text[:120]}, and {kind} {_shown(args)} is asked"
                + (f": {', '.join(wrong)} differs" if wrong else ""),
                seq=found.seq,
            )
        self._left.popleft()
        self.answered += 1
        error = found.outcome.get("error")
        if isinstance(error, Mapping) and "code" in error:
            raise from_wire(error["code"], error["message"], error.get("details") or {})
        return Answer(seq=found.seq, outcome=found.outcome)


def _plain(value: Any) -> Any:
    return (value.size_bytes, value.sha256) if isinstance(value, Cut) else value


def _shown(args: Mapping[str, Any]) -> str:
    return str(args.get("command") or args.get("path"))[:120]
