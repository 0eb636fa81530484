"""What was done to a run, one line each in `faults.jsonl` of its folder."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from barchan.errors import InvalidSpec, NotFound
from barchan.testing.faults.plan import Kind

FILE = "faults.jsonl"


class FaultEvent(Struct, frozen=True, kw_only=True):
    """One fault that was done. Times are those of this machine's wall clock, as the rollouts' records have them.

    Attributes:
        index: The fault's place in the plan.
        ended_unix_s: When its cause was over: the node answered again, the disk had room.
        rollouts: Ids of those whose sandbox was meant; empty: whoever ran then may have been hit.
        what: What it was done to, in words.
        reached: It was done to something: a request came, a program was there.
    """

    index: int
    kind: Kind
    began_unix_s: float
    ended_unix_s: float
    rollouts: tuple[str, ...] = ()
    what: str = ""
    reached: bool = True


class EventFile:
    """Keeps events, each on its way to the disk as soon as it is over."""

    def __init__(self, path: Path) -> None:
        self.events: list[FaultEvent] = []
        self._file = path.open("ab")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(
        self,
        index: int,
        kind: Kind,
        began_unix_s: float,
        *,
        rollouts: tuple[str, ...] = (),
        what: str = "",
        reached: bool = True,
    ) -> None:
        """Keep a fault that is over now."""
        event = FaultEvent(
            index=index,
            kind=kind,
            began_unix_s=round(began_unix_s, 3),
            ended_unix_s=round(time.time(), 3),
            rollouts=rollouts,
            what=what,
            reached=reached,
        )
        self.events.append(event)
        self._file.write(msgspec.json.encode(event) + b"\n")
        self._file.flush()


def read_events(path: Path) -> list[FaultEvent]:
    """The faults of a run.

    Raises:
        NotFound: It has none.
        InvalidSpec: A line is no fault.
    """
    try:
        return [msgspec.json.decode(line, type=FaultEvent) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise InvalidSpec(f"{path}: {error}") from error
