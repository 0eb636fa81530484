"""The node's side of the pager: the process that gives restored sandboxes their memory (`barchan.snapshot.pager`).

It is started on first use and kept warm. A sandbox whose memory was still coming in when its pager died is ended: by
the node, which records why, and by the pager's keeper, whatever the node does. docs/formats/pager-protocol.md says how.
"""

import asyncio
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from barchan.backends.container import background
from barchan.backends.container.cgroup import kill
from barchan.backends.container.supervisor import SupervisorClient
from barchan.errors import BackendError, BarchanError, ConnectionLost, RequirementMissing, from_wire
from barchan.snapshot.pager.link import PagerLink, Placed
from barchan.snapshot.shelf import FOLDER
from barchan.wire import supervisor as wire

VERSION = 1
LAST_WAIT_S = 20.0
LOOK_S = 5.0
"""How often a pager that has work is asked whether it still does it."""
ANSWER_S = 30.0
"""One that does not answer for so long is killed: sandboxes may be waiting for it."""
_DEVICE = Path("/dev/userfaultfd")
_UNPRIVILEGED = Path("/proc/sys/vm/unprivileged_userfaultfd")
_CREDENTIALS = struct.Struct("iII")


class Pager:
    """Starts the pager when it is wanted, and knows which sandboxes lack pages.

    Args:
        state_dir: The node's; holds the pager's directory and log, and the snapshots.
        guest_of: The directory of the group, of the version 2 hierarchy, that holds a sandbox's guest, by its id.
        on_unavailable: Told once of a sandbox, by id, whose memory can't be had, and why; it was killed just before.
    """

    def __init__(
        self, state_dir: Path, guest_of: Callable[[str], str], on_unavailable: Callable[[str, str], None]
    ) -> None:
        self._root = state_dir / "pager"
        self._log = state_dir / "pager.log"
        self._socket = self._root / "pager.sock"
        self._shelf = state_dir / FOLDER
        self._guest_of = guest_of
        self._on_unavailable = on_unavailable
        self._links: dict[str, PagerLink] = {}
        self._client: SupervisorClient | None = None
        self._pidfd = -1
        self._connecting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._taking_over: asyncio.Task[None] | None = None

    def adopted(self, sandbox_ids: Collection[str]) -> None:
        """Take over the pager of a node before this one, and those of the node's sandboxes that it serves; none is
        started. What else it serves is of restores that ended with that node, and may have to begin anew.
        """
        self._taking_over = self._spawn_task(self._take_over(frozenset(sandbox_ids)))

    async def _take_over(self, sandbox_ids: frozenset[str]) -> None:
        async with self._connecting:
            if self._client is None:
                with suppress(OSError, ConnectionLost):
                    self._client = client = await self._open()
                    for sandbox_id in self._links.keys() - sandbox_ids:
                        self._links.pop(sandbox_id).placed.cancel()
                        (await client.request("drop", id=sandbox_id)).close()

    async def start(self) -> None:
        """Have a pager ready, so that the first restore need not wait for it.

        Raises:
            RequirementMissing: It can't be started.
        """
        await self._connected()

    def link(self, sandbox_id: str) -> PagerLink | None:
        """Of a sandbox whose memory is not complete."""
        return self._links.get(sandbox_id)

    async def known_link(self, sandbox_id: str) -> PagerLink | None:
        """As `link`, once it is known what a pager of an earlier node serves."""
        await self._taken_over()
        return self.link(sandbox_id)

    async def _taken_over(self) -> None:
        if self._taking_over is not None:
            await asyncio.wait({self._taking_over})

    async def serve(self, sandbox_id: str, snapshot_id: str) -> PagerLink:
        """Have a sandbox's memory given to it as it is restored. Its control group must be there when CRIU comes.

        Raises:
            SnapshotCorrupt, NotFound: The snapshot can't be used.
            CapacityError: Too much is being restored. ConnectionLost: Pagers die one after the other.
            RequirementMissing: The pager can't be started, or the kernel lacks what it needs.
        """
        if not _has_userfaultfd():
            raise RequirementMissing(f"memory on demand needs {_DEVICE} (Linux 6.1), or vm.unprivileged_userfaultfd=1")
        keys = {"id": sandbox_id, "snapshot": snapshot_id, "group": os.path.dirname(self._guest_of(sandbox_id))}
        client = await self._connected()
        try:
            message = await self._request("serve", **keys)
        except ConnectionLost:  # it was killed, or ends when it is done with what it has
            await asyncio.wait({client.lost}, timeout=LAST_WAIT_S)
            message = await self._request("serve", **keys)
        return self._new_link(sandbox_id, Path(message.get("directory")))

    async def close(self) -> None:
        """Let go; the pager goes on with what it has begun."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._disconnect()
        for link in self._links.values():
            link.placed.cancel()
        self._links.clear()

    async def shutdown(self) -> None:
        """When no sandbox is left: the pager ends."""
        async with self._connecting:
            with suppress(OSError, ConnectionLost):  # there is none
                self._client = self._client or await self._open()
                (await self._client.request("shutdown")).close()
            self._links.clear()
            self._disconnect()

    def _new_link(self, sandbox_id: str, directory: Path) -> PagerLink:
        link = self._links[sandbox_id] = PagerLink(sandbox_id, directory, lambda: self._drop(sandbox_id))
        if self._looking is None or self._looking.done():
            self._looking = self._spawn_task(self._look())
        return link

    async def _look(self) -> None:
        """As long as it has work."""
        while self._links:
            await asyncio.sleep(LOOK_S)
            client, pidfd = self._client, self._pidfd
            if client is None:
                return
            try:
                (await client.request("status", timeout_s=ANSWER_S)).close()
            except ConnectionLost:
                return
            except BackendError:
                if client is self._client:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    async def _drop(self, sandbox_id: str) -> None:
        if sandbox_id in self._links:
            with suppress(ConnectionLost):  # then its keeper ends what there is
                await self._request("drop", id=sandbox_id)
            self._links.pop(sandbox_id, None)

    async def _request(self, op: str, **keys: Any) -> wire.Message:
        answer = await (await self._connected()).request(op, **keys)
        answer.close()
        return answer.message

    # the process and the connection to it

    async def _connected(self) -> SupervisorClient:
        await self._taken_over()
        async with self._connecting:
            if self._client is None:
                try:
                    self._client = await self._open()
                except (OSError, ConnectionLost):  # there is none, or it is just ending
                    await self._spawn()
                    self._client = await self._open()
            return self._client

    async def _open(self) -> SupervisorClient:
        """Connect to a live pager, and take over what it serves. OSError: there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        pidfd = -1
        try:
            sock.connect(os.fspath(self._socket))
            pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.geteuid():
                raise BackendError(f"the pager's socket {self._socket} belongs to user {uid}")
            pidfd = os.pidfd_open(pid)
            if select.select([pidfd], [], [], 0)[0]:
                raise ProcessLookupError("the pager is dead: its keeper still holds the socket")
            client = SupervisorClient(sock, self._event, "pager", _failure)
        except BaseException:
            sock.close()
            if pidfd >= 0:
                os.close(pidfd)
            raise
        try:
            (await client.request("hello", version=VERSION)).close()
            answer = await client.request("status")
        except BaseException:
            client.close()
            os.close(pidfd)
            raise
        for sandbox_id in filter(None, answer.message.get("ids").split(",")):
            self._new_link(sandbox_id, self._root / sandbox_id)
        self._pidfd = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._gone, client)
        client.lost.add_done_callback(lambda _: self._gone(client))
        return client

    async def _spawn(self) -> None:
        """Start a pager and wait until it listens."""
        with self._log.open("ab") as log:
            line = await background.start(
                (sys.executable, "-m", "barchan.snapshot.pager", "--dir", self._root, "--shelf", self._shelf), log
            )
        if line != "ready":
            raise RequirementMissing(f"the pager of restored memory did not start: {line}; see {self._log}")

    def _gone(self, client: SupervisorClient) -> None:
        """The pager is dead, or let go of us: no sandbox that lacks pages may go on."""
        if client is not self._client:
            return
        self._disconnect()
        links, self._links = self._links, {}
        for sandbox_id, link in links.items():
            self._fail(link, BackendError(f"the pager died before the memory of sandbox {sandbox_id} was in place"))
            self._tell(sandbox_id, "the process that gives it its memory died")

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            client.close()

    # what it tells

    def _event(self, message: wire.Message) -> None:
        sandbox_id = message.get("id")
        if message.word == "failed":
            self._failed(sandbox_id, message)
        elif (link := self._links.pop(sandbox_id, None)) is None:
            return
        elif message.word == "placed":
            link.placed.set_result(
                Placed(
                    faults=message.number("faults"),
                    faulted_bytes=message.number("faulted_bytes"),
                    streamed_bytes=message.number("streamed_bytes"),
                    elapsed_ms=message.number("elapsed_ms"),
                )
            )
        else:
            self._fail(link, _error(message))

    def _failed(self, sandbox_id: str, message: wire.Message) -> None:
        if (link := self._links.pop(sandbox_id, None)) is not None:
            self._fail(link, _error(message))
        self._tell(sandbox_id, message.get("cause"))
        self._spawn_task(self._acknowledge(sandbox_id))

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell(self, sandbox_id: str, cause: str) -> None:
        """First nothing of the sandbox may run again, then it is said why."""
        kill(self._guest_of(sandbox_id))
        self._on_unavailable(sandbox_id, f"its memory: {cause}")

    async def _acknowledge(self, sandbox_id: str) -> None:
        with suppress(ConnectionLost):  # the sandbox is ended without us
            await self._request("ended", id=sandbox_id)

    def _fail(self, link: PagerLink, error: BarchanError) -> None:
        if not link.placed.done():
            link.placed.set_exception(error)
            link.placed.exception()  # somebody may wait for it, or nobody


def _has_userfaultfd() -> bool:
    """Whether CRIU can make one for a sandbox's process: through the device, or the process itself may."""
    return _DEVICE.exists() or (_UNPRIVILEGED.exists() and _UNPRIVILEGED.read_text().strip() == "1")


def _error(message: wire.Message) -> BarchanError:
    return from_wire(message.get("code"), message.get("cause"), {})


def _failure(op: str, message: wire.Message) -> Exception:
    code, number = message.get("stage", "?"), message.number("errno", 0)
    text = message.get("message", "") or os.strerror(number)
    return from_wire(code, f"the pager failed at {op}: {text}", {"errno": number} if number else {})
