"""`barchan image build`."""

import asyncio
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from barchan.cli.common import DEFAULTS, OK, Common, human_bytes, key_values, print_json
from barchan.cli.progress import progress
from barchan.errors import InvalidSpec, NotFound
from barchan.image.store import ImageStore, image_info
from barchan.image.template import LayerKind, Template, TemplateConfig
from barchan.sdk.dockerfile import BaseConfig
from barchan.sdk.recipe import Recipe

build_app = App(name="build", help_format="plaintext")

Words = Annotated[tuple[str, ...], Parameter(consume_multiple=False, show_default=False)]


def own_store(common: Common) -> ImageStore:
    """The image store of this machine, in a state directory that is made if there is none."""
    common.local_state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    return ImageStore(common.local_state_dir / "images")


@build_app.command
def debian(
    *,
    name: str = "debian",
    suite: str = "bookworm",
    include: Words = (),
    force: bool = False,
    common: Common = DEFAULTS,
) -> int:
    """Build the base image from Debian packages: Python, bash, essential tools.

    About 60 MB on disk, made in half a minute. Needs root and the package
    mmdebstrap. Building the same package versions again gives the same digest.

    For example:

        sudo barchan image build debian
        sudo barchan image build debian --name tools --include git,make,gcc

    Args:
        name: Name of the image.
        suite: Debian release.
        include: More packages, separated by commas.
        force: Build again, and replace an image of that name.
    """
    from barchan.image.debian import DebianSpec, build_debian

    packages = tuple(sorted({word for words in include for word in words.split(",") if word}))
    spec = DebianSpec(name=name, suite=suite, include=packages)
    store = own_store(common)
    with progress(f"building {name}") as say:
        template = build_debian(store, spec, layer_kind(), say, force=force)
    return made(template, common)


@build_app.default
def dockerfile(
    path: Path,
    /,
    *,
    name: str,
    arg: Words = (),
    base: Words = (),
    network: Literal["none", "open"] | None = None,
    allow: Words = (),
    common: Common = DEFAULTS,
) -> int:
    """Build an image from a Dockerfile, or from a word that names a recipe of
    ours: debian.

    Steps run in sandboxes of this machine's own node. What is supported of
    Dockerfiles is in docs/images.md.

    For example:

        barchan image build . --name mine
        barchan image build ./docker/Dockerfile --name mine --arg VERSION=3
        barchan image build . --name mine --base python:3.12-slim=debian --network none

    Args:
        path: A Dockerfile, or the folder that holds it. Its folder is the context.
        name: Name of the image; an older image of that name is replaced.
        arg: A build argument, NAME=VALUE; may be repeated.
        base: The image that FROM means, as FROM=IMAGE; may be repeated.
        network: What RUN may reach. [default: open]
        allow: A host that RUN may reach by HTTP and HTTPS, and no other; may be repeated.
    """
    from barchan.sdk.dockerfile import load_dockerfile, where_named

    if common.node_url is not None:
        raise InvalidSpec("images are built on this machine's own node: give no --url")
    if allow and network is not None:
        raise InvalidSpec("give --network or --allow, not both")
    TemplateConfig(name=name).check()
    store = own_store(common)
    file, bases = path / "Dockerfile" if path.is_dir() else path, key_values(base, "--base")
    recipe = load_dockerfile(
        file,
        args=key_values(arg, "--arg"),
        bases=bases,
        base_config=base_config(common),
        network="allow" if allow else network or "open",
        allow_hosts=allow,
    )
    with progress(f"building {name}") as say:
        try:
            built = asyncio.run(_build(recipe, common.connection, say))
        except NotFound as error:
            name = str(error.details.get("template"))
            written = next((key for key, value in bases.items() if value == name), name)
            place = where_named(file, written)
            raise NotFound(f"{place}: {error}" if place else str(error), **error.details) from error
    prepared = store.resolve(built)
    config = TemplateConfig(
        name=name,
        user=prepared.user,
        workdir=prepared.workdir,
        env=prepared.env,
        entrypoint=recipe.entrypoint or (),
        cmd=recipe.cmd or (),
        needs=tuple(sorted({*prepared.needs, *recipe.needs})),
        base_layers=prepared.base_layers,
        source=f"dockerfile:{path.absolute()}",
    )
    return made(store.commit(config, prepared.layers), common)


def base_config(common: Common) -> Callable[[str], BaseConfig | None]:
    """What Dockerfiles go on from, by the name of an image that the node has or can have; None for another. The user
    and folder of an image of `image build debian` are for agents: to a Dockerfile it is what Docker's own is.
    """

    def of(name: str) -> BaseConfig | None:
        import barchan

        try:
            with barchan.connect(**common.connection) as client:
                image = client.image(name)
        except NotFound:
            return None
        if image.source.startswith("debian:"):
            return BaseConfig(env=image.env)
        return BaseConfig(image.user, image.workdir, image.env, image.entrypoint, image.cmd)

    return functools.cache(of)


async def _build(recipe: Recipe, connection: Mapping[str, Any], say: Callable[[str], None]) -> str:
    import barchan
    from barchan.sdk.build import build

    async with barchan.connect_async(**connection) as client:
        return await build(client, recipe, progress=say)


def layer_kind() -> LayerKind:
    """How layers made here are kept."""
    from barchan.backends.container.probe import mounts_erofs, requirements

    return "erofs" if mounts_erofs(requirements()) else "dir"


def made(template: Template, common: Common) -> int:
    """Say which image was made."""
    if common.json:
        print_json(image_info(template))
    else:
        sys.stdout.write(f"{template.name}  {template.digest}  {human_bytes(template.size_bytes)}\n")
    return OK
