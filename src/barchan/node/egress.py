"""The egress proxy of one sandbox with `network="allow"`: HTTP and TLS to the hosts its spec names, nothing else.

The sandbox has only loopback. Inside it the supervisor listens on 127.0.0.1:3128 and gives the node the descriptor; the
proxy accepts there and connects from the node's own network. It judges names (`barchan.core.egress`), then the
addresses they lead to, then the name in a tunnel's TLS ClientHello. What it can't see it doesn't promise: inside TLS a
guest may ask an allowed server for any of the sites that server has.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Self

from msgspec import Struct

from barchan.core.egress import EgressEvent, Outcome, Target, parse_allow
from barchan.errors import BarchanError, ConnectTimeout, Denied, ReadTimeout, RemoteProtocolError
from barchan.node.egress_http import HEAD_BYTES_MAX, Request, own_answer, parse_request
from barchan.node.egress_relay import answer_and_drain, read_head, wait_readable
from barchan.node.egress_session import Session
from barchan.node.egress_upstream import Dial, Resolve, SystemResolver, Upstream, dial_directly

PROXY_PORT = 3128
_SHORT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_GONE_AGAIN = frozenset({errno.EAGAIN, errno.ECONNABORTED, errno.EINTR})
_RESOURCE_WAIT_S = 0.2


class EgressLimits(Struct, frozen=True, kw_only=True):
    """Bounds of one proxy.

    Attributes:
        connections_max: At once; further ones wait in the listener's backlog, inside the sandbox.
        accepts_per_s: New connections over time, in bursts of up to a second's worth: what a guest that only opens
            connections can cost the node, in time and in events.
        head_s: For the whole request head, and for the whole TLS ClientHello.
        resolve_s: For one lookup.
        connect_s: For all addresses of a name together.
        idle_s: Without a byte in either direction; a model may think for minutes before its answer starts.
    """

    connections_max: int = 64
    accepts_per_s: int = 200
    head_s: float = 10.0
    resolve_s: float = 5.0
    connect_s: float = 10.0
    idle_s: float = 600.0


DEFAULT_LIMITS = EgressLimits()


class EgressStatistics(Struct, frozen=True, kw_only=True):
    """`connections` are open now, the rest counts since the start. An `allowed` request may count again by its end."""

    connections: int
    connections_max: int
    accepted: int
    allowed: int
    denied: int
    malformed: int
    failed: int
    bytes_up: int
    bytes_down: int


def proxy_env(host: str = "127.0.0.1") -> dict[str, str]:
    """The variables by which programs in a sandbox find its proxy; `host`: its address as they see it."""
    url = f"http://{host}:{PROXY_PORT}"
    direct = "localhost,127.0.0.1,::1"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {**dict.fromkeys(names, url), "no_proxy": direct, "NO_PROXY": direct}


class EgressProxy:
    """Serves one listener while its context is entered. It owns the listener's descriptor and closes it.

    `on_event` is called in the event loop for every request when it was judged, and again when an allowed one ends in
    an error (its tunnel asks for another name, its body is malformed, its server never answers). Should `on_event`
    fail, the proxy ends, and leaving the context raises the error.

    Raises:
        InvalidSpec: `allow` is malformed; the listener stays the caller's.
    """

    def __init__(
        self,
        listener: socket.socket,
        allow: tuple[str, ...],
        on_event: Callable[[EgressEvent], None],
        *,
        limits: EgressLimits = DEFAULT_LIMITS,
        resolve: Resolve | None = None,
        dial: Dial = dial_directly,
    ) -> None:
        self._allow = parse_allow(allow)
        self._listener = listener
        self._on_event = on_event
        self._limits = limits
        self._upstream = Upstream(
            resolve or SystemResolver(), dial, resolve_s=limits.resolve_s, connect_s=limits.connect_s
        )
        self._slots = asyncio.Semaphore(limits.connections_max)
        self._task: asyncio.Task[None] | None = None
        self._connections = self._accepted = self._bytes_up = self._bytes_down = 0
        self._outcomes: dict[Outcome, int] = {"allowed": 0, "denied": 0, "malformed": 0, "failed": 0}

    def statistics(self) -> EgressStatistics:
        """What has happened so far."""
        return EgressStatistics(
            connections=self._connections,
            connections_max=self._limits.connections_max,
            accepted=self._accepted,
            bytes_up=self._bytes_up,
            bytes_down=self._bytes_down,
            **self._outcomes,
        )

    async def __aenter__(self) -> Self:
        self._listener.setblocking(False)
        self._task = asyncio.create_task(self._serve(), name="egress")
        self._task.add_done_callback(lambda _: self._listener.close())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.result()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        earliest = 0.0
        async with asyncio.TaskGroup() as group:
            while True:
                await self._slots.acquire()
                client = await self._accept()
                group.create_task(self._connection(client))
                earliest = max(earliest, loop.time() - 1) + 1 / self._limits.accepts_per_s
                await asyncio.sleep(earliest - loop.time())

    async def _accept(self) -> socket.socket:
        while True:
            await wait_readable(self._listener)
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _SHORT_OF_RESOURCES:
                    await asyncio.sleep(_RESOURCE_WAIT_S)
                elif error.errno not in _GONE_AGAIN:
                    raise
                continue
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._accepted += 1
            return client

    async def _connection(self, client: socket.socket) -> None:
        self._connections += 1
        try:
            with client:
                await self._one_request(client)
        except OSError:
            pass  # one of the two peers broke an answered connection off, and the other sees it close
        except Exception as error:  # a task boundary: what one guest sends must not end the service
            self._tell("failed", None, f"internal error: {type(error).__name__}: {error}"[:300])
        finally:
            self._connections -= 1
            self._slots.release()

    async def _one_request(self, client: socket.socket) -> None:
        target: Target | None = None
        try:
            got = await self._read_request(client)
            if got is None:
                return
            request, early = got
            target = request.target
            if refusal := self._allow.refusal(target):
                raise Denied(refusal)
            upstream, address = await self._upstream.open(target)
        except BarchanError as error:
            await self._refuse(client, target, error, can_answer=True)
            return
        with upstream:
            self._tell("allowed", target, "", str(address))
            session = Session(
                client, upstream, head_s=self._limits.head_s, idle_s=self._limits.idle_s,
                up=self._moved_up, down=self._moved_down,
            )  # fmt: skip
            try:
                await session.run(request, early)
            except BarchanError as error:
                await self._refuse(client, target, error, can_answer=session.can_answer)

    async def _read_request(self, client: socket.socket) -> tuple[Request, bytes] | None:
        try:
            async with asyncio.timeout(self._limits.head_s):
                got = await read_head(client, HEAD_BYTES_MAX)
        except TimeoutError as error:
            raise RemoteProtocolError("the request head did not come in time", status=408) from error
        return (parse_request(got[0]), got[1]) if got else None

    async def _refuse(
        self, client: socket.socket, target: Target | None, error: BarchanError, *, can_answer: bool
    ) -> None:
        outcome: Outcome = "failed"
        status = 504 if isinstance(error, (ConnectTimeout, ReadTimeout)) else 502
        if isinstance(error, Denied):
            outcome, status = "denied", 403
        elif isinstance(error, RemoteProtocolError):
            outcome, status = "malformed", int(error.details["status"])
        self._tell(outcome, target, str(error))
        if can_answer:
            await answer_and_drain(client, own_answer(status, str(error)))

    def _tell(self, outcome: Outcome, target: Target | None, reason: str, address: str = "") -> None:
        self._outcomes[outcome] += 1
        host, port = (target.host, target.port) if target else ("", 0)
        self._on_event(EgressEvent(outcome=outcome, host=host, port=port, address=address, reason=reason))

    def _moved_up(self, size: int) -> None:
        self._bytes_up += size

    def _moved_down(self, size: int) -> None:
        self._bytes_down += size
