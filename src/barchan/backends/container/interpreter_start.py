"""The interpreter of a zygote: its start, its end, and what becomes of it meanwhile."""

import asyncio
import functools
import json
import secrets
from pathlib import Path

from barchan.backends.base import Handle
from barchan.backends.guest import GuestProcess, Reader
from barchan.errors import BackendError, InitDied, InvalidSpec
from barchan.image.template import GUEST_PATH, Template
from barchan.model.sandbox import Zygote
from barchan.wire import guest as wire

IMPORT_S = 100.0  # less than a client waits for a create
STATUS_BYTES_MAX = 8 << 10
MESSAGES_BYTES_KEPT = 2000
MEMORY_MIB = 2048
MEMORY_SHARE = 0.25  # of the host's, at most
PROGRAM = "import sys; exec(compile(sys.stdin.buffer.read(), '<zygote>', 'exec'))"
# A thread that an import starts is in no fork: these make the usual libraries do without.
ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
OURS = Path(__file__).with_name("interpreter.py")
FOR_CALLS = Path(__file__).parents[1] / "function" / "keeper.py"


@functools.cache
def program(*, keeps_calls: bool) -> bytes:
    """The text that the image's Python is given: that of every zygote, of some that of calls, and its beginning."""
    lines = OURS.read_text().splitlines()
    if keeps_calls:
        lines += [line for line in FOR_CALLS.read_text().splitlines() if not line.startswith("from __future__")]
    return "\n".join([*lines, "zygote()", ""]).encode()


class _Status(Reader):
    """What a starting interpreter says of itself, and the end of what its imports print."""

    def __init__(self) -> None:
        super().__init__()
        self.said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._status = b""
        self._messages = b""

    def output(self, stream: int, offset: int, data: bytes) -> None:
        self.consumed[stream] = offset + len(data)
        if stream == wire.STDERR:
            self._messages = (self._messages + data)[-MESSAGES_BYTES_KEPT:]
            return
        self._status = (self._status + data)[:STATUS_BYTES_MAX]
        if b"\n" in self._status or len(self._status) == STATUS_BYTES_MAX:
            self._say(self._status.split(b"\n")[0].decode("utf-8", "replace"))

    def finished(self) -> None:
        self._say("")

    def lost(self, error: Exception) -> None:
        self._say("")

    def _say(self, text: str) -> None:
        if not self.said.done():
            self.said.set_result(text)

    @property
    def messages(self) -> str:
        return self._messages.decode("utf-8", "replace").strip()


def memory_mib(name: str) -> int:
    """A line of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) >> 10
    raise BackendError(f"/proc/meminfo has no {name}")


def limit_mib() -> int:
    """Of one zygote's memory."""
    return min(MEMORY_MIB, int(memory_mib("MemTotal") * MEMORY_SHARE))


async def running_in(handle: Handle) -> GuestProcess | None:
    """The interpreter that an earlier node started, if it still runs."""
    for item in await handle.guest.listed():
        if not item.exited:
            return await handle.guest.find(item.process_id)
    return None


async def start_interpreter(handle: Handle, asked: Zygote, template: Template, *, keeps_calls: bool) -> GuestProcess:
    """Start it, and wait until it has imported all.

    Raises:
        InvalidSpec: It did not get there; the message has its own words.
        InitDied: Its sandbox ended.
    """
    status = _Status()
    start = wire.Start(
        process_id=f"zygote-{secrets.token_hex(4)}",
        argv=(asked.python, "-c", PROGRAM, json.dumps(asked.imports)),
        flags=wire.StartFlag.FOLLOW,
        user="root",
        env={"PATH": GUEST_PATH, "LANG": "C.UTF-8", **template.env, **ENV},
        stdin=program(keeps_calls=keeps_calls),
    )
    process = await handle.guest.start(start, status)
    try:
        async with asyncio.timeout(IMPORT_S):
            said = await status.said
        if said == "ready":
            return process
        if handle.ended.done():
            raise InitDied(f"the sandbox of the zygote of {template.name} ended")
        why = said.removeprefix("error ") or await _end_of(process, asked, status)
    except TimeoutError:
        why = f"its imports take more than {IMPORT_S:g} s"
    finally:
        process.remove_reader(status)
    if not process.ended.done():
        await handle.guest.signal(process, 9, wire.Scope.ALL)
    raise InvalidSpec(f"no zygote of {template.name} with imports {', '.join(asked.imports) or 'none'}: {why}")


async def _end_of(process: GuestProcess, asked: Zygote, status: _Status) -> str:
    """How an interpreter ended that had nothing to say."""
    wstatus = (await process.ended).wstatus
    if wstatus & 0x7F == 0 and wstatus >> 8 in (126, 127):
        what = "has no" if wstatus >> 8 == 127 else "does not let root run"
        return f"the image {what} {asked.python} ({status.messages})"
    if wstatus & 0x7F == 9:
        return f"it was killed while it imported, as is what needs more than {limit_mib()} MiB"
    how = f"signal {wstatus & 0x7F}" if wstatus & 0x7F else f"exit code {wstatus >> 8}"
    return f"it ended with {how} while it imported: {status.messages}"
