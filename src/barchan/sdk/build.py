"""Images from recipes: a sandbox of the base, the steps in it, one more layer of what they did.

An image's name is made from what it is made from, so that whoever asks for the same recipe finds the same image, and
of many who ask at once one builds. That one is whose lease the sandbox belongs to; the others watch it, and when it is
gone without an image, the next of them begins anew.
"""

import asyncio
import hashlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
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
from barchan.model.image import BUILT_PREFIX, layered_env
from barchan.model.node import ImageInfo
from barchan.model.sandbox import Network, ProcessInfo, SandboxSpec
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.lease import Lease
from barchan.sdk.put import PutDigests, put_digest, put_files
from barchan.sdk.recipe import Put, Recipe, Run, Step, Take
from barchan.sdk.take import take_files

PREFIX = BUILT_PREFIX
FORMAT = 3  # of the names: a change of what a step does needs another
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
    """What one client of this process is building, by name, and what it knows of the files that it sends."""

    def __init__(self) -> None:
        self.building: set[str] = set()
        self.digests = PutDigests()


_KNOWN: "WeakKeyDictionary[AsyncClient, _Known]" = WeakKeyDictionary()


async def build(client: AsyncClient, recipe: Recipe, *, progress: Progress | None = None) -> str:
    """The name of the recipe's image, which is made if the node does not have it; its base, too, if that is a recipe.

    Cancelling ends what this call has started, not what another process builds.

    Args:
        progress: Told each step as it begins.

    Raises:
        InvalidSpec: A source is missing or can't be sent; nothing was started.
        NotFound: Neither the node nor its blob store has an image of the base's name.
        TaskError: A step failed; the message has its number, command, exit code and the end of its output. Or a source
            is not what it was any more when it was to be sent.
    """
    known, lease = _KNOWN.setdefault(client, _Known()), _lease_for(client)
    try:
        return await _Build(client, known, lease, progress or (lambda said: None)).image(recipe)
    finally:
        if lease is not client._lease:
            await lease.end()


def _lease_for(client: AsyncClient) -> Lease:
    """The lease to build under. Within a run it is none of the run's: there, whoever asks for a sandbox again goes on
    with it alone, and what another process builds is to be waited for.
    """
    terms = client._lease.terms
    if "run" not in terms.labels:
        return client._lease
    labels = {name: value for name, value in terms.labels.items() if name != "run"}
    return Lease(client._transport, replace(terms, lease_id=None, labels=labels, budget=None))


class _Made(NamedTuple):
    """The image that a recipe makes, or a part of its steps.

    Attributes:
        recipe: Whose steps these are; its base and layers are the two below.
        before: Steps of the same recipe that are in the base already.
        total: Steps of that recipe.
        taken: For each step the image that it takes from, if it does.
        sent: For each step the digest of what it puts; empty if it puts nothing.
    """

    name: str
    recipe: Recipe
    base: "_Made | ImageInfo"
    layers: tuple[ImageInfo, ...]
    before: int
    total: int
    taken: "tuple[_Made | ImageInfo | None, ...]"
    sent: tuple[str, ...]

    def place(self, index: int) -> str:
        """A step of this part, in the words of an error or of progress."""
        return f"step {self.before + index + 1} of {self.total}"


class _Build:
    def __init__(self, client: AsyncClient, known: _Known, lease: Lease, progress: Progress) -> None:
        self._client = client
        self._known = known
        self._lease = lease
        self._progress = progress

    async def image(self, recipe: Recipe) -> str:
        while not (recipe.layers or recipe.steps or recipe.env or recipe.user or recipe.workdir):  # nothing is added
            if isinstance(recipe.base, str):
                return (await self._named(recipe.base)).name
            recipe = recipe.base
        images = {name: await self._named(name) for name in dict.fromkeys(_names(recipe))}
        made = await asyncio.to_thread(plan, recipe, images, self._known.digests.of)
        return (await self._ensure(made)).name

    async def _named(self, name: str) -> ImageInfo:
        """An image that a recipe names.

        Raises:
            NotFound: The message says what there is.
        """
        try:
            return await self._client.image(name)
        except NotFound as error:
            have = str(error).partition(" (try: ")[0].partition(repr(name))[2]
            raise NotFound(
                f"no image {name!r} to build on{have} (try: barchan image pull docker://HOST/{name} --name {name}; "
                f"for a Dockerfile also --base {name}=NAME with one that is there)",
                template=name,
            ) from error

    async def _ensure(self, made: _Made | ImageInfo) -> ImageInfo:
        if isinstance(made, ImageInfo):
            return made
        image = await self._find(made.name)
        if image is None:
            base = await self._ensure(made.base)
            taken = [None if image is None else await self._ensure(image) for image in made.taken]
            image = await self._begin(made._replace(taken=tuple(taken)), base)
        return image

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
            layers=tuple(image.digest for image in made.layers),
            memory_mib=recipe.memory_mib,
            disk_mib=recipe.disk_mib,
            pids_max=PIDS_MAX,
            root="capable",
            network=network,
            allow_hosts=allow_hosts,
            ttl_s=sum(step.timeout_s for step in recipe.steps if isinstance(step, Run)) + _MARGIN_S,
            labels={"build": made.name},
            create_id=create_id,
        )
        if made.layers and isinstance(made.base, _Made):
            # The base's own layers count as added, too: so it is composed on what the recipe names at its very bottom.
            template, layers = _bottom(made.base).digest, (base.digest, *spec.layers)
            spec = replace(spec, template=template, layers=layers, user=base.user, workdir=base.workdir)
        return await self._created(spec)

    async def _created(self, spec: SandboxSpec) -> AsyncSandbox:
        """A sandbox, as soon as there is room for it.

        Raises:
            CapacityError: There was none for half an hour.
        """
        give_up = time.monotonic() + CAPACITY_WAIT_S
        spec = replace(spec, lease_id=await self._lease.ensure())
        while True:
            try:
                return await self._client.create(spec)
            except CapacityError as refusal:
                if time.monotonic() > give_up:
                    raise
                self._progress("waiting for room on the node")
                await asyncio.sleep(refusal.retry_after_s)

    async def _find(self, name: str) -> ImageInfo | None:
        try:
            return await self._client.image(name)
        except NotFound:
            return None

    async def _is_mine(self, sandbox: AsyncSandbox, name: str) -> bool:
        """Whether this call has to build in it: the sandbox is this client's, and nobody of this process does.

        Raises:
            SandboxExpired: It was another's, who died in the middle: it is ended.
        """
        info = await sandbox.info()
        if name in self._known.building or info.spec.lease_id != await self._lease.ensure():
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
                self._progress(f"{made.place(index)}: {described(step)}")
                if isinstance(step, Run):
                    await self._run(sandbox, made, index, step)
                else:
                    await self._put(sandbox, made, index, step)
            self._progress("keeping the image")
            try:
                snapshot = await sandbox.snapshot(
                    made.name,
                    env={**layered_env(base.env, [image.env for image in made.layers]), **recipe.env},
                    user=recipe.user or base.user,
                    workdir=recipe.workdir or base.workdir,
                    # Of the image that the recipe names at its very bottom: all above it is what was added.
                    base_layers="same" if made.layers or isinstance(made.base, _Made) else None,
                )
                return snapshot.image
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

    async def _put(self, sandbox: AsyncSandbox, made: _Made, index: int, step: Put | Take) -> None:
        try:
            if isinstance(step, Put):
                await put_files(sandbox, step, root_is_capable=True, digest=made.sent[index])
                return
            image = made.taken[index]
            assert isinstance(image, ImageInfo)
            spec = SandboxSpec(template=image.digest, root="capable", ttl_s=_MARGIN_S, labels={"build": made.name})
            async with await self._created(spec) as source:
                await take_files(source, sandbox, step)
        except (SandboxExpired, SandboxLost):
            raise
        except (CallerError, GuestError, TaskError) as error:
            raise TaskError(
                f"building {made.name}: {made.place(index)}, {described(step)}: {error}",
                step=made.before + index + 1,
            ) from error

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


async def _failure(sandbox: AsyncSandbox, made: _Made, index: int, end: ProcessInfo) -> TaskError:
    step = made.recipe.steps[index]
    timeout = f"ran out of its time of {step.timeout_s:g} s" if isinstance(step, Run) and end.timed_out else ""
    memory = f"ran out of {made.recipe.memory_mib} MiB of memory" if end.oom_killed else ""
    how = timeout or memory or f"ended with exit code {end.exit_code}"
    said = await _tail(sandbox, end.process_id)
    return TaskError(
        f"building {made.name}: {made.place(index)}, {described(step)}, {how}{said}",
        step=made.before + index + 1,
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


def plan(recipe: Recipe, images: Mapping[str, ImageInfo], digest_of: Callable[[Put], str] = put_digest) -> _Made:
    """The names of what there is to build. Reads every source, so that a missing one is said before anything starts.

    Args:
        images: By the names that the recipe gives them.
    """
    base = _planned(recipe.base, images, digest_of)
    layers = tuple(images[name] for name in recipe.layers)
    parts = parted(recipe.steps)
    before = 0
    for part in parts[:-1]:
        whole = replace(recipe, steps=part, env={}, user=None, workdir=None)
        base = _made(whole, base, layers, before, len(recipe.steps), images, digest_of)
        layers, before = (), before + len(part)
    whole = replace(recipe, steps=parts[-1])
    return _made(whole, base, layers, before, len(recipe.steps), images, digest_of)


def _planned(base: str | Recipe, images: Mapping[str, ImageInfo], digest_of: Callable[[Put], str]) -> _Made | ImageInfo:
    return plan(base, images, digest_of) if isinstance(base, Recipe) else images[base]


def _made(
    recipe: Recipe,
    base: _Made | ImageInfo,
    layers: tuple[ImageInfo, ...],
    before: int,
    total: int,
    images: Mapping[str, ImageInfo],
    digest_of: Callable[[Put], str],
) -> _Made:
    taken = tuple(_planned(step.image, images, digest_of) if isinstance(step, Take) else None for step in recipe.steps)
    sent = tuple(digest_of(step) if isinstance(step, Put) else "" for step in recipe.steps)
    return _Made(_name(recipe, base, layers, taken, sent), recipe, base, layers, before, total, taken, sent)


def _names(recipe: Recipe) -> Iterator[str]:
    """Of the images that a recipe names, and those that it has as recipes."""
    yield from recipe.layers
    for image in (recipe.base, *(step.image for step in recipe.steps if isinstance(step, Take))):
        if isinstance(image, str):
            yield image
        else:
            yield from _names(image)


def _bottom(made: _Made) -> ImageInfo:
    """What everything else of it stands on."""
    base = made.base
    while isinstance(base, _Made):
        base = base.base
    return base


def parted(steps: tuple[Step, ...]) -> list[tuple[Step, ...]]:
    """Steps by the images that are kept of them: one ends with each command, so that it need not run again."""
    parts: list[tuple[Step, ...]] = [()]
    for step in steps:
        if parts[-1] and isinstance(parts[-1][-1], Run):
            parts.append(())
        parts[-1] += (step,)
    return parts


def _name(
    recipe: Recipe,
    base: _Made | ImageInfo,
    layers: tuple[ImageInfo, ...],
    taken: tuple[_Made | ImageInfo | None, ...],
    sent: tuple[str, ...],
) -> str:
    content = {
        "format": FORMAT,
        "base": _key(base),
        "layers": [image.digest for image in layers],
        "steps": [_content(*step) for step in zip(recipe.steps, taken, sent, strict=True)],
        "env": dict(sorted(recipe.env.items())),
        "user": recipe.user,
        "workdir": recipe.workdir,
    }
    return PREFIX + hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:24]


def _key(image: _Made | ImageInfo | None) -> str:
    if isinstance(image, _Made):
        return image.name
    return image.digest if image is not None else ""


def _content(step: Step, taken: _Made | ImageInfo | None, digest: str) -> object:
    if isinstance(step, Run):
        content = msgspec.to_builtins(replace(step, env=dict(sorted(step.env.items()))))
        del content["place"]
        return content
    if isinstance(step, Take):
        return ["take", _key(taken), step.source, step.path, step.mode, step.user]
    name = step.source.rstrip("/").rpartition("/")[2] if step.source is not None else ""
    return [step.path, step.mode, step.user, name, digest]


def network_of(recipe: Recipe) -> tuple[Network, tuple[str, ...]]:
    """What the recipe's commands may reach, which has to be the same for all of them."""
    return next(((step.network, step.allow_hosts) for step in recipe.steps if isinstance(step, Run)), ("none", ()))


def described(step: Step) -> str:
    """A step in a few words."""
    if isinstance(step, Put):
        return f"put {step.path}"
    if isinstance(step, Take):
        of = step.image if isinstance(step.image, str) else "an earlier stage"
        return f"take {step.source} of {of} to {step.path}"
    command = step.command if isinstance(step.command, str) else step.command[-1]
    if not isinstance(step.command, str) and step.command[:2] != ("/bin/sh", "-c"):
        command = " ".join(step.command)
    line = " ".join(command.split())
    return f"run `{line if len(line) <= 100 else line[:99] + '…'}`{f' ({step.place})' if step.place else ''}"
