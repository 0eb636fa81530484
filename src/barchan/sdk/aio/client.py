"""The way to a node: create, find and end sandboxes."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from msgspec.structs import replace

from barchan.errors import BarchanError, Conflict, ReadTimeout
from barchan.model.fork import ForkKind
from barchan.model.gc import GcReport, GcRequest
from barchan.model.image import NameRequest, Rebased, RebaseRequest
from barchan.model.node import Budget, ImageInfo, Killed, LayerInfo, NodeInfo
from barchan.model.pool import PoolInfo, PoolRequest
from barchan.model.sandbox import SandboxInfo, SandboxSpec
from barchan.model.tiers import Waiting
from barchan.sdk.aio.calls import AsyncCalling
from barchan.sdk.aio.runs import RunCalls
from barchan.sdk.aio.sandbox import AsyncSandbox, made_under
from barchan.sdk.aio.snapshot import AsyncSnapshot, spec_of
from barchan.sdk.aio.state import StateCalls
from barchan.sdk.cancel import clean_up, forget_error
from barchan.sdk.checks import check_count, check_seconds, checked_labels
from barchan.sdk.embedded import ensure_node
from barchan.sdk.endpoint import Endpoint, checked_token, endpoint_of, remember_token, token_of
from barchan.sdk.lease import Lease
from barchan.sdk.options import CreateOptions, sandbox_spec, zygote_spec
from barchan.sdk.recipe import Recipe
from barchan.sdk.transport import Call, Transport, encode, records

if TYPE_CHECKING:
    from barchan.rollout.run import AsyncRun
    from barchan.sdk.aio.prepared import AsyncPrepared
    from barchan.sdk.template import AsyncTemplateBuilder

NODE_INFO = Call("node_info", NodeInfo)
POOL = Call("pool", PoolInfo)
POOL_SET = Call("pool_set", PoolInfo)
IMAGES = Call("image_list", list[ImageInfo])
IMAGE = Call("image", ImageInfo)
IMAGE_REMOVE = Call("image_remove", ImageInfo)
IMAGE_GC = Call("image_gc", GcReport)
LAYERS = Call("layer_list", list[LayerInfo])
IMAGE_NAME = Call("image_name", ImageInfo)
IMAGE_REBASE = Call("image_rebase", Rebased)
CREATE = Call("create", SandboxInfo)
LIST = Call("list", list[SandboxInfo])
KILL_MANY = Call("kill_many", Killed)

CREATE_TIMEOUT_S = 120.0  # after which a node is asked for how long its backend may take
CREATE_TIMEOUT_S_MAX = 3600.0
_CREATING_MAX = 64  # at once, of one create_many; the node has bounds of its own
_KILL_TIMEOUT_S = 120.0
_IMAGE_TIMEOUT_S = 120.0  # the node may have to ask its blob store
_GC_TIMEOUT_S = 600.0  # a layer may be a whole tree of files
_REBASE_QUIET_S = 600.0  # while large images are looked into


class AsyncClient(StateCalls, RunCalls, AsyncCalling):
    """A connection to one node, made by `connect_async()`; closing it ends the sandboxes it made, but detached ones."""

    def __init__(
        self,
        endpoint: Endpoint,
        token: str | None = None,
        *,
        transport: Transport | None = None,
        lease: Lease | None = None,
    ) -> None:
        """Not called by users. `transport` and `lease` are those of another client, shared with it."""
        self.endpoint = endpoint
        self._transport = transport or Transport(endpoint, token)
        self._lease = lease or Lease(self._transport)
        self._pools: set[AsyncPrepared] = set()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.endpoint)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (self.endpoint,)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End this client's lease, and with it every sandbox it has created and not detached; then the connections."""
        try:
            for pool in list(self._pools):
                await pool.stop()
            await self._lease.end()
        finally:
            await self._end_calls()
            await self._transport.close()

    async def create(
        self,
        template: str | SandboxSpec | AsyncSnapshot,
        *,
        timeout_s: float | None = None,
        **options: Unpack[CreateOptions],
    ) -> AsyncSandbox:
        """Start a sandbox, of an image or of a snapshot. Repeating it with the same `create_id` gives the same sandbox.

        If this is cancelled or times out, the half-made sandbox is gone before that is seen.

        Args:
            timeout_s: None: as long as the backend may take, a first boot with it (`node_info().start_s_max`).

        Raises:
            CapacityError: The node has no room now; `details["retry_after_ms"]` says when to ask again.
        """
        check_seconds(timeout_s=timeout_s)
        spec = sandbox_spec(spec_of(template) if isinstance(template, AsyncSnapshot) else template, options)
        if not spec.detach and spec.lease_id is None:
            spec = replace(spec, lease_id=await self._lease.ensure())
        bound_s = CREATE_TIMEOUT_S_MAX if timeout_s is None else timeout_s
        task = asyncio.ensure_future(self._transport.value(CREATE, CREATE.target(), encode(spec), timeout_s=bound_s))
        try:
            if timeout_s is None:
                await self._wait_created(task, spec.backend)
            info = await asyncio.shield(task)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError | ReadTimeout) or not task.done():
                await clean_up(error, self._end_created(task, spec), f"sandbox of create_id {spec.create_id} may live")
            raise
        return made_under(self._transport, info, spec.lease_id)

    async def _wait_created(self, task: "asyncio.Task[SandboxInfo]", backend: str) -> None:
        """Wait until a create is answered. Raises `ReadTimeout`: it took longer than its backend ever takes."""
        if (await asyncio.wait({task}, timeout=CREATE_TIMEOUT_S))[0]:
            return
        known = (await self.node_info()).start_s_max
        bound_s = max(CREATE_TIMEOUT_S, known.get(backend, max(known.values(), default=0.0)))  # `auto`: one of them
        if not (await asyncio.wait({task}, timeout=bound_s - CREATE_TIMEOUT_S))[0]:
            raise ReadTimeout(f"the node has not made the sandbox in {bound_s:g} s, in which {backend} should be there")

    async def _end_created(self, task: "asyncio.Task[SandboxInfo]", spec: SandboxSpec) -> None:
        """End it until the call is over: before, the node may not have seen it yet, and would start what was ended."""
        target = KILL_MANY.target({"create_id": spec.create_id})
        delay_s, is_over = 0.02, False
        try:
            while not is_over:
                is_over = task.done()
                try:
                    await self._transport.value(KILL_MANY, target)
                except BarchanError:
                    if is_over:
                        raise
                await asyncio.wait({task}, timeout=delay_s)
                delay_s = min(2 * delay_s, 0.5)
        finally:
            task.cancel()
            task.add_done_callback(forget_error)

    async def create_many(
        self,
        template: str | SandboxSpec | AsyncSnapshot,
        *,
        n: int,
        timeout_s: float | None = None,
        **options: Unpack[CreateOptions],
    ) -> AsyncGenerator[AsyncSandbox | BarchanError, None]:
        """Start `n` sandboxes alike, and give each as it is ready, or the error that its start ended in.

        Leaving the iteration early ends those that were not given yet: at once with `contextlib.aclosing`, else when
        the event loop has disposed of it. With a `create_id`, the sandboxes are its `-0`, `-1`, ... and repeating finds
        them.
        """
        check_seconds(timeout_s=timeout_s)
        check_count(n=n)
        spec = sandbox_spec(spec_of(template) if isinstance(template, AsyncSnapshot) else template, options)
        turns = asyncio.Semaphore(_CREATING_MAX)

        async def one(index: int) -> AsyncSandbox | BarchanError:
            async with turns:
                try:
                    return await self.create(replace(spec, create_id=f"{spec.create_id}-{index}"), timeout_s=timeout_s)
                except BarchanError as error:
                    return error

        pending = {asyncio.ensure_future(one(index)) for index in range(n)}
        ready: list[asyncio.Task[AsyncSandbox | BarchanError]] = []
        try:
            while pending or ready:
                if not ready:
                    done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                    ready += done
                yield ready.pop().result()
        except BaseException as error:
            await clean_up(error, _end_all(pending, ready), "sandboxes of this create_many may live")
            raise

    async def prepare(
        self,
        template: str | SandboxSpec | AsyncSnapshot,
        *,
        count: int,
        kind: ForkKind = "fs",
        timeout_s: float | None = None,
        **options: Unpack[CreateOptions],
    ) -> "AsyncPrepared":
        """Run a set-up once, and keep sandboxes ready that have it behind them: `await pool.create()` gives them out.

        They are forks of the one that ran it, paused; the pool is filled up in the background. If what they are forked
        from ends, the set-up is run again.

        Args:
            count: How many to keep ready.
            kind: What they have of it, as for `sandbox.fork()`: its files, or also the processes that it has left.
            timeout_s: Of the create with the set-up; the script itself has `setup_timeout_s`.
            options: As for `create`, and `setup` among them. `ttl_s` of each stands still while it waits.

        Raises:
            SetupFailed: The script has failed; the message has the end of its output.
        """
        from barchan.sdk.aio.prepared import AsyncPrepared  # which few programs need

        given = spec_of(template) if isinstance(template, AsyncSnapshot) else template
        start = partial(self.create, timeout_s=timeout_s)
        pool = AsyncPrepared(start, sandbox_spec(given, options), count, kind, self._pools.discard)
        self._pools.add(pool)
        try:
            await pool.open()
        except BaseException:
            self._pools.discard(pool)
            raise
        return pool

    def run(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        priority: int = 0,
        budget: Budget | None = None,
        grace_s: float = 10.0,
        out: str | os.PathLike[str] | None = None,
        template: str = "debian",
        backend: str = "container",
        memory_mib: int = 512,
        pids_max: int = 128,
        capacity_wait_s: float = 300.0,
        snapshot_every: int = 0,
        breaker: float = 0.5,
        waiting: Waiting | None = None,
        attach: bool = False,
    ) -> "AsyncRun":
        """A run to enter: groups of rollouts under a lease of its own.

        Args:
            name: The same in every process that takes part in the run.
            labels: Of every sandbox of the run, beside `run=NAME`.
            priority: From -100 to 100; where sandboxes have to wait for their start, higher ones go first.
            budget: What this process's sandboxes may use, all together.
            grace_s: How long they live after this process was killed.
            out: A folder for logs and results; without one, nothing is known of a rollout that its process has not.
            template: The image of tasks that bring none, as are `memory_mib` and `pids_max`.
            backend: What the sandboxes of agents and graders are made by.
            capacity_wait_s: How long a rollout waits, in total, for room on the node; then it is void.
            waiting: What the node may do by itself with the run's sandboxes while nobody asks anything of them.
            snapshot_every: Turns from one snapshot of an agent's sandbox to the next, from which a rollout goes on
                where its sandbox is lost; 0: none. The same in every process that takes part.
            breaker: Begin no more groups (`RunStopped`) once this share of the latest rollouts of this process are
                void, of more than one task. 0: never.
            attach: Take part in a run that is in its folder already, whoever began it; `NotFound` if there is none.
        """
        from barchan.rollout.run import run_of  # the only way down from a client to what is built on it

        return run_of(
            self,
            self._transport,
            name,
            labels=labels,
            priority=priority,
            budget=budget,
            grace_s=grace_s,
            out=out,
            template=template,
            backend=backend,
            memory_mib=memory_mib,
            pids_max=pids_max,
            capacity_wait_s=capacity_wait_s,
            snapshot_every=snapshot_every,
            breaker=breaker,
            waiting=waiting,
            attach=attach,
        )

    async def attach(self, sandbox_id: str) -> AsyncSandbox:
        """A handle on a sandbox that exists, whoever made it.

        Raises:
            NotFound: The node has no such sandbox.
        """
        sandbox = AsyncSandbox(self._transport, sandbox_id)
        await sandbox.info()
        return sandbox

    async def images(self) -> list[ImageInfo]:
        """The templates that the node can start."""
        return await self._transport.value(IMAGES, IMAGES.target())

    async def image(self, name: str) -> ImageInfo:
        """One image, by its name or digest; what the node does not have, it has from its blob store.

        Raises:
            NotFound: There is none.
            BlobUnavailable: It is not on the node, and the store can't be asked.
        """
        return await self._transport.value(IMAGE, IMAGE.target(name=name), timeout_s=_IMAGE_TIMEOUT_S)

    async def remove_image(self, name: str) -> ImageInfo:
        """Forget an image, by its name or digest. Sandboxes that run keep their files.

        Raises:
            NotFound: The node has no such image.
        """
        return await self._transport.value(IMAGE_REMOVE, IMAGE_REMOVE.target(name=name), resend=False)

    async def collect_images(
        self, *, unused_for_s: float | None = None, keep_bytes: int | None = None, dry_run: bool = False
    ) -> GcReport:
        """Make room on the node's disk: layers that no image names go, and the images that are asked for.

        What a live sandbox was made of stays, so does the base of an image that stays, and what was made or used within
        the last two minutes.

        Args:
            unused_for_s: Images from which no sandbox started for this long.
            keep_bytes: Images until the others' layers take at most this; those that builds made for themselves first,
                then those used longest ago.
            dry_run: Say what would go, and remove nothing.
        """
        asked = GcRequest(unused_for_s=unused_for_s, keep_bytes=keep_bytes, dry_run=dry_run)
        return await self._transport.value(IMAGE_GC, IMAGE_GC.target(), encode(asked), timeout_s=_GC_TIMEOUT_S)

    async def layers(self) -> "list[LayerInfo]":
        """The layers of the node's images, and how much of each is on its disk."""
        return await self._transport.value(LAYERS, LAYERS.target())

    async def name_image(self, image: str, name: str) -> ImageInfo:
        """Give an image, found by its name or digest, one more name; an image that has it gives way.

        Raises:
            NotFound: The node has no such image.
        """
        return await self._transport.value(IMAGE_NAME, IMAGE_NAME.target(), encode(NameRequest(image=image, name=name)))

    async def rebase(
        self,
        old: str,
        new: str,
        *,
        names: Sequence[str] = (),
        progress: Callable[[Rebased], None] | None = None,
    ) -> "list[Rebased]":
        """Put images that were built on one image on another one, without building them again.

        Each is changed at once and whole; no layer is copied. Settings that an image has just as `old` has them, it
        gets as `new` has them. One that can't lie on `new` stays as it was, and says why in `refused`.

        Args:
            names: Which images; none: all that were built on `old`, without those that recipes are named after.
            progress: Told of each as it is done.

        Raises:
            NotFound: One of the images is not there; nothing was changed.
        """
        body = encode(RebaseRequest(old=old, new=new, names=tuple(names)))
        response = await self._transport.open(IMAGE_REBASE, IMAGE_REBASE.target(), body, timeout_s=_REBASE_QUIET_S)
        done: list[Rebased] = []
        try:
            async for rebased in records(response, IMAGE_REBASE, quiet_s=_REBASE_QUIET_S):
                done.append(rebased)
                if progress is not None:
                    progress(rebased)
        finally:
            response.close()
        return done

    def zygote(self, template: str, *, imports: Sequence[str] = (), python: str = "python3") -> SandboxSpec:
        """What to create sandboxes of that have a warm interpreter: `create(client.zygote("debian", imports=[...]))`.

        The node imports once for each template and list, with the first of these sandboxes; in each a fork of that
        interpreter is ready then, and shares its memory until it writes to it. `sandbox.python()` runs in it.

        Args:
            imports: Modules, in this order; any Python of the template that has them will do, from 3.8 on.
            python: The interpreter, by its path or by a name that is looked up along PATH.
        """
        return zygote_spec(template, imports, python)

    def template(self, base: str | Recipe, *, memory_mib: int = 2048, disk_mib: int = 8192) -> "AsyncTemplateBuilder":
        """Begin an image on top of another one: `template("debian").run(...).build("mine")`.

        Args:
            memory_mib: Of the sandboxes that its steps run in, as is `disk_mib`.
        """
        from barchan.sdk.template import AsyncTemplateBuilder  # which is built on this client

        return AsyncTemplateBuilder(self, Recipe(base=base, memory_mib=memory_mib, disk_mib=disk_mib))

    async def list(self, *, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """The live sandboxes of the node that have all these labels."""
        return await self._transport.value(LIST, LIST.target({"label": _labels(labels or {})}))

    async def kill(self, *, labels: Mapping[str, str]) -> int:
        """End every sandbox of the node that has all these labels (with none given: every one); returns how many."""
        target = KILL_MANY.target({"label": _labels(labels), "all": None if labels else True})
        return (await self._transport.value(KILL_MANY, target, timeout_s=_KILL_TIMEOUT_S)).killed

    async def pool(self) -> PoolInfo:
        """The node's warm pool: what is ready, and what became of it so far."""
        return await self._transport.value(POOL, POOL.target())

    async def set_pool(self, slots: int) -> PoolInfo:
        """Have the node keep so many sandboxes ready, at least, for creates to come; 0: none."""
        check_count(slots=slots, least=0)
        return await self._transport.value(POOL_SET, POOL_SET.target(), encode(PoolRequest(slots=slots)))

    async def node_info(self) -> NodeInfo:
        return await self._transport.value(NODE_INFO, NODE_INFO.target())

    async def greet(self) -> Self:
        """Ask the node who it is, starting this user's own if it doesn't run; a wrong address or token shows here."""
        if self.endpoint.state_dir is not None:
            await asyncio.to_thread(ensure_node, self.endpoint.state_dir, self.endpoint.store)
        node = await self._transport.first_value(NODE_INFO, NODE_INFO.target())
        if self.endpoint.store is not None and node.store != self.endpoint.store:
            has = f"has images from {node.store}" if node.store else "was started without a store"
            raise Conflict(
                f"the node of {self.endpoint.state_dir} {has}, not with {self.endpoint.store} "
                "(try: wait until it has ended, half a minute after its last use, or end it)"
            )
        return self


async def _end_all(
    pending: "set[asyncio.Task[AsyncSandbox | BarchanError]]", ready: "list[asyncio.Task[AsyncSandbox | BarchanError]]"
) -> None:
    for task in pending:
        task.cancel()
    made = await asyncio.gather(*pending, *ready, return_exceptions=True)
    await asyncio.gather(*(sandbox.kill() for sandbox in made if isinstance(sandbox, AsyncSandbox)))


def _labels(labels: Mapping[str, str]) -> list[str] | None:
    return [f"{name}={value}" for name, value in checked_labels(labels).items()] or None


class Connecting:
    """What `connect_async()` returns: await it for the client, or enter it to have the client closed at the end."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._greet().__await__()

    async def _greet(self) -> AsyncClient:
        try:
            return await self._client.greet()
        except BaseException:
            await self._client.close()
            raise

    async def __aenter__(self) -> AsyncClient:
        return await self._greet()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()


def connect_async(
    url: str | None = None,
    *,
    token: str | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    store: str | os.PathLike[str] | None = None,
) -> Connecting:
    """The native twin of `connect()`: `client = await connect_async()`, or `async with connect_async() as client`."""
    endpoint = endpoint_of(url, state_dir, store)
    if token is not None:
        checked_token(token)
        remember_token(endpoint, token)
    return Connecting(AsyncClient(endpoint, token if token is not None else token_of(endpoint)))


def _revive(endpoint: Endpoint) -> AsyncClient:
    return AsyncClient(endpoint, token_of(endpoint))
