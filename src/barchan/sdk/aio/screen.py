"""A sandbox's screen, keyboard and mouse: what an agent that uses a computer needs."""

from typing import Any

from barchan.model.screen import Button, KeyRequest, PointerRequest, ScreenSize, TypeRequest
from barchan.sdk.transport import CALL_TIMEOUT_S, Call, Transport, encode
from barchan.wire.api import Empty

PNG = Call("screen_png", bytes)
SIZE = Call("screen_size", ScreenSize)
TYPE = Call("screen_type", Empty)
KEY = Call("screen_key", Empty)
POINTER = Call("screen_pointer", Empty)

PNG_BYTES_MAX = 64 << 20


class AsyncScreen:
    """Of a sandbox whose backend has a screen (`vm`); with another one every call raises `InvalidSpec`.

    What is typed and clicked reaches the guest at once, and takes effect when the guest comes to it: look again.
    """

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id

    def _target(self, call: Call[Any]) -> str:
        return call.target(sandbox_id=self._sandbox_id)

    async def png(self) -> bytes:
        """The screen as it is now, as a PNG file."""
        return await self._transport.content(PNG, self._target(PNG), timeout_s=CALL_TIMEOUT_S, bytes_max=PNG_BYTES_MAX)

    async def size(self) -> tuple[int, int]:
        """Its width and height in pixels; they change when the guest sets another mode."""
        size = await self._transport.value(SIZE, self._target(SIZE))
        return size.width, size.height

    async def type(self, text: str) -> None:
        """Type a text, a newline being the enter key; it takes about 30 ms a character.

        Raises:
            InvalidSpec: It has a character that no key of a US layout gives, or more than 2,000.
            ConnectionLost: Some of it may have been typed.
        """
        await self._ask(TYPE, TypeRequest(text=text), timeout_s=2 * CALL_TIMEOUT_S)

    async def key(self, keys: str) -> None:
        """Press keys together: `enter`, `ctrl-c`, `ctrl-alt-delete`, `shift-f3`, `pageup`, `super`.

        Raises:
            InvalidSpec: One of them is no key.
        """
        await self._ask(KEY, KeyRequest(keys=keys))

    async def move(self, x: int, y: int) -> None:
        """Move the mouse to a pixel, counted from the upper left.

        Raises:
            InvalidSpec: The screen has no such pixel.
        """
        await self._ask(POINTER, PointerRequest(x=x, y=y))

    async def click(
        self, x: int | None = None, y: int | None = None, *, button: Button = "left", clicks: int = 1
    ) -> None:
        """Click at a pixel, or where the mouse is; `clicks=2` is a double click."""
        await self._ask(POINTER, PointerRequest(x=x, y=y, button=button, clicks=clicks))

    async def scroll(self, notches: int, *, x: int | None = None, y: int | None = None) -> None:
        """Turn the wheel: above 0 is down. At a pixel, or where the mouse is."""
        await self._ask(POINTER, PointerRequest(x=x, y=y, scroll=notches))

    async def _ask(
        self, call: Call[Empty], asked: TypeRequest | KeyRequest | PointerRequest, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        """Never sent twice: a key that is pressed again is another key."""
        await self._transport.value(call, self._target(call), encode(asked), timeout_s=timeout_s, resend=False)
