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
from typing import TYPE_CHECKING, Protocol, TypeVar

from barchan.backends.base import Handle
from barchan.backends.container.interpreter_start import (
    STATUS_BYTES_MAX,
    limit_mib,
    memory_mib,
    running_in,
    start_interpreter,
)
from barchan.backends.container.supervisor import Answer
from barchan.backends.guest import GuestProcess
from barchan.errors import BackendError, BarchanError, CapacityError, InvalidSpec
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec, Zygote
from barchan.wire import guest as wire

if TYPE_CHECKING:
    from barchan.backends.container.backend import ContainerBackend

PREFIX = "zy_"  # of the ids of their sandboxes, which no node gives to others
PREFIX_FOR_CALLS = "zy_calls"  # of those whose forks keep calls
CALLS_PREFIX = "ca_"  # of the ids of the sandboxes in which calls run
ZYGOTES_MAX = 32
IDLE_S = 120.0  # for which one is kept that no sandbox needs
ENTER_S = 10.0
END_SEEN_S = 2.0
ENTERING_MAX = 32  # forks of one zygote under way; it works at one after the other
DISK_MIB, PIDS_MAX, CPUS = 1024, 512, 2.0
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


def is_for_calls(sandbox_id: str) -> bool:
    """Whether calls run in this sandbox, which no user knows, and nothing else does."""
    return sandbox_id.startswith(CALLS_PREFIX)


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

    async def has_ended(self) -> bool:
        """Whether its interpreter has, which is seen a while after the interpreter answers nobody any more."""
        if self.process is not None:
            await asyncio.wait({self.process.ended}, timeout=END_SEEN_S)
        return not self.is_ready


class _User:
    """One sandbox of a zygote, and the line to the server in it. The line's end is the server's."""

    def __init__(self, zygote: _Zygote, user: str, disk_mib: int) -> None:
        self.zygote = zygote
        self.user = user
        self.disk_mib = disk_mib
        self.name = ""
        self.line: socket.socket | None = None
        self.lock = asyncio.Lock()

    def hold(self, line: socket.socket, name: str, *, has_more: bool) -> None:
        """`has_more`: the line is for another to read."""
        self.line, self.name = line, name
        if not has_more:
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
            return {"zygote": "calls" if sandbox_id.startswith(PREFIX_FOR_CALLS) else "self"}
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
                    if not await user.zygote.has_ended():
                        raise
                    await self._enter(sandbox_id, user)
            return user.name

    def take_line(self, sandbox_id: str) -> socket.socket:
        """The line to what keeps the calls of a sandbox that was just created for them; the caller's from now on."""
        user = self._users[sandbox_id]
        assert user.line is not None
        line, user.line = user.line, None
        return line

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
        key = _key(template, spec.zygote, keeps_calls=is_for_calls(sandbox_id))
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
        self._users[sandbox_id] = _User(zygote, spec.user or template.user or "root", spec.disk_mib)
        return zygote

    def _make_room(self) -> None:
        """The one that has idled the longest gives way. No sandbox's limit has room for what one may take."""
        if memory_mib("MemAvailable") < limit_mib():
            raise CapacityError(
                f"the host has no room for a zygote, which may take {limit_mib()} MiB", retry_after_ms=RETRY_AFTER_MS
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
            memory_mib=limit_mib(),
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
            zygote.process = await running_in(handle)
            if zygote.is_ready:
                return
        zygote.process = await start_interpreter(
            zygote.handle, zygote.asked, zygote.template, keeps_calls=zygote.key.startswith("calls")
        )

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
                server = "calls" if is_for_calls(sandbox_id) else "programs"
                asked = {"user": user.user, "name": name, "server": server, "room_mib": str(user.disk_mib)}
                text = json.dumps(asked)
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
        user.hold(ours, name, has_more=is_for_calls(sandbox_id))


async def _kill(zygote: _Zygote) -> None:
    """The next sandbox that needs it gets another."""
    if zygote.handle is not None and zygote.process is not None and zygote.is_ready:
        await zygote.handle.guest.signal(zygote.process, 9, wire.Scope.ALL)


def _key(template: Template, asked: Zygote, *, keeps_calls: bool) -> str:
    text = json.dumps([template.digest, asked.python, asked.imports])
    return ("calls" if keeps_calls else "") + hashlib.sha256(text.encode()).hexdigest()[:20]


def _key_of(sandbox_id: str) -> str:
    return sandbox_id.split("_")[1]


def _look_at(task: "asyncio.Future[None]") -> None:
    """A failure is for whoever waits; one that nobody waits for was of a zygote that goes anyway."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, BarchanError):
        asyncio.get_running_loop().call_exception_handler({"message": "a zygote failed", "exception": error})
