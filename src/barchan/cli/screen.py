"""`barchan screen`: look at a machine's screen, and type and click on it."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

import barchan
from barchan.cli.common import DEFAULTS, OK, Common, print_json
from barchan.errors import InvalidSpec
from barchan.model.screen import Button

app = App(name="screen", help_format="plaintext")

Place = Annotated[int | None, Parameter(show_default=False)]


@app.command
def png(sandbox: str, file: Path, /, *, common: Common = DEFAULTS) -> int:
    """Write the screen as it is now into a PNG file.

    For example:

        barchan screen png sb_x1 now.png

    Args:
        sandbox: Its id.
        file: `-` is stdout.
    """
    with barchan.connect(**common.connection) as client:
        picture = client.attach(sandbox).screen.png()
    if str(file) == "-":
        sys.stdout.buffer.write(picture)
        return OK
    try:
        file.write_bytes(picture)
    except OSError as error:
        raise InvalidSpec(f"{file} can't be written: {error.strerror}") from error
    if common.json:
        print_json({"file": str(file), "bytes": len(picture)})
    return OK


@app.command
def size(sandbox: str, /, *, common: Common = DEFAULTS) -> int:
    """Print the screen's width and height in pixels.

    For example:

        barchan screen size sb_x1

    Args:
        sandbox: Its id.
    """
    with barchan.connect(**common.connection) as client:
        width, height = client.attach(sandbox).screen.size
    if common.json:
        print_json({"width": width, "height": height})
    else:
        sys.stdout.write(f"{width} {height}\n")
    return OK


@app.command(name="type")
def type_(sandbox: str, text: str, /, *, enter: bool = False, common: Common = DEFAULTS) -> int:
    """Type a text on its keyboard, which has a US layout.

    For example:

        barchan screen type sb_x1 "ls -l" --enter

    Args:
        sandbox: Its id.
        text: At most 2,000 characters.
        enter: Press the enter key at the end.
    """
    with barchan.connect(**common.connection) as client:
        client.attach(sandbox).screen.type(text + ("\n" if enter else ""))
    return OK


@app.command
def key(sandbox: str, *keys: str, common: Common = DEFAULTS) -> int:
    """Press keys, those joined by `-` together.

    For example:

        barchan screen key sb_x1 ctrl-c
        barchan screen key sb_x1 up up enter

    Args:
        sandbox: Its id.
        keys: Names, such as enter, esc, tab, f1, up, pageup, ctrl-alt-delete.
    """
    if not keys:
        raise InvalidSpec(f"no keys (try: barchan screen key {sandbox} enter)")
    with barchan.connect(**common.connection) as client:
        screen = client.attach(sandbox).screen
        for chord in keys:
            screen.key(chord)
    return OK


@app.command
def click(
    sandbox: str,
    x: Place = None,
    y: Place = None,
    /,
    *,
    button: Button = "left",
    clicks: int = 1,
    common: Common = DEFAULTS,
) -> int:
    """Click at a pixel, or where the mouse is.

    For example:

        barchan screen click sb_x1 640 400
        barchan screen click sb_x1 640 400 --clicks 2

    Args:
        sandbox: Its id.
        x: From the left.
        y: From the top.
        button: Which one.
        clicks: 2 is a double click.
    """
    with barchan.connect(**common.connection) as client:
        client.attach(sandbox).screen.click(x, y, button=button, clicks=clicks)
    return OK


@app.command
def move(sandbox: str, x: int, y: int, /, *, common: Common = DEFAULTS) -> int:
    """Move the mouse to a pixel.

    For example:

        barchan screen move sb_x1 640 400

    Args:
        sandbox: Its id.
        x: From the left.
        y: From the top.
    """
    with barchan.connect(**common.connection) as client:
        client.attach(sandbox).screen.move(x, y)
    return OK


@app.command
def scroll(sandbox: str, notches: int, x: Place = None, y: Place = None, /, *, common: Common = DEFAULTS) -> int:
    """Turn the mouse's wheel, at a pixel or where the mouse is.

    For example:

        barchan screen scroll sb_x1 3 640 400

    Args:
        sandbox: Its id.
        notches: Above 0 is down; write those below as `-- -3`.
        x: From the left.
        y: From the top.
    """
    with barchan.connect(**common.connection) as client:
        client.attach(sandbox).screen.scroll(notches, x=x, y=y)
    return OK
