"""The container backend: what the node asks, said to the supervisor."""

import asyncio
import errno
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from barchan.backends.base import Capabilities, Ended, Host, Unavailability
from barchan.backends.container import probe
from barchan.backends.container.cgroup import Counters, kill, node_memory, sandbox_of, thaw
from barchan.backends.container.cut import Cutter
from barchan.backends.container.hot import FirstReads
from barchan.backends.container.layers import Layers
from barchan.backends.container.lazy import LazyReader, Unavailable
from barchan.backends.container.memory import ANSWER_SPARE_S, NETWORKS, Dumping, Memory, reseed, restoring
from barchan.backends.container.outer_ids import guest_of, is_outer
from barchan.backends.container.pager import Pager
from barchan.backends.container.resting import Resting
from barchan.backends.container.slots import ContainerSlots, keys_of
from barchan.backends.container.supervisor import BINARIES, REQUEST_TIMEOUT_S, SOCKET, Answer, SupervisorClient, spawn
from barchan.backends.container.zygote import Warming, Zygotes
from barchan.backends.guest import GuestConnection
from barchan.errors import (
    BackendError,
    BarchanError,
    BootFailed,
    ConnectionLost,
    InitDied,
    NotFound,
    RequirementMissing,
)
from barchan.image.template import Template, need_root
from barchan.model.node import Requirement
from barchan.model.sandbox import SandboxSpec, SandboxStats
from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.pager.link import PagerLink
from barchan.wire import supervisor as wire

SHM_BYTES = 64 << 20
CPU_PERIOD_US = 100_000
LAYER_DISKS_MAX = 2  # a layer of a sandbox, in sizes of its disk: parts of sparse files take more room in it
LAYER_BYTES_SPARE = 64 << 20
STARVED_S = 1.0  # for which a read waits when a program's time is over
STARVED_SHARE = 0.5  # of a program's time, in which its sandbox's reads waited
STORED_POLL_S = 0.05
END_S = 5.0  # for the supervisor to tell of an end, after the init's connection broke
STARVED_ANSWER_S = 3.0  # less than the margin that the init leaves


class ContainerHandle(Dumping, Resting, Warming):
    """One container; see `backends.base.Handle`."""

    def __init__(
        self,
        backend: "ContainerBackend",
        sandbox_id: str,
        guest: GuestConnection,
        counters: Counters,
        layer_bytes_max: int,
        pid: int,
        spec: SandboxSpec,
        template: Template,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.pid = pid
        self.spec = spec
        self.template = template
        self.guest = guest
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.listener: socket.socket | None = None
        self.proxy_host = "127.0.0.1"
        self.netns: int | None = None
        self._backend = backend
        self._counters = counters
        self._layer_bytes_max = layer_bytes_max
        self._cutting = asyncio.Lock()
        self._platform = asyncio.Lock()
        self._has_platform = False
        self._recovering: asyncio.Task[None] | None = None
        guest.on_lost = self._recover

    def _recover(self) -> None:
        self._recovering = asyncio.get_running_loop().create_task(self._reattach())

    async def _reattach(self) -> None:
        """The connection went, though the guest did not: take another one from the supervisor."""
        try:
            await self.guest.reconnect(
                self._backend.take_socket(await self._backend.request("attach", id=self.sandbox_id))
            )
        except (BarchanError, OSError, TimeoutError) as error:
            why = f"the init of {self.sandbox_id} can't be reached any more: {error}"
            self.guest.guest_gone(InitDied(why))
            await asyncio.wait({self.ended}, timeout=END_S)  # the supervisor mostly knows why
            self.tell_end(Ended(wstatus=0, oom_kills=0, why=why))  # what its counters say is not why

    async def destroy(self) -> None:
        self.guest.close()
        try:
            await self._backend.discard(self.sandbox_id)
        except (NotFound, ConnectionLost):
            pass  # destroyed before, or with its supervisor
        finally:
            self._backend.forget(self.sandbox_id)
            self.release()

    def release(self) -> None:
        """Close the descriptors; the sandbox lives on."""
        if self._recovering is not None:
            self._recovering.cancel()
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        if self.netns is not None:
            os.close(self.netns)
            self.netns = None

    async def platform_leaf(self) -> None:
        async with self._platform:
            if not self._has_platform:
                self.guest.on_lost = None  # the connection is about to be replaced: no loss
                try:
                    answer = await self._backend.request("leaf", id=self.sandbox_id)
                    await self.guest.reconnect(self._backend.take_socket(answer))
                finally:
                    self.guest.on_lost = self._recover
                self._has_platform = True

    async def pack(self, target: Path) -> None:
        cutter = await self._backend.cutter()
        await cutter.pack(self.sandbox_id, self._counters, self._cutting, target, self._layer_bytes_max)

    async def pack_cut(self, name: str, target: Path) -> None:
        await (await self._backend.cutter()).pack_cut(name, target, self._layer_bytes_max)

    async def open_in_cut(self, name: str, path: str) -> int:
        """See `Cutter.open_file`."""
        return await asyncio.to_thread((await self._backend.cutter()).open_file, name, path)

    async def remove_cut(self, name: str) -> None:
        """See `Backend.remove_cut`."""
        await self._backend.remove_cut(name)

    async def cut(self, name: str, copies: int = 0) -> None:
        cutter = await self._backend.cutter()
        await cutter.cut(self.sandbox_id, self._counters, self._cutting, name, copies)

    async def end_if_starved(self, within_s: float) -> bool:
        return await self._backend.end_if_starved(self.sandbox_id, within_s)

    def oom_kills(self) -> int:
        return self._counters.oom_kills()

    def stats(self) -> SandboxStats:
        return self._counters.stats()


class ContainerBackend:
    """Containers on this host, started by a supervisor that outlives this process."""

    capabilities = Capabilities(
        isolation="container",
        memory_by_host=True,
        fork=True,
        zygote=True,
        warm=True,
        any_image=True,
        page_out=True,
        networks=frozenset({"none", "open", "allow"}),
        roots=frozenset({"plain", "capable"}),
    )

    def __init__(self, host: Host) -> None:
        state_dir, images, reader = host.state_dir, host.images, host.reader
        self._state_dir = state_dir
        self._socket = state_dir / SOCKET
        self._name = f"n{state_dir.stat().st_ino:x}-{state_dir.stat().st_dev:x}"
        self._client: SupervisorClient | None = None
        self._handles: dict[str, ContainerHandle] = {}
        self._uses: dict[str, frozenset[str]] = {}  # layers, by digest, of each sandbox
        self._found_layers: list[str] = []
        self._cutter: Cutter | None = None
        self._cutter_lock = asyncio.Lock()
        self._cgroup = "v1"
        self.on_unavailable: Unavailability = lambda ids, cause: None
        self._lazy = LazyReader(state_dir, self.request, self._unavailable, reader)
        self.layers = Layers(images, self._lazy, self.request)
        self._first_reads = FirstReads(self._lazy, images)
        self._create_timeout_s = REQUEST_TIMEOUT_S + reader.wait_s  # its programs may have to wait for the store
        self._weaken = host.weaken
        self.slots = ContainerSlots(self.request)
        self.zygotes = Zygotes(self)
        self.memory = Memory(state_dir, BINARIES / "barchan-criu.so")
        self.pager = Pager(state_dir, lambda i: self._counters(i).guest, lambda i, why: self._say_unavailable([i], why))

    def probe(self) -> Sequence[Requirement]:
        return probe.requirements(self._state_dir)

    async def start(self) -> None:
        try:
            hello = await self._greeted()
        except (OSError, ConnectionLost):  # there is none, or it is at its end, having had no sandbox
            await self._spawn()
            hello = await self._greeted()
        if hello.number("version") != wire.VERSION:
            raise RequirementMissing(
                f"a supervisor of protocol version {hello.get('version')} is running sandboxes here, and this release "
                f"speaks {wire.VERSION}: use the release that started it, or end its sandboxes first"
            )
        self._cgroup = hello.get("cgroup")
        self.capabilities = replace(self.capabilities, memory_snapshot=await self.memory.is_possible())
        self._found_layers = await self._listed("layers", "layer")
        self.layers.adopt(self._found_layers)

    async def _greeted(self) -> wire.Message:
        self._client = SupervisorClient.connect(self._socket, self._told)
        return (await self.request("hello", version=wire.VERSION)).message

    async def _spawn(self) -> None:
        """Start a supervisor and wait until it listens."""
        missing = [
            item for item in await asyncio.to_thread(self.probe) if not item.ok and item.needed_for == "container"
        ]
        if missing:
            lines = "; ".join(f"{item.name}: {item.found} ({item.remedy})" for item in missing)
            raise RequirementMissing(f"this host can't run containers yet: {lines}")
        await spawn(self._state_dir, self._name, self._weaken)

    def adopted(self) -> None:
        self._lazy.start(self._found_layers)
        self.zygotes.adopted()
        self.memory.adopted()
        self.pager.adopted(self._handles)

    def _say_unavailable(self, ids: Sequence[str], cause: str) -> None:
        self.on_unavailable([guest_of(sandbox_id) for sandbox_id in ids], cause)

    def _unavailable(self, wanted: Unavailable) -> None:
        """First nothing of the sandbox may run again; then it is said why; then the read may fail."""
        found = sandbox_of(wanted.pid, self._name) if wanted.pid else None
        if found is not None:
            ids = [found]
        elif wanted.pid:
            ids = []  # a process of the host, or one that is gone: it belongs to no sandbox
        else:
            ids = [sandbox_id for sandbox_id, layers in self._uses.items() if wanted.layer in layers]
        for sandbox_id in ids:
            kill(self._counters(sandbox_id).guest)
        self._say_unavailable(ids, f"layer {wanted.layer[:12]}: {wanted.cause}")

    async def end_if_starved(self, sandbox_id: str, within_s: float) -> bool:
        """See `Handle.end_if_starved`."""
        if not self.layers.any_lazy(self._uses.get(sandbox_id, ())):
            return False
        try:
            async with asyncio.timeout(STARVED_ANSWER_S):
                waited_s, waiting_s = await self._lazy.waited(f"/barchan/{self._name}/{sandbox_id}", within_s)
        except (BarchanError, TimeoutError):  # then reads are not answered, either
            waited_s = waiting_s = within_s
        if waiting_s < STARVED_S and waited_s < STARVED_SHARE * within_s:
            return False
        kill(self._counters(sandbox_id).guest)
        waited_s = max(waited_s, waiting_s)
        self._say_unavailable([sandbox_id], f"its reads have waited {waited_s:.1f} s of {within_s:g} s for their store")
        return True

    async def create(
        self, sandbox_id: str, spec: SandboxSpec, template: Template, *, cut: str | None = None
    ) -> ContainerHandle:
        need_root(template, spec.backend)
        return await self.zygotes.create(self._start, sandbox_id, spec, template, cut)

    async def restore(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        template: Template,
        memory: Path,
        record: MemoryRecord,
        *,
        cut: str | None,
        pager: PagerLink | None = None,
    ) -> ContainerHandle:
        async with restoring(self.memory, memory, record, pager) as (keys, job):
            handle = await self._start("restore", sandbox_id, spec, template, cut, keys, fds=(job,))
        try:
            await reseed(handle.guest)
        except BaseException:
            await asyncio.shield(handle.destroy())
            raise
        return handle

    async def _start(
        self,
        op: str,
        sandbox_id: str,
        spec: SandboxSpec,
        template: Template,
        cut: str | None,
        more: dict[str, str | int],
        fds: Sequence[int] = (),
    ) -> ContainerHandle:
        """Ask the supervisor for a sandbox, new or restored, and greet its init."""
        above: dict[str, Any] = more if cut is None else {**more, "cut": cut}
        async with self.layers.mounted(template.layers) as fresh:
            self._first_reads.begin(template, fresh)
            request = asyncio.create_task(
                self.slots.start(
                    op,
                    fds=fds,
                    timeout_s=max(self._create_timeout_s, ANSWER_SPARE_S + int(more.get("seconds", 0))),
                    id=sandbox_id,
                    layers=":".join(layer.digest for layer in template.layers),
                    network=NETWORKS[spec.network],
                    **keys_of(spec, CPU_PERIOD_US, SHM_BYTES),
                    **above,
                )
            )
            self._uses[sandbox_id] = _digests(template)
            try:
                return await self._take(sandbox_id, await asyncio.shield(request), spec, template)
            except BaseException:
                await asyncio.shield(self._abandon(sandbox_id, request))
                raise

    async def _abandon(self, sandbox_id: str, request: "asyncio.Task[Answer]") -> None:
        """Remove what a failed or cancelled create made, once the supervisor has answered."""
        self.forget(sandbox_id)
        try:
            (await request).close()
        except BootFailed:
            return  # the supervisor removed it
        except BackendError:
            pass  # no answer in time: it may come to be yet
        try:
            await self.discard(sandbox_id)
        except NotFound:
            pass  # it never was

    async def adopt(self, sandbox_id: str, spec: SandboxSpec, template: Template) -> ContainerHandle:
        self._uses[sandbox_id] = _digests(template)
        self.zygotes.adopt(sandbox_id, spec, template)
        thaw(self._counters(sandbox_id).guest)  # the node before may have died in the middle of a cut
        answer = await self._attach_when_stored(sandbox_id)
        thaw(os.path.dirname(self._counters(sandbox_id).guest))  # or of a dump
        return await self._take(sandbox_id, answer, spec, template)

    async def _attach_when_stored(self, sandbox_id: str) -> Answer:
        """What an earlier node asked CRIU for goes on without it."""
        while True:
            try:
                return await self.request("attach", id=sandbox_id)
            except BackendError as error:
                if error.details.get("errno") != errno.EBUSY:
                    raise
                await asyncio.sleep(STORED_POLL_S)

    def _counters(self, sandbox_id: str) -> Counters:
        return Counters(self._name, sandbox_id, self._cgroup)

    async def _take(self, sandbox_id: str, answer: Answer, spec: SandboxSpec, template: Template) -> ContainerHandle:
        """Make a handle of the supervisor's answer: connection, pidfd and, for a network, a third descriptor."""
        sock, network_fd = answer.take_connection()
        try:
            guest = await GuestConnection.open(sock)
        except (OSError, TimeoutError, ConnectionLost) as error:
            if network_fd is not None:
                os.close(network_fd)
            raise BootFailed(f"the init of {sandbox_id} does not answer: {error}") from error
        layer_bytes_max = LAYER_DISKS_MAX * (spec.disk_mib << 20) + LAYER_BYTES_SPARE
        handle = ContainerHandle(
            *(self, sandbox_id, guest, self._counters(sandbox_id), layer_bytes_max),
            *(answer.message.number("pid"), spec, template),
        )
        if network_fd is not None and spec.network == "open":
            handle.netns = network_fd
        elif network_fd is not None:
            handle.listener = socket.socket(fileno=network_fd)
        self._handles[sandbox_id] = handle
        return handle

    @staticmethod
    def take_socket(answer: Answer) -> socket.socket:
        """The connection of an answer, whose other descriptors are closed."""
        sock, _ = answer.take_connection()
        return sock

    async def unmount(self, digests: Iterable[str] | None = None) -> None:
        await self.layers.unmount(digests)

    async def remove_cut(self, name: str) -> None:
        await (await self.cutter()).remove(name)

    async def cutter(self) -> Cutter:
        """Made on first use."""
        async with self._cutter_lock:
            if self._cutter is None:
                answer = await self.request("pool")
                if len(answer.fds) != 2:
                    answer.close()
                    raise BackendError("the supervisor did not hand its pool over")
                self._cutter = Cutter(answer.fds[0], answer.fds[1], BINARIES / "barchan-pack")
            return self._cutter

    async def found(self) -> list[str]:
        return self.zygotes.found([sandbox_id for sandbox_id in await self.found_all() if not is_outer(sandbox_id)])

    async def found_all(self) -> list[str]:
        """Ids of all that are alive, those that hold a guest of another backend and those of zygotes, too."""
        return [value.split(":", 1)[0] for value in await self._listed("list", "sandbox")]

    async def _listed(self, op: str, key: str) -> list[str]:
        """The values of every page of a list."""
        found: list[str] = []
        at = 0
        while True:
            keys: dict[str, Any] = {"from": at}
            page = (await self.request(op, **keys)).message
            found += [value for name, value in page.pairs if name == key]
            at = page.number("next", 0)
            if not at:
                return found

    async def discard(self, sandbox_id: str) -> None:
        (await self.request("destroy", id=sandbox_id)).close()
        if not self.layers.unwanted:
            return
        try:
            await self.layers.unmount(tuple(self.layers.unwanted))
        except BarchanError as error:  # the sandbox is gone all the same, and every minute they are asked for again
            asyncio.get_running_loop().call_exception_handler(
                {"message": "unmounting the layers of removed images failed", "exception": error}
            )

    def forget(self, sandbox_id: str) -> None:
        self._handles.pop(sandbox_id, None)
        self._uses.pop(sandbox_id, None)
        self.zygotes.left(sandbox_id)

    async def request(
        self, op: str, *, fds: Sequence[int] = (), timeout_s: float = REQUEST_TIMEOUT_S, **keys: str | int
    ) -> Answer:
        if self._client is None:
            raise BackendError("the container backend is not started")
        return await self._client.request(op, fds=fds, timeout_s=timeout_s, **keys)

    def memory_use(self) -> tuple[int, int]:
        return node_memory(self._name, self._cgroup)

    async def lost(self) -> None:
        if self._client is not None:
            await asyncio.shield(self._client.lost)

    def _told(self, message: wire.Message) -> None:
        """A slot is ready or gone, or a guest ended on its own."""
        if message.word == "slot":
            return self.slots.hear(message)
        sandbox_id, wstatus = message.get("id"), message.number("wstatus")
        oom_kills = message.number("oom_kills", 0)
        handle = self._handles.get(sandbox_id)
        if handle is not None:
            handle.tell_end(Ended(wstatus=wstatus, oom_kills=oom_kills))

    async def close(self) -> None:
        await self.zygotes.close()
        await self.pager.close()
        await self._close_cutter()
        await self.layers.close()
        await self._first_reads.close()
        await self._lazy.close()
        for handle in list(self._handles.values()):
            handle.guest.close()
            handle.release()
        if self._client is not None:
            self._client.close()

    async def _close_cutter(self) -> None:
        cutter, self._cutter = self._cutter, None
        if cutter is not None:
            await cutter.close()

    async def shutdown(self) -> None:
        await self._close_cutter()  # or the pool would outlive the supervisor
        await self.layers.close()
        await self._first_reads.close()
        await self._lazy.close()  # or it would want another reader when the supervisor lets go of the first
        (await self.request("shutdown")).close()
        self._lazy.removed()
        await self.pager.shutdown()
        await self.close()


def _digests(template: Template) -> frozenset[str]:
    return frozenset(layer.digest for layer in template.layers)
