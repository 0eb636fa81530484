"""A guest's screen, keyboard and mouse, where its backend declares the capability `screen`."""

from collections.abc import Sequence
from typing import Protocol

from barchan.core.keyboard import Chord
from barchan.model.screen import PointerRequest, ScreenSize


class Screen(Protocol):
    """What is typed and clicked is given to the guest one after the other; what it makes of it is its own affair.

    Raises, all of them:
        BackendError: The machine does not answer.
    """

    async def png(self) -> bytes:
        """The screen as it is now."""

    async def size(self) -> ScreenSize:
        """How large it is now."""

    async def press(self, chords: Sequence[Chord]) -> None:
        """Press and release each, in the pace of a fast typist: a keyboard's buffer is small.

        Cancellation: The rest is not pressed; no key stays down.
        """

    async def point(self, asked: PointerRequest) -> None:
        """Move, click and scroll.

        Raises:
            InvalidSpec: The place is not on the screen.
        """


class HasScreen(Protocol):
    """The handle of such a backend."""

    @property
    def screen(self) -> Screen: ...
