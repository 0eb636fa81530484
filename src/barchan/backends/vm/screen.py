"""The screen, keyboard and mouse of a QEMU machine."""

import asyncio
import os
import re
import struct
from collections.abc import Sequence

from barchan.backends.qemu.machine import Machine, open_in
from barchan.core.keyboard import Chord
from barchan.errors import BackendError, InvalidSpec
from barchan.model.screen import PointerRequest, ScreenSize

PNG_BYTES_MAX = 64 << 20
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
AXIS_MAX = 0x7FFF  # how far a tablet reaches, whatever the screen's size
KEY_S = 0.03  # between keys: an emulated guest takes some time for each
KEY_TAKEN_S = 2.0  # a keyboard's buffer holds few, and drops the rest: for so long a guest is waited for
_KEYBOARD = re.compile(r"^ *1: ([0-9]{1,18})\r?$", re.MULTILINE)  # a PC's first interrupt line
CLICK_S = 0.05  # between events of the mouse, of which a guest else would see only the last


class QemuScreen:
    """See `backends.screen.Screen`.

    Args:
        path: In the machine's outer, where QEMU puts pictures.
    """

    def __init__(self, machine: Machine, path: str) -> None:
        self._machine = machine
        self._path = path
        self._turn = asyncio.Lock()  # of the picture's file
        self._input = asyncio.Lock()  # what two callers type does not mix

    async def png(self) -> bytes:
        async with self._turn:
            await self._machine.qmp.execute("screendump", filename=self._path, format="png")
            data = await asyncio.to_thread(self._read)
        size_of(data)
        return data

    def _read(self) -> bytes:
        with os.fdopen(open_in(self._machine.outer, self._path), "rb") as file:
            return file.read(PNG_BYTES_MAX)

    async def size(self) -> ScreenSize:
        return size_of(await self.png())

    async def press(self, chords: Sequence[Chord]) -> None:
        async with self._input:
            takes = True  # whether this guest hears its keyboard by interrupts
            for number, chord in enumerate(chords):
                if number:
                    await asyncio.sleep(KEY_S)
                down = [_key(key, down=True) for key in chord]
                up = [_key(key, down=False) for key in reversed(chord)]
                before = await self._interrupts() if takes else 0
                await self._send(down + up)
                takes = takes and await self._taken(before + len(down) + len(up))

    async def _taken(self, interrupts: int) -> bool:
        """Wait until the guest has heard of so much; False: it does not. It is interrupted for each byte, so at least
        once for a key down, and once for a key up.
        """
        for _ in range(round(KEY_TAKEN_S / KEY_S)):
            if await self._interrupts() >= interrupts:
                return True
            await asyncio.sleep(KEY_S)
        return False

    async def _interrupts(self) -> int:
        """Of its keyboard, so far; 0 where QEMU counts none."""
        said = await self._machine.qmp.execute("human-monitor-command", command_line="info irq")
        found = _KEYBOARD.search(str(said))
        return int(found[1]) if found else 0

    async def point(self, asked: PointerRequest) -> None:
        async with self._input:
            if asked.x is not None and asked.y is not None:
                size = await self.size()
                if asked.x >= size.width or asked.y >= size.height:
                    raise InvalidSpec(f"({asked.x}, {asked.y}) is not on the screen of {size.width} x {size.height}")
                await self._send([_axis("x", asked.x, size.width), _axis("y", asked.y, size.height)])
                await asyncio.sleep(CLICK_S)
            wheel = "wheel-down" if asked.scroll > 0 else "wheel-up"
            for button in [asked.button] * asked.clicks + [wheel] * abs(asked.scroll):
                try:
                    await self._send([_button(button, down=True)])
                    await asyncio.sleep(CLICK_S)
                finally:
                    await asyncio.shield(self._send([_button(button, down=False)]))
                await asyncio.sleep(CLICK_S)

    async def _send(self, events: list[dict[str, object]]) -> None:
        await self._machine.qmp.execute("input-send-event", events=events)


def _key(key: str, *, down: bool) -> dict[str, object]:
    return {"type": "key", "data": {"down": down, "key": {"type": "qcode", "data": key}}}


def _button(button: str, *, down: bool) -> dict[str, object]:
    return {"type": "btn", "data": {"down": down, "button": button}}


def _axis(axis: str, pixel: int, pixels: int) -> dict[str, object]:
    """In the middle of a pixel, however a guest rounds."""
    return {"type": "abs", "data": {"axis": axis, "value": (2 * pixel + 1) * (AXIS_MAX + 1) // (2 * pixels)}}


def size_of(png: bytes) -> ScreenSize:
    """What a picture says of itself.

    Raises:
        BackendError: It is none.
    """
    if png[: len(PNG_MAGIC)] != PNG_MAGIC or png[12:16] != b"IHDR" or len(png) < 24:
        raise BackendError("QEMU gave no picture of its screen")
    width, height = struct.unpack(">II", png[16:24])
    return ScreenSize(width=width, height=height)
