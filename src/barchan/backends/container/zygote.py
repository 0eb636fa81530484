"""Zygotes: warm interpreters whose forks move into sandboxes. docs/decisions/0014-zygotes.md.

A zygote lives in a sandbox of its own, one for each template and list of imports, and a while longer than the last
sandbox that was made of it. It holds their namespaces, so that it stays when the interpreter in it dies, which is then
started again.
"""

import asyncio
import hashlib
import json
import secrets
import socket
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from barchan.backends.base import Handle
from barchan.backends.container.supervisor import Answer
from barchan.backends.guest import GuestProcess, Reader
from barchan.errors import BackendError, BarchanError, CapacityError, InitDied, InvalidSpec
from barchan.image.template import GUEST_PATH, Template
from barchan.model.sandbox import SandboxSpec, Zygote
from barchan.wire import guest as wire

if TYPE_CHECKING:
    from barchan.backends.container.backend import ContainerBackend

PREFIX = "zy_"  # of the ids of their sandboxes, which no node gives to others
ZYGOTES_MAX = 32
IDLE_S = 120.0  # for which one is kept that no sandbox needs
IMPORT_S = 100.0  # less than a client waits for a create
ENTER_S = 10.0
ENTERING_MAX = 32  # forks of one zygote under way; it works at one after the other
STATUS_BYTES_MAX = 8 << 10
MESSAGES_BYTES_KEPT = 2000
MEMORY_MIB, DISK_MIB, PIDS_MAX, CPUS = 2048, 1024, 512, 2.0
MEMORY_SHARE = 0.25  # of the host's, at most
PROGRAM = "import sys; exec(compile(sys.stdin.buffer.read(), '<zygote>', 'exec'))"
# A thread that an import starts is in no fork: these make the usual libraries do without.
ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
RETRY_AFTER_MS = 5000


H = TypeVar("H", bound=Handle, covariant=True)


class Start(Protocol[H]):
    """How a backend starts a sandbox, with more keys for its supervisor."""

    async def __call__(
        self,
        op: str,
        sandbox_id: str,
        spec: SandboxSpec,
        template: Template,
        cut: str | None,
        more: dict[str, str | int],
    ) -> H: ...


class Host(Protocol):
    """What a backend does for its zygotes."""

    async def create(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> Handle: ...

    async def adopt(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> Handle: ...

    async def discard(self, sandbox_id: str) -> None: ...

    async def request(
        self, op: str, *, fds: Sequence[int] = ..., timeout_s: float = ..., **keys: str | int
    ) -> Answer: ...


def is_zygote(sandbox_id: str) -> bool:
    """Whether this is the sandbox of a zygote, which no user knows."""
    return sandbox_id.startswith(PREFIX)


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


class _Zygote:
    """One zygote: its sandbox, and the interpreter in it once that is there."""

    def __init__(self, key: str, sandbox_id: str, asked: Zygote, template: Template) -> None:
        self.key = key
        self.sandbox_id = sandbox_id
        self.asked = asked
        self.template = template
        self.is_made = False  # the supervisor has its sandbox
        self.handle: Handle | None = None
        self.process: GuestProcess | None = None
        self.users: set[str] = set()
        self.starting: asyncio.Task[None] | None = None
        self.turns = asyncio.Semaphore(ENTERING_MAX)
        self.idle: asyncio.TimerHandle | None = None

    @property
    def is_ready(self) -> bool:
        return self.process is not None and not self.process.ended.done()


class _User:
    """One sandbox of a zygote, and the line to the server in it. The line's end is the server's."""

    def __init__(self, zygote: _Zygote, user: str) -> None:
        self.zygote = zygote
        self.user = user
        self.name = ""
        self.line: socket.socket | None = None
        self.lock = asyncio.Lock()

    def hold(self, line: socket.socket, name: str) -> None:
        self.line, self.name = line, name
        asyncio.get_running_loop().add_reader(line.fileno(), self._readable)

    def _readable(self) -> None:
        """It says nothing more: this is its end, or a guest's nonsense, and either way it is done with."""
        self.let_go()

    def let_go(self) -> None:
        if self.line is not None:
            asyncio.get_running_loop().remove_reader(self.line.fileno())
            self.line.close()
            self.line = None


class Warming:
    """The part of a container's handle that has a warm interpreter."""

    sandbox_id: str
    _backend: "ContainerBackend"

    async def warm(self) -> str:
        """See `Handle.warm`."""
        return await self._backend.zygotes.serve(self.sandbox_id)


class Zygotes:
    """All zygotes of one backend, and the sandboxes made of them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._zygotes: dict[str, _Zygote] = {}
        self._users: dict[str, _User] = {}
        self._left_over: dict[str, str] = {}  # of an earlier node: key -> sandbox id
        self._tasks: set[asyncio.Task[None]] = set()

    # for the backend

    async def create(
        self, start: "Start[H]", sandbox_id: str, spec: SandboxSpec, template: Template, cut: str | None
    ) -> H:
        """Start a sandbox by `start`; one of a zygote has its interpreter in it then."""
        handle = await start("create", sandbox_id, spec, template, cut, await self._keys(sandbox_id, spec, template))
        if spec.zygote is not None:
            try:
                await self.serve(sandbox_id)
            except BaseException:
                await asyncio.shield(handle.destroy())
                raise
        return handle

    async def _keys(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> dict[str, str | int]:
        """What a create has to say of zygotes; the sandbox's own is ready then.

        Raises:
            InvalidSpec: The interpreter can't be had: the message says why.
            CapacityError: There are too many others.
        """
        if is_zygote(sandbox_id):
            return {"zygote": "self"}
        if spec.zygote is None:
            return {}
        zygote = self._take_up(sandbox_id, spec, template)
        try:
            await self._ready(zygote)
        except BaseException:
            self.left(sandbox_id)
            raise
        return {"zygote": zygote.sandbox_id}

    async def serve(self, sandbox_id: str) -> str:
        """The name of the socket that the sandbox's warm interpreter listens on; made again if it is gone.

        Raises:
            InvalidSpec: It was not made of a zygote, or the interpreter can't be had any more.
            BackendError: The fork could not enter the sandbox.
        """
        user = self._users.get(sandbox_id)
        if user is None:
            raise InvalidSpec(
                "this sandbox has no warm interpreter (try: create it of client.zygote(TEMPLATE, imports=[...]))"
            )
        async with user.lock:
            if user.line is None:
                try:
                    await self._enter(sandbox_id, user)
                except BackendError:
                    if user.zygote.is_ready:
                        raise
                    await self._enter(sandbox_id, user)  # its end was seen late
            return user.name

    def left(self, sandbox_id: str) -> None:
        """The sandbox is gone."""
        user = self._users.pop(sandbox_id, None)
        if user is None:
            return
        user.let_go()
        zygote = user.zygote
        zygote.users.discard(sandbox_id)
        if not zygote.users and zygote.idle is None:
            zygote.idle = asyncio.get_running_loop().call_later(IDLE_S, self._spawn_end, zygote)

    def found(self, sandbox_ids: Iterable[str]) -> list[str]:
        """Of the sandboxes that an earlier node left, those that are not zygotes'."""
        self._left_over = {_key_of(item): item for item in sandbox_ids if is_zygote(item)}
        return [item for item in sandbox_ids if not is_zygote(item)]

    def adopt(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> None:
        """A sandbox of an earlier node lives on."""
        if spec.zygote is not None:
            self._take_up(sandbox_id, spec, template)

    def adopted(self) -> None:
        """The zygotes that no sandbox needs any more go."""
        used = {zygote.sandbox_id for zygote in self._zygotes.values()}
        for sandbox_id in self._left_over.values():
            if sandbox_id not in used:
                self._spawn(self._discard(sandbox_id))
        self._left_over = {}

    async def close(self) -> None:
        """Let go; their sandboxes stay, and servers in sandboxes go on until what they run has ended."""
        for user in self._users.values():
            user.let_go()
        for zygote in self._zygotes.values():
            if zygote.idle is not None:
                zygote.idle.cancel()
            if zygote.starting is not None:
                self._tasks.add(zygote.starting)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # one zygote

    def _take_up(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> _Zygote:
        assert spec.zygote is not None
        if spec.root == "capable":
            raise InvalidSpec('a warm interpreter has no capabilities: root="capable" and zygote= exclude each other')
        if (
            spec.network == "open"
        ):  # what keeps a guest from the host's metadata addresses lies where a zygote has rights
            raise InvalidSpec('network="open" and zygote= exclude each other (try: network="allow" with allow_hosts)')
        key = _key(template, spec.zygote)
        zygote = self._zygotes.get(key)
        if zygote is None:
            self._make_room()
            left_over = self._left_over.get(key)
            new_id = left_over or f"{PREFIX}{key}_{secrets.token_hex(4)}"
            zygote = self._zygotes[key] = _Zygote(key, new_id, spec.zygote, template)
            zygote.is_made = left_over is not None
        if zygote.idle is not None:
            zygote.idle.cancel()
            zygote.idle = None
        zygote.users.add(sandbox_id)
        self._users[sandbox_id] = _User(zygote, spec.user or template.user or "root")
        return zygote

    def _make_room(self) -> None:
        """The one that has idled the longest gives way. No sandbox's limit has room for what one may take."""
        if _memory_mib("MemAvailable") < _limit_mib():
            raise CapacityError(
                f"the host has no room for a zygote, which may take {_limit_mib()} MiB", retry_after_ms=RETRY_AFTER_MS
            )
        if len(self._zygotes) < ZYGOTES_MAX:
            return
        idle = [zygote for zygote in self._zygotes.values() if zygote.idle is not None]
        if not idle:
            raise CapacityError(
                f"{ZYGOTES_MAX} zygotes are in use on this node, its bound", retry_after_ms=RETRY_AFTER_MS
            )
        self._spawn_end(min(idle, key=lambda zygote: zygote.idle.when() if zygote.idle else 0.0))

    async def _ready(self, zygote: _Zygote) -> None:
        """Wait until its interpreter has imported all; concurrent callers wait for one start."""
        if zygote.is_ready:
            return
        if zygote.starting is None or zygote.starting.done():
            zygote.starting = asyncio.create_task(self._start(zygote))
            zygote.starting.add_done_callback(_look_at)
        await asyncio.shield(zygote.starting)

    async def _start(self, zygote: _Zygote) -> None:
        spec = SandboxSpec(
            template=zygote.template.name,
            memory_mib=_limit_mib(),
            disk_mib=DISK_MIB,
            pids_max=PIDS_MAX,
            cpus=CPUS,
            hostname="zygote",
        )
        if zygote.handle is None:
            make = self._host.adopt if zygote.is_made else self._host.create
            zygote.handle = handle = await make(zygote.sandbox_id, spec, zygote.template)
            zygote.is_made = True
            handle.ended.add_done_callback(lambda ended: self._gone(zygote))
            zygote.process = await _running_in(handle)
            if zygote.is_ready:
                return
        zygote.process = await _start_interpreter(zygote.handle, zygote.asked, zygote.template)

    def _gone(self, zygote: _Zygote) -> None:
        """Its sandbox ended, and with it those inside."""
        if self._zygotes.get(zygote.key) is zygote:
            del self._zygotes[zygote.key]

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_look_at)

    def _spawn_end(self, zygote: _Zygote) -> None:
        self._gone(zygote)
        if zygote.idle is not None:
            zygote.idle.cancel()
        self._spawn(self._end(zygote))

    async def _end(self, zygote: _Zygote) -> None:
        if zygote.starting is not None:
            await asyncio.wait({zygote.starting})
        if zygote.handle is not None:
            await zygote.handle.destroy()
        elif zygote.is_made:
            await self._discard(zygote.sandbox_id)

    async def _discard(self, sandbox_id: str) -> None:
        await self._host.discard(sandbox_id)

    # one sandbox

    async def _enter(self, sandbox_id: str, user: _User) -> None:
        """Have a fork of the zygote move in."""
        async with user.zygote.turns:
            await self._ready(user.zygote)
            await self._enter_now(sandbox_id, user)

    async def _enter_now(self, sandbox_id: str, user: _User) -> None:
        name = f"barchan-{secrets.token_hex(16)}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                text = json.dumps({"user": user.user, "name": name})
                (await self._host.request("enter", fds=[theirs.fileno()], id=sandbox_id, text=text)).close()
            ours.setblocking(False)
            async with asyncio.timeout(ENTER_S):
                said = await asyncio.get_running_loop().sock_recv(ours, STATUS_BYTES_MAX)
        except TimeoutError as error:
            ours.close()
            await _kill(user.zygote)  # with it goes what it was sent and did not take
            raise BackendError(f"the zygote of {sandbox_id} did not fork within {ENTER_S:g} s") from error
        except BaseException:
            ours.close()
            raise
        if said != b"ready":
            ours.close()
            why = said.decode("utf-8", "replace") or "it ended without a word"
            raise BackendError(f"the zygote's fork could not enter {sandbox_id}: {why}")
        user.hold(ours, name)


async def _kill(zygote: _Zygote) -> None:
    """The next sandbox that needs it gets another."""
    if zygote.handle is not None and zygote.process is not None and zygote.is_ready:
        await zygote.handle.guest.signal(zygote.process, 9, wire.Scope.ALL)


def _memory_mib(name: str) -> int:
    """A line of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) >> 10
    raise BackendError(f"/proc/meminfo has no {name}")


def _limit_mib() -> int:
    return min(MEMORY_MIB, int(_memory_mib("MemTotal") * MEMORY_SHARE))


def _key(template: Template, asked: Zygote) -> str:
    text = json.dumps([template.digest, asked.python, asked.imports])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _key_of(sandbox_id: str) -> str:
    return sandbox_id.split("_")[1]


def _look_at(task: "asyncio.Future[None]") -> None:
    """A failure is for whoever waits; one that nobody waits for was of a zygote that goes anyway."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, BarchanError):
        asyncio.get_running_loop().call_exception_handler({"message": "a zygote failed", "exception": error})


async def _running_in(handle: Handle) -> GuestProcess | None:
    """The interpreter that an earlier node started, if it still runs."""
    for item in await handle.guest.listed():
        if not item.exited:
            return await handle.guest.find(item.process_id)
    return None


async def _start_interpreter(handle: Handle, asked: Zygote, template: Template) -> GuestProcess:
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
        stdin=Path(__file__).with_name("interpreter.py").read_bytes(),
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
        return f"it was killed while it imported, as is what needs more than {_limit_mib()} MiB"
    how = f"signal {wstatus & 0x7F}" if wstatus & 0x7F else f"exit code {wstatus >> 8}"
    return f"it ended with {how} while it imported: {status.messages}"
