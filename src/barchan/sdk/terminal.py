"""The synchronous face of a terminal."""

from types import TracebackType
from typing import Self

from barchan.sdk.aio.terminal import AsyncTerminal
from barchan.sdk.background import run
from barchan.sdk.sandbox import Process


class Terminal:
    """A program on a terminal: type, and look at the screen."""

    def __init__(self, twin: AsyncTerminal) -> None:
        self._twin = twin

    @property
    def process(self) -> Process:
        """The program that runs on it."""
        return Process(self._twin.process)

    def send(self, text: str | bytes) -> None:
        """Type; control keys are their characters, such as `"\\x03"` for Ctrl-C."""
        run(self._twin.send(text))

    def screen(self, *, settle_s: float = 0.1, timeout_s: float = 5.0) -> list[str]:
        """The rows of the screen, once nothing was drawn for `settle_s`, or as they are after `timeout_s`."""
        return run(self._twin.screen(settle_s=settle_s, timeout_s=timeout_s))

    def resize(self, rows: int, cols: int) -> None:
        run(self._twin.resize(rows, cols))

    def close(self) -> None:
        """End the program and what runs below it."""
        run(self._twin.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
