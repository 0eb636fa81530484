"""The synchronous face of a sandbox's screen."""

from barchan.model.screen import Button
from barchan.sdk.aio.screen import AsyncScreen
from barchan.sdk.background import run


class Screen:
    """Of a sandbox whose backend has a screen (`vm`); with another one every call raises `InvalidSpec`.

    What is typed and clicked reaches the guest at once, and takes effect when the guest comes to it: look again.
    """

    def __init__(self, twin: AsyncScreen) -> None:
        self._twin = twin

    def png(self) -> bytes:
        """The screen as it is now, as a PNG file."""
        return run(self._twin.png())

    @property
    def size(self) -> tuple[int, int]:
        """Its width and height in pixels; they change when the guest sets another mode."""
        return run(self._twin.size())

    def type(self, text: str) -> None:
        """Type a text, a newline being the enter key; it takes about 30 ms a character.

        Raises:
            InvalidSpec: It has a character that no key of a US layout gives, or more than 2,000.
            ConnectionLost: Some of it may have been typed.
        """
        run(self._twin.type(text))

    def key(self, keys: str) -> None:
        """Press keys together: `enter`, `ctrl-c`, `ctrl-alt-delete`, `shift-f3`, `pageup`, `super`.

        Raises:
            InvalidSpec: One of them is no key.
        """
        run(self._twin.key(keys))

    def move(self, x: int, y: int) -> None:
        """Move the mouse to a pixel, counted from the upper left.

        Raises:
            InvalidSpec: The screen has no such pixel.
        """
        run(self._twin.move(x, y))

    def click(self, x: int | None = None, y: int | None = None, *, button: Button = "left", clicks: int = 1) -> None:
        """Click at a pixel, or where the mouse is; `clicks=2` is a double click."""
        run(self._twin.click(x, y, button=button, clicks=clicks))

    def scroll(self, notches: int, *, x: int | None = None, y: int | None = None) -> None:
        """Turn the wheel: above 0 is down. At a pixel, or where the mouse is."""
        run(self._twin.scroll(notches, x=x, y=y))
