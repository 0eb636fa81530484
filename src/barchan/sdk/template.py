"""Images made step by step: a recipe, written as calls."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from msgspec.structs import replace

from barchan.errors import InvalidSpec
from barchan.model.node import ImageInfo
from barchan.model.sandbox import Network, SandboxSpec
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.background import run
from barchan.sdk.build import build
from barchan.sdk.checks import check_seconds, checked_env
from barchan.sdk.options import Command, zygote_spec
from barchan.sdk.recipe import Put, Recipe, Run


class _Builder:
    """Each call returns a new builder and leaves this one as it was, so that images may share their beginning.

    User, directory and variables hold for the steps that come after them, and for sandboxes of the image.
    """

    def __init__(self, client: AsyncClient, recipe: Recipe) -> None:
        """Not called by users."""
        self._client = client
        self.recipe = recipe

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.recipe!r})"

    def _with(self, recipe: Recipe) -> Self:
        return type(self)(self._client, recipe)

    def layer(self, *images: str) -> Self:
        """The own layers of other images above what is there, the last one topmost."""
        recipe = self.recipe
        if recipe.steps:  # they stay below
            below = replace(recipe, env={}, user=None, workdir=None)
            recipe = replace(recipe, base=below, layers=(), steps=())
        return self._with(replace(recipe, layers=(*recipe.layers, *images)))

    def run(
        self,
        command: Command,
        *,
        network: Network | None = None,
        allow: Sequence[str] = (),
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 1800.0,
    ) -> Self:
        """Run a command: a shell's when it is text, else a program and its arguments. It must exit with 0.

        Args:
            network: What it may reach; nothing unless told so.
            allow: Host names that it may reach by HTTP and HTTPS, and no other.
            user: Who runs it: root, unless `user()` was called before.
        """
        if isinstance(allow, str) or (allow and network not in (None, "allow")):
            raise InvalidSpec('allow= is a list of host names and means network="allow"')
        check_seconds(timeout_s=timeout_s)
        step = Run(
            command=command if isinstance(command, str) else tuple(command),
            user=user or self.recipe.user or "root",
            cwd=cwd or self.recipe.workdir,
            env={**self.recipe.env, **checked_env(env or {})},
            network="allow" if allow else network or "none",
            allow_hosts=tuple(allow),
            timeout_s=timeout_s,
        )
        return self._with(replace(self.recipe, steps=(*self.recipe.steps, step)))

    def copy(
        self, source: str | os.PathLike[str], path: str, *, user: str | None = None, mode: int | None = None
    ) -> Self:
        """A file or folder of this machine into the image; a folder's content goes below `path`.

        Args:
            user: The owner: root, unless `user()` was called before.
            mode: Permission bits; None: as the source's.
        """
        step = Put(path=path, source=os.fspath(source), mode=mode, user=user or self.recipe.user or "root")
        return self._with(replace(self.recipe, steps=(*self.recipe.steps, step)))

    def env(self, **variables: str) -> Self:
        """Variables, over those of the base."""
        return self._with(replace(self.recipe, env={**self.recipe.env, **checked_env(variables)}))

    def user(self, name: str) -> Self:
        return self._with(replace(self.recipe, user=name))

    def workdir(self, path: str) -> Self:
        """Where commands start; it has to be there."""
        return self._with(replace(self.recipe, workdir=path))

    async def _build(self, name: str | None, progress: Callable[[str], None] | None) -> ImageInfo:
        built = await build(self._client, self.recipe, progress=progress)
        if name is not None:
            return await self._client.name_image(built, name)
        return await self._client.image(built)


class AsyncTemplateBuilder(_Builder):
    """An image in the making, from `client.template()`."""

    async def build(self, name: str | None = None, *, progress: Callable[[str], None] | None = None) -> ImageInfo:
        """Make the image, or find it: steps that were run before, after the same ones, are not run again.

        Args:
            name: What it is called; an image of that name gives way. None: by what it is made of, `prep-...`.
            progress: Told each step as it begins.

        Raises:
            NotFound: The node has no image of the base's name, or of a layer's.
            Conflict: One of the images has a directory where another has none.
            TaskError: A step failed; the message has its number, command, exit code and the end of its output.
        """
        return await self._build(name, progress)

    async def zygote(self, imports: Sequence[str] = (), *, python: str = "python3") -> SandboxSpec:
        """Make the image, and what sandboxes of it are created of that have a warm interpreter; see `client.zygote`."""
        return zygote_spec((await self._build(None, None)).name, imports, python)


class TemplateBuilder(_Builder):
    """An image in the making, from `client.template()`."""

    def build(self, name: str | None = None, *, progress: Callable[[str], None] | None = None) -> ImageInfo:
        """Make the image, or find it: steps that were run before, after the same ones, are not run again.

        Args:
            name: What it is called; an image of that name gives way. None: by what it is made of, `prep-...`.
            progress: Told each step as it begins.

        Raises:
            NotFound: The node has no image of the base's name, or of a layer's.
            Conflict: One of the images has a directory where another has none.
            TaskError: A step failed; the message has its number, command, exit code and the end of its output.
        """
        return run(self._build(name, progress))

    def zygote(self, imports: Sequence[str] = (), *, python: str = "python3") -> SandboxSpec:
        """Make the image, and what sandboxes of it are created of that have a warm interpreter; see `client.zygote`."""
        return zygote_spec(run(self._build(None, None)).name, imports, python)
