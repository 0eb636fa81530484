"""The way out of the node: names to addresses, and a connection to exactly the address that was judged."""

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence

from barchan.core.egress import Address, Target, address_refusal, reachable
from barchan.errors import ConnectionLost, ConnectTimeout, Denied

Resolve = Callable[[str, int], Awaitable[Sequence[Address]]]
Dial = Callable[[Address, int], Awaitable[socket.socket]]

LOOKUPS_MAX = 8
ADDRESSES_MAX = 8


class SystemResolver:
    """The host's own resolver (files, DNS), a thread per lookup.

    A lookup can't be interrupted, so one that was given up keeps its place among `lookups_max` until it really ends:
    a guest that asks for slow names waits behind itself, and takes no threads from other sandboxes.
    """

    def __init__(self, lookups_max: int = LOOKUPS_MAX) -> None:
        self._slots = asyncio.Semaphore(lookups_max)

    async def __call__(self, host: str, port: int) -> list[Address]:
        """Look `host` up.

        Raises:
            OSError: It has no address, the resolver failed, or there is no thread to be had.
        """
        loop = asyncio.get_running_loop()
        await self._slots.acquire()
        answer: asyncio.Future[list[Address]] = loop.create_future()

        def deliver(result: list[Address] | OSError) -> None:
            self._slots.release()
            if answer.done():
                return
            if isinstance(result, OSError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def work() -> None:
            result: list[Address] | OSError
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                result = [ipaddress.ip_address(info[4][0]) for info in found]
            except OSError as error:
                result = error
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                loop.call_soon_threadsafe(deliver, result)

        try:
            threading.Thread(target=work, name="egress-lookup", daemon=True).start()
        except RuntimeError as error:
            self._slots.release()
            raise OSError(errno.EAGAIN, "no thread for a lookup") from error
        return await answer


async def dial_directly(address: Address, port: int) -> socket.socket:
    """Connect to an address. The caller owns the socket; cancelling leaves none."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock


class Upstream:
    """Finds and opens the connection for an allowed target."""

    def __init__(self, resolve: Resolve, dial: Dial, *, resolve_s: float, connect_s: float) -> None:
        self._resolve = resolve
        self._dial = dial
        self._resolve_s = resolve_s
        self._connect_s = connect_s

    async def open(self, target: Target) -> tuple[socket.socket, Address]:
        """Connect to `target`, which the allow list has passed; the addresses behind a name are judged here.

        Raises:
            Denied: The name leads only to addresses that names may not lead to.
            ConnectTimeout: No answer in time, from the resolver or from any address.
            ConnectionLost: The resolver or every address refused.
        """
        if target.address is not None:
            return await self._first([target.address], target)
        found = await self._lookup(target)
        sock, address = await self._first(found, target)
        if sock.getsockname()[0] == str(address):  # an address is its own source only on the host itself
            sock.close()
            raise Denied(f"{target.host} leads to this host itself")
        return sock, address

    async def _lookup(self, target: Target) -> list[Address]:
        try:
            async with asyncio.timeout(self._resolve_s):
                found = await self._resolve(target.host, target.port)
        except TimeoutError as error:
            raise ConnectTimeout(f"no answer for {target.host} from the resolver in {self._resolve_s:g} s") from error
        except OSError as error:
            raise ConnectionLost(f"{target.host} does not resolve: {error.strerror or error}") from error
        if not found:
            raise ConnectionLost(f"{target.host} has no address")
        good = reachable(found)
        if not good:
            raise Denied(f"{target.host} leads to {found[0]} ({address_refusal(found[0])})")
        return good[:ADDRESSES_MAX]

    async def _first(self, addresses: Sequence[Address], target: Target) -> tuple[socket.socket, Address]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connect_s
        last: OSError | None = None
        for index, address in enumerate(addresses):
            share = (deadline - loop.time()) / (len(addresses) - index)
            try:
                async with asyncio.timeout(share):
                    return await self._dial(address, target.port), address
            except OSError as error:  # TimeoutError is one
                last = error
        if isinstance(last, TimeoutError):
            raise ConnectTimeout(f"{target} did not answer in {self._connect_s:g} s") from last
        why = os.strerror(last.errno) if last and last.errno else str(last)  # the event loops word it each in their way
        raise ConnectionLost(f"{target} is not reachable: {why}") from last
