"""What is asked of a machine's screen, keyboard and mouse, and what is told of them."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Button = Literal["left", "middle", "right"]
CLICKS_MAX = 3
SCROLL_MAX = 100
_Place = Annotated[int, Meta(ge=0, le=1 << 16)]


class ScreenSize(Struct, frozen=True, kw_only=True):
    """In pixels. It changes when the guest sets another mode."""

    width: int
    height: int


class TypeRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text to type, with the keys of a US layout; a newline is the enter key."""

    text: str


class KeyRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys to press together, by their names joined by `-`: `enter`, `ctrl-c`, `ctrl-alt-delete`."""

    keys: Annotated[str, Meta(min_length=1, max_length=80)]


class PointerRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the mouse goes, and what is done there.

    Attributes:
        x, y: In pixels from the upper left; None: it stays where it is.
        button: Which one is clicked.
        clicks: How often; 0: the mouse only moves.
        scroll: Notches of the wheel; above 0 is down.
    """

    x: _Place | None = None
    y: _Place | None = None
    button: Button = "left"
    clicks: Annotated[int, Meta(ge=0, le=CLICKS_MAX)] = 0
    scroll: Annotated[int, Meta(ge=-SCROLL_MAX, le=SCROLL_MAX)] = 0
