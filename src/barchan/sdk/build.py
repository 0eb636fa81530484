"""Images from recipes: a sandbox of the base, the steps in it, one more layer of what they did.

An image's name is made from what it is made from, so that whoever asks for the same recipe finds the same image, and
of many who ask at once one builds. That one is whose lease the sandbox belongs to; the others watch it, and when it is
gone without an image, the next of them begins anew.
"""

import asyncio
import hashlib
import signal
import time
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace

from barchan.errors import (
    BackendError,
    BarchanError,
    BootFailed,
    CallerError,
    CapacityError,
    GuestError,
    InvalidSpec,
    NotFound,
    ReadTimeout,
    SandboxExpired,
    SandboxLost,
    TaskError,
)
from barchan.model.node import ImageInfo
from barchan.model.sandbox import Network, ProcessInfo, SandboxSpec
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.put import put_digest, put_files
from barchan.sdk.recipe import Put, Recipe, Run

PREFIX = "prep-"
FORMAT = 1  # of the names: a change of what a step does needs another
PIDS_MAX = 2048
CREATE_IDS_MAX = 200  # the node remembers an ended one for an hour
LOSSES_MAX = 3
CAPACITY_WAIT_S = 1800.0
TAIL_CHARS = 2000
_SPOOL_BYTES = 64 << 10
_MARGIN_S = 3600.0  # beyond the steps' own bounds, for files and waiting
_POLL_S = 0.2
_WATCH_S = 10.0

Progress = Callable[[str], None]


class _Known:
    """What one client of this process has built, by recipe, and what it is building, by name."""

    def __init__(self) -> None:
        self.names: dict[bytes, str] = {}
        self.building: set[str] = set()


_KNOWN: "WeakKeyDictionary[AsyncClient, _Known]" = WeakKeyDictionary()


async def build(client: AsyncClient, recipe: Recipe, *, progress: Progress | None = None) -> str:
    """The name of the recipe's image, which is made if the node does not have it; its base, too, if that is a recipe.

    Cancelling ends what this call has started, not what another process builds.

    Args:
        progress: Told each step as it begins.

    Raises:
        InvalidSpec: A source is missing or can't be sent; nothing was started.
        NotFound: The node has no image of the base's name.
        TaskError: A step failed; the message has its number, command, exit code and the end of its output.
    """
    known = _KNOWN.setdefault(client, _Known())
    key = hashlib.sha256(msgspec.msgpack.encode(recipe)).digest()
    if key not in known.names:
        known.names[key] = await _Build(client, known, progress or (lambda said: None)).image(by_network(recipe))
    return known.names[key]


class _Made(NamedTuple):
    """The image that a recipe makes."""

    name: str
    recipe: Recipe
    base: "_Made | ImageInfo"


class _Build:
    def __init__(self, client: AsyncClient, known: _Known, progress: Progress) -> None:
        self._client = client
        self._known = known
        self._progress = progress

    async def image(self, recipe: Recipe) -> str:
        images = await self._client.images()
        while not (recipe.steps or recipe.env or recipe.user or recipe.workdir):  # nothing is added
            if isinstance(recipe.base, str):
                return _resolve(recipe.base, images).name
            recipe = recipe.base
        made = await asyncio.to_thread(plan, recipe, images)
        return (await self._ensure(made, {image.name: image for image in images})).name

    async def _ensure(self, made: _Made, images: dict[str, ImageInfo]) -> ImageInfo:
        if made.name in images:
            return images[made.name]
        base = made.base if isinstance(made.base, ImageInfo) else await self._ensure(made.base, images)
        return await self._begin(made, base)

    async def _begin(self, made: _Made, base: ImageInfo) -> ImageInfo:
        """Build it, or see it built by whoever began before."""
        losses = 0
        for index in range(CREATE_IDS_MAX):
            try:
                return await self._try(made, base, f"{made.name}-{index}")
            except BootFailed:
                raise
            except (SandboxExpired, SandboxLost, NotFound) as error:
                if isinstance(error, NotFound) and "sandbox_id" not in error.details:
                    raise
                losses += isinstance(error, SandboxLost)
                if losses > LOSSES_MAX:
                    raise
            if (image := await self._find(made.name)) is not None:  # it is over because it is done
                return image
        raise BackendError(f"building {made.name} was given up {CREATE_IDS_MAX} times within an hour")

    async def _try(self, made: _Made, base: ImageInfo, create_id: str) -> ImageInfo:
        """Build it in the sandbox of this create id, or watch whoever does.

        Raises:
            SandboxExpired, SandboxLost, NotFound: That sandbox has ended, now or long ago.
        """
        sandbox = await self._create(made, base, create_id)
        if await self._is_mine(sandbox, made.name):
            return await self._make(sandbox, made, base)
        return await self._watch(sandbox, made)

    async def _create(self, made: _Made, base: ImageInfo, create_id: str) -> AsyncSandbox:
        recipe = made.recipe
        network, allow_hosts = network_of(recipe)
        spec = SandboxSpec(
            template=base.digest,
            memory_mib=recipe.memory_mib,
            disk_mib=recipe.disk_mib,
            pids_max=PIDS_MAX,
            network=network,
            allow_hosts=allow_hosts,
            ttl_s=sum(step.timeout_s for step in recipe.steps if isinstance(step, Run)) + _MARGIN_S,
            labels={"build": made.name},
            create_id=create_id,
        )
        give_up = time.monotonic() + CAPACITY_WAIT_S
        while True:
            try:
                return await self._client.create(spec)
            except CapacityError as refusal:
                if time.monotonic() > give_up:
                    raise
                self._progress("waiting for room on the node")
                await asyncio.sleep(int(refusal.details.get("retry_after_ms", 100)) / 1e3)

    async def _find(self, name: str) -> ImageInfo | None:
        return next((image for image in await self._client.images() if image.name == name), None)

    async def _is_mine(self, sandbox: AsyncSandbox, name: str) -> bool:
        """Whether this call has to build in it: the sandbox is this client's, and nobody of this process does.

        Raises:
            SandboxExpired: It was another's, who died in the middle: it is ended.
        """
        info = await sandbox.info()
        if name in self._known.building or info.spec.lease_id != await self._client._lease.ensure():
            return False
        self._known.building.add(name)
        try:
            if await sandbox.processes():
                await sandbox.kill()
                raise SandboxExpired(f"{sandbox.id} was left in the middle of a build", sandbox_id=sandbox.id)
            await sandbox.exec(["true"], process_id="begin")
        except BaseException:
            self._known.building.discard(name)
            raise
        return True

    async def _make(self, sandbox: AsyncSandbox, made: _Made, base: ImageInfo) -> ImageInfo:
        recipe = made.recipe
        try:
            for index, step in enumerate(recipe.steps):
                self._progress(f"step {index + 1} of {len(recipe.steps)}: {described(step)}")
                if isinstance(step, Run):
                    await self._run(sandbox, made, index, step)
                else:
                    await _put(sandbox, made, index, step)
            self._progress("keeping the image")
            try:
                return await sandbox.snapshot(
                    made.name,
                    env={**base.env, **recipe.env},
                    user=recipe.user or base.user,
                    workdir=recipe.workdir or base.workdir,
                )
            except (GuestError, InvalidSpec) as error:
                raise TaskError(f"building {made.name}: what the steps left can't be an image: {error}") from error
        finally:
            self._known.building.discard(made.name)
            await asyncio.shield(sandbox.kill())

    async def _run(self, sandbox: AsyncSandbox, made: _Made, index: int, step: Run) -> None:
        """A process that is only waited for: if this is cancelled, it ends with its sandbox, and whoever watches it
        sees that the build was given up, not that the step failed.
        """
        process = await sandbox.start(
            step.command,
            process_id=f"step-{index}",
            user=step.user,
            cwd=step.cwd,
            env=step.env,
            timeout_s=step.timeout_s,
            stdin_open=False,
            merge_stderr=True,
            spool_bytes=_SPOOL_BYTES,
        )
        end = await process.wait(timeout_s=None)
        if end.exit_code != 0 or end.timed_out:
            raise await _failure(sandbox, made, index, end)

    async def _watch(self, sandbox: AsyncSandbox, made: _Made) -> ImageInfo:
        """Wait for the end of another's build.

        Raises:
            TaskError: One of its steps failed.
            SandboxExpired, SandboxLost: The sandbox has ended.
        """
        self._progress("another process builds it")
        while (image := await self._find(made.name)) is None:
            steps = [process for process in await sandbox.processes() if process.process_id.startswith("step-")]
            running = next((process for process in steps if process.running), None)
            if running is not None:
                try:
                    steps = [await sandbox.process(running.process_id).wait(_WATCH_S)]
                except ReadTimeout:
                    continue
            for end in steps:
                if end.exit_code or end.timed_out:
                    if end.signal == signal.SIGKILL and not (end.timed_out or end.oom_killed):
                        # Most likely with its builder, so that it says nothing about the step.
                        raise SandboxExpired(f"the build in {sandbox.id} was given up", sandbox_id=sandbox.id)
                    raise await _failure(sandbox, made, int(end.process_id.removeprefix("step-")), end)
            await asyncio.sleep(_POLL_S)
        return image


async def _put(sandbox: AsyncSandbox, made: _Made, index: int, step: Put) -> None:
    try:
        await put_files(sandbox, step)
    except (SandboxExpired, SandboxLost):
        raise
    except CallerError as error:
        raise TaskError(
            f"building {made.name}: step {index + 1} of {len(made.recipe.steps)}, {described(step)}: {error}",
            step=index + 1,
        ) from error


async def _failure(sandbox: AsyncSandbox, made: _Made, index: int, end: ProcessInfo) -> TaskError:
    step = made.recipe.steps[index]
    timeout = f"ran out of its time of {step.timeout_s:g} s" if isinstance(step, Run) and end.timed_out else ""
    memory = f"ran out of {made.recipe.memory_mib} MiB of memory" if end.oom_killed else ""
    how = timeout or memory or f"ended with exit code {end.exit_code}"
    said = await _tail(sandbox, end.process_id)
    return TaskError(
        f"building {made.name}: step {index + 1} of {len(made.recipe.steps)}, {described(step)}, {how}{said}",
        step=index + 1,
        exit_code=end.exit_code or 0,
    )


async def _tail(sandbox: AsyncSandbox, process_id: str) -> str:
    """The end of its output, where it can still be had: another's build may be gone by now."""
    said = b""
    try:
        async for _, _, data in sandbox.process(process_id).output(follow=False):
            said = (said + data)[-4 * TAIL_CHARS :]
    except BarchanError:
        return "; its output went with the sandbox"
    text = said.decode("utf-8", "replace").strip()
    return f":\n{text[-TAIL_CHARS:]}" if text else "; it said nothing"


# Names


def plan(recipe: Recipe, images: list[ImageInfo]) -> _Made:
    """The names of what there is to build. Reads every source, so that a missing one is said before anything starts."""
    base = plan(recipe.base, images) if isinstance(recipe.base, Recipe) else _resolve(recipe.base, images)
    content = {
        "format": FORMAT,
        "base": base.name if isinstance(base, _Made) else base.digest,
        "steps": [_content(step) for step in recipe.steps],
        "env": dict(sorted(recipe.env.items())),
        "user": recipe.user,
        "workdir": recipe.workdir,
    }
    name = PREFIX + hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:24]
    return _Made(name, recipe, base)


def _content(step: Run | Put) -> object:
    if isinstance(step, Run):
        return replace(step, env=dict(sorted(step.env.items())))
    digest = put_digest(step)
    name = step.source.rstrip("/").rpartition("/")[2] if step.source is not None else ""
    return [step.path, step.mode, step.user, name, digest]


def _resolve(name: str, images: list[ImageInfo]) -> ImageInfo:
    digest = name.removeprefix("sha256:")
    for image in images:
        if image.name == name or (len(digest) >= 12 and image.digest.startswith(digest)):
            return image
    have = ", ".join(image.name for image in images if not image.name.startswith(PREFIX)) or "none"
    raise NotFound(
        f"the node has no image {name!r} to build on; there are: {have} (try: barchan image import dir:ROOTFS "
        f"--name {name}, or --base {name}=NAME for one that is there)",
        template=name,
    )


def network_of(recipe: Recipe) -> tuple[Network, tuple[str, ...]]:
    """What the recipe's commands may reach, which has to be the same for all of them."""
    return next(((step.network, step.allow_hosts) for step in recipe.steps if isinstance(step, Run)), ("none", ()))


def by_network(recipe: Recipe) -> Recipe:
    """The same image, with one recipe for each run of steps that share a network: a sandbox has one for its life."""
    base = by_network(recipe.base) if isinstance(recipe.base, Recipe) else recipe.base
    groups: list[list[Run | Put]] = [[]]
    network: tuple[Network, tuple[str, ...]] | None = None
    for step in recipe.steps:
        if isinstance(step, Run):
            if network not in (None, (step.network, step.allow_hosts)):
                groups.append([])
            network = step.network, step.allow_hosts
        groups[-1].append(step)
    for group in groups[:-1]:
        base = Recipe(base=base, steps=tuple(group), memory_mib=recipe.memory_mib, disk_mib=recipe.disk_mib)
    return replace(recipe, base=base, steps=tuple(groups[-1]))


def described(step: Run | Put) -> str:
    """A step in a few words."""
    if isinstance(step, Put):
        return f"put {step.path}"
    command = step.command if isinstance(step.command, str) else step.command[-1]
    if not isinstance(step.command, str) and step.command[:2] != ("/bin/sh", "-c"):
        command = " ".join(step.command)
    line = " ".join(command.split())
    return f"run `{line if len(line) <= 100 else line[:99] + '…'}`"
