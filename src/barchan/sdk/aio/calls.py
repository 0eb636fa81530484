"""Calls: source or a function, run on a node in a warm interpreter that is used once."""

import asyncio
import functools
import importlib
import inspect
import os
import pickle
import socket
import sys
import textwrap
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, cast

import msgspec

from barchan.errors import (
    BarchanError,
    ConnectionLost,
    InvalidSpec,
    LocalProtocolError,
    ProtocolError,
    RemoteProtocolError,
)
from barchan.model.calls import CALL_TIMEOUT_S_MAX, DEFAULT_CALL_TIMEOUT_S, CallResult, CallsInfo, CallSpec
from barchan.model.sandbox import DEFAULT_OUTPUT_BYTES
from barchan.sdk.checks import check_count, check_seconds, checked_bytes, checked_env
from barchan.sdk.endpoint import Endpoint
from barchan.sdk.http1 import open_socket
from barchan.sdk.transport import Call, Transport
from barchan.wire import calls as wire
from barchan.wire.api import error_from_body
from barchan.wire.calls import Kind, Work

CALL_INFO = Call("call_info", CallsInfo)
CONCURRENCY = 16
_CONNECT_TIMEOUT_S = 60.0
_HEAD_BYTES_MAX = 64 << 10
_IDLE_S, _PROBE_S, _GONE_MS = 15, 5, 60_000  # on a connection by TCP of which nothing is heard
_PICKLE_PROTOCOL = 4  # that a Python 3.8 reads
_BY_CLOUDPICKLE = "cloudpickle"

Callee = str | Callable[..., Any]


class CallOptions(TypedDict, total=False):
    """What a call runs in, and its bounds; see `AsyncClient.call`."""

    kwargs: Mapping[str, Any]
    template: str
    imports: Sequence[str]
    python: str
    stdin: bytes | str
    env: Mapping[str, str]
    timeout_s: float
    cpu_s: float
    memory_mib: int
    pids_max: int
    disk_mib: int
    max_output_bytes: int
    pickled: bool


class AsyncCalling:
    """A part of `AsyncClient`."""

    _transport: Transport

    async def call(self, what: Callee, *args: Any, **options: Unpack[CallOptions]) -> CallResult:
        """Run source, or a function with its arguments, and wait for its end.

        It runs in a fork of an interpreter of the template that has the imports loaded: in files, processes, memory and
        random numbers of its own, of which nothing stays, without network, as a user without rights. The node keeps
        such interpreters, and a call waits for its turn as long as it takes.

        A function goes by its name where it is of the standard library or of a module in `imports`, by cloudpickle
        where that is in `imports`, and else by its source, which then must be all it needs: a function of a module's
        top level, whose imports are inside. Arguments are pickled.

        Args:
            what: Source of a program, or a function.
            kwargs: Further arguments of the function.
            template: The image.
            imports: Modules that are loaded before; the first call with a new list waits for that.
            stdin: What the call reads; text is sent in UTF-8.
            env: Variables beside those of the image.
            timeout_s: From when it begins; then it is killed.
            cpu_s: CPU time of each of its processes; beyond it, the call dies of SIGXCPU.
            memory_mib: With what it writes to files.
            pids_max: Processes and threads at once.
            disk_mib: Of files, which can be written below /tmp.
            max_output_bytes: Of each stream; beyond it the head and the tail are kept, half each.
            pickled: Take the function's value as a pickle. **The code that is called can then run code here**: only for
                what you trust. Else a value is plain data: numbers, text, bytes, lists, tuples, sets, dicts.

        Raises:
            CapacityError: Too many calls wait on the node.
            InvalidSpec: There is no such interpreter, or the function can't be sent: the message says why.
        """
        spec, work = _request(what, args, options)
        timeout_s = options.get("timeout_s", DEFAULT_CALL_TIMEOUT_S)
        bytes_max = options.get("max_output_bytes", DEFAULT_OUTPUT_BYTES)
        reply = await (await self._link()).ask(timeout_s, bytes_max, spec, work)
        return _result(reply, pickled=options.get("pickled", False))

    async def map(
        self,
        function: Callable[..., Any],
        items: Iterable[Any],
        *,
        concurrency: int = CONCURRENCY,
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[CallResult | BarchanError, None]:
        """Call a function with each item, so many at once, and give the results in the items' order.

        An item whose call can't be made gives the error in its place. Leaving the iteration early ends what runs.
        """
        check_count(concurrency=concurrency)

        async def one(item: Any) -> CallResult | BarchanError:
            try:
                return await self.call(function, item, **options)
            except BarchanError as error:
                return error

        running: deque[asyncio.Future[CallResult | BarchanError]] = deque()
        try:
            for item in items:
                running.append(asyncio.ensure_future(one(item)))
                if len(running) >= concurrency:
                    yield await running.popleft()
            while running:
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def call_info(self) -> CallsInfo:
        """The node's calls: what is there, and what became of all so far."""
        return await self._transport.value(CALL_INFO, CALL_INFO.target())

    async def _link(self) -> "_Link":
        """This loop's connection."""
        loop = asyncio.get_running_loop()
        links = _links.setdefault(self._transport, {})
        known = links.get(loop)
        if known is None or known.is_over:
            for gone in [other for other in links if other.is_closed()]:
                del links[gone]
            known = links[loop] = _Link()
            known.opening = asyncio.ensure_future(self._transport.connect(known.open, timeout_s=_CONNECT_TIMEOUT_S))
        if not known.opening.done():
            await asyncio.shield(known.opening)
        known.opening.result()
        return known

    async def _end_calls(self) -> None:
        """End the connections, and with them the calls that run."""
        here = asyncio.get_running_loop()
        for loop, link in _links.pop(self._transport, {}).items():
            if loop is here:
                link.close()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(link.close)


class _Link(asyncio.Protocol):
    """One connection to a node, for any number of calls at once."""

    def __init__(self) -> None:
        self.opening: asyncio.Future[None]
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._frames = wire.FrameReader(wire.REPLY_BYTES_MAX)
        self._number = 0
        self._waiting: dict[int, asyncio.Future[wire.Reply]] = {}
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """It can't be used, now or any more."""
        failed = self.opening.done() and (self.opening.cancelled() or self.opening.exception() is not None)
        return failed or (self.opening.done() and self._transport is None)

    async def open(self, endpoint: Endpoint, token: str | None) -> None:
        self._head, self._greeted = b"", self._loop.create_future()
        sock = await open_socket(endpoint)
        if sock is None:
            transport, _ = await self._loop.create_connection(lambda: self, *endpoint.host_port)
            _notice_loss(transport.get_extra_info("socket"))
        else:
            transport, _ = await self._loop.create_unix_connection(lambda: self, sock=sock)
        authorization = f"Authorization: Bearer {token}\r\n" if token is not None else ""
        head = f"GET {wire.PATH} HTTP/1.1\r\nHost: node\r\nConnection: Upgrade\r\nUpgrade: {wire.PROTOCOL}\r\n"
        transport.write(f"{head}{authorization}\r\n".encode())
        await self._greeted

    async def ask(self, timeout_s: float, bytes_max: int, spec: bytes, work: bytes) -> wire.Reply:
        if self._transport is None:
            raise ConnectionLost("the connection to the node was lost", sent=0)
        self._number = number = (self._number + 1) & 0xFFFFFFFF
        asked = wire.encode_call(number, timeout_s, bytes_max, spec, work)
        answer: asyncio.Future[wire.Reply] = self._loop.create_future()
        self._waiting[number] = answer
        self._transport.write(asked)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None and self._transport is not None:
                self._transport.write(wire.frame(Kind.CANCEL, number))
            raise

    # what the node sends

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._greeted.done():
            data = self._greet(data)
        try:
            for found in self._frames.feed(data):
                self._act(found)
        except ProtocolError as error:
            self._fail(error)

    def _greet(self, data: bytes) -> bytes:
        """Read the node's answer to the request that the connection began with; returns what comes behind it."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 101 ") and end:
            self._greeted.set_result(None)
            return rest
        sizes = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        size = int(sizes[0].split(b":")[1]) if sizes else 0
        if len(self._head) > _HEAD_BYTES_MAX:
            self._greeted.set_exception(RemoteProtocolError("the head of the answer is too long"))
        elif end and len(rest) >= size:
            self._greeted.set_exception(error_from_body(rest, "application/json"))
            self.close()
        return b""

    def _act(self, found: wire.Frame) -> None:
        answer = self._waiting.pop(found.number, None)
        if answer is None or answer.done():
            return  # nobody waits for it any more
        if found.kind == Kind.RESULT:
            answer.set_result(wire.decode_reply(found.body))
        elif found.kind == Kind.ERROR:
            answer.set_exception(error_from_body(bytes(found.body), "application/msgpack"))
        else:
            answer.set_exception(RemoteProtocolError(f"the node sent a frame of kind {found.kind}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(
            LocalProtocolError("the client is closed")
            if self._is_closed
            else ConnectionLost(f"the connection to the node was lost: {error or 'it was closed'}", sent=1)
        )

    def _fail(self, error: BarchanError) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        if not self._greeted.done():
            self._greeted.set_exception(error)
            self._greeted.exception()
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(error)

    def close(self) -> None:
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()

    def leave(self) -> None:
        """In a forked child: let go of the parent's connection. The descriptor stays taken: an object has it."""
        if self._transport is not None:
            descriptor = self._transport.get_extra_info("socket").fileno()
            if descriptor >= 0:
                null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                os.dup2(null, descriptor, inheritable=False)
                os.close(null)


def _notice_loss(sock: socket.socket) -> None:
    """Have the connection break when nothing comes from the node's host for so long, though it should."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_MS)


_links: "weakref.WeakKeyDictionary[Transport, dict[asyncio.AbstractEventLoop, _Link]]" = weakref.WeakKeyDictionary()


def _leave_links() -> None:
    for links in list(_links.values()):
        for link in links.values():
            link.leave()
    _links.clear()


os.register_at_fork(after_in_child=_leave_links)


# --- what is sent ----------------------------------------------------------------------------------------------------


def _request(what: Callee, args: tuple[Any, ...], options: CallOptions) -> tuple[bytes, bytes]:
    """The kind of call, and its work, as they go over the wire; the options are checked."""
    timeout_s, cpu_s = options.get("timeout_s", DEFAULT_CALL_TIMEOUT_S), options.get("cpu_s")
    check_seconds(timeout_s=timeout_s, cpu_s=cpu_s)
    if timeout_s > CALL_TIMEOUT_S_MAX:
        raise InvalidSpec(f"timeout_s={timeout_s:g}: a call has at most {CALL_TIMEOUT_S_MAX:g} s (try: an exec)")
    if "max_output_bytes" in options:
        check_count(max_output_bytes=options["max_output_bytes"], least=0)
        if options["max_output_bytes"] > wire.OUTPUT_BYTES_MAX:
            raise InvalidSpec(
                f"max_output_bytes={options['max_output_bytes']}: a call gives at most {wire.OUTPUT_BYTES_MAX} of each "
                "stream (try: an exec)"
            )
    imports = options.get("imports", ())
    if isinstance(imports, str):
        raise InvalidSpec("imports= is a list of names of modules")
    imports = tuple(imports)
    limits = tuple((name, options[name]) for name in _SPEC_FIELDS if name in options)  # type: ignore[literal-required]
    kwargs = options.get("kwargs", {})
    name, arguments = "", b""
    if isinstance(what, str):
        if args or kwargs:
            raise InvalidSpec("source takes no arguments (try: stdin=, or a function)")
        kind, code = Work.PROGRAM, what.encode()
    elif _BY_CLOUDPICKLE in imports:
        kind, code = Work.PICKLED, _cloudpickled((what, args, dict(kwargs)))
    else:
        kind, code, name = _described(what, imports)
        arguments = _pickled((args, dict(kwargs)))
    work = wire.encode_work(
        kind,
        code,
        name=name,
        arguments=arguments,
        stdin=checked_bytes("stdin", options["stdin"]) if "stdin" in options else b"",
        env=checked_env(options["env"]) if "env" in options else None,
        cpu_s=cpu_s or 0.0,
        flags=wire.GIVE_PICKLED if options.get("pickled", False) else 0,
    )
    if len(work) > wire.REQUEST_BYTES_MAX - wire.SPEC_BYTES_MAX:
        raise InvalidSpec(f"a call of {len(work)} bytes, more than {wire.REQUEST_BYTES_MAX - wire.SPEC_BYTES_MAX}")
    return _encoded_spec(imports, limits), work


_SPEC_FIELDS = ("template", "python", "memory_mib", "pids_max", "disk_mib")


@functools.lru_cache(1000)
def _encoded_spec(imports: tuple[str, ...], limits: tuple[tuple[str, Any], ...]) -> bytes:
    try:
        spec = msgspec.msgpack.encode(CallSpec(imports=imports, **dict(limits)))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidSpec(f"no call can be of this kind: {error}") from error
    if len(spec) > wire.SPEC_BYTES_MAX:
        raise InvalidSpec(
            f"a kind of call of {len(spec)} bytes, more than {wire.SPEC_BYTES_MAX} (try: fewer imports, or one module "
            "that has them)"
        )
    return spec


@functools.lru_cache(1000)
def _described(function: Callable[..., Any], imports: tuple[str, ...]) -> tuple[Work, bytes, str]:
    """How the other side finds a function: the way, source or module, and its name."""
    module, name = getattr(function, "__module__", None) or "builtins", getattr(function, "__qualname__", "")
    loaded = {item.partition(".")[0] for item in imports}
    if name and "<" not in name and module.partition(".")[0] in (sys.stdlib_module_names | loaded):
        return Work.BY_NAME, module.encode(), name
    why = (
        "it is no function"
        if not inspect.isfunction(function)
        else "it is a lambda, a method, or inside another function"
        if name != function.__name__ or "<" in name
        else "it uses variables of a function around it"
        if function.__closure__
        else ""
    )
    if not why:
        try:
            return Work.BY_SOURCE, textwrap.dedent(inspect.getsource(function)).encode(), name
        except (OSError, TypeError) as error:
            why = f"its source can't be had: {error}"
    raise InvalidSpec(
        f"{name or function!r} can't be sent to a call: {why} (try: a function of a module's top level, or "
        'imports=["cloudpickle"] with an image that has it)'
    )


def _pickled(value: object) -> bytes:
    try:
        return pickle.dumps(value, _PICKLE_PROTOCOL)
    except Exception as error:  # whatever the objects raise
        raise InvalidSpec(f"the arguments can't be pickled: {error}") from error


def _cloudpickled(value: object) -> bytes:
    try:
        cloudpickle = importlib.import_module(_BY_CLOUDPICKLE)
    except ImportError as error:
        raise InvalidSpec('imports=["cloudpickle"] sends functions by cloudpickle, which is not here') from error
    try:
        data: bytes = cloudpickle.dumps(value, _PICKLE_PROTOCOL)
    except Exception as error:  # whatever the objects raise
        raise InvalidSpec(f"the function or its arguments can't be pickled: {error}") from error
    return data


# --- what comes back -------------------------------------------------------------------------------------------------


def _result(reply: wire.Reply, *, pickled: bool) -> CallResult:
    """The result with its value. What is none is the call's doing, and an error in the result."""
    word, data = reply.value[:1], reply.value[1:]
    if not word:
        return wire.result_of(reply, given=None, returned=False, error=None)
    try:
        if word == b"p" and pickled:
            return wire.result_of(reply, given=pickle.loads(data), returned=True, error=None)
        given = wire.plain_value(data)
        if word == b"v":
            return wire.result_of(reply, given=given, returned=True, error=None)
        kind, message = given
        error = (str(kind), str(message))
    except Exception as failure:  # of a pickle, or of what was to be none
        error = (type(failure).__name__, str(failure)[:400])
    return wire.result_of(reply, given=None, returned=False, error=error)
