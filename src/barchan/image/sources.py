"""Where images come from and go to, as people write it, and the way in: `pull`."""

import asyncio
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import NamedTuple

from aiohttp import ClientSession
from msgspec.structs import replace as with_fields

from barchan.errors import InvalidSpec, NotFound
from barchan.image.archives import Archive, Directory, LayoutSource, saved_or_layout
from barchan.image.directory import default_user, import_directory
from barchan.image.git import GitSource, make_tree
from barchan.image.intake import ImageSource, in_thread, take_in
from barchan.image.oci import template_config
from barchan.image.pack import DEFAULT_LIMITS, Limits, make_layer
from barchan.image.registry import Registry
from barchan.image.registry_auth import HUB, HUB_NAMES, read_credentials
from barchan.image.registry_image import RegistryImage, RegistrySource
from barchan.image.registry_rules import DEFAULT_RETRIES, Retries, new_session
from barchan.image.store import ImageStore
from barchan.image.template import GUEST_PATH, LayerKind, Template, TemplateConfig
from barchan.image.tools import Progress

KINDS = {
    "docker": "docker://HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]",
    "oci": "oci:PATH[:TAG]",
    "oci-archive": "oci-archive:FILE[:TAG]",
    "docker-archive": "docker-archive:FILE[:NAME]",
    "dir": "dir:PATH",
    "git": "git:PATH_OR_URL@COMMIT[:/WORKDIR]",
}
REPOSITORY = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*"
REGISTRY_IMAGE = re.compile(
    r"(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?)/"
    rf"(?P<repository>{REPOSITORY})(?::(?P<tag>\w[\w.-]{{0,127}}))?(?:@(?P<digest>sha256:[0-9a-f]{{64}}))?",
    re.ASCII,
)


class FileImage(NamedTuple):
    """An image in a file or folder; `tag` says which, where there are several."""

    kind: str
    path: Path
    tag: str | None


@dataclass(frozen=True, kw_only=True)
class RegistryOptions:
    """How registries are spoken to.

    Args:
        mirrors: `HOST[:PORT]`, asked before the registry itself.
        plain_http: Without TLS; loopback addresses never have it.
        auth_file: Docker's config file, for its credentials; None: nobody is told who we are.
    """

    mirrors: tuple[str, ...] = ()
    plain_http: bool = False
    auth_file: Path | None = None
    retries: Retries = DEFAULT_RETRIES


DEFAULT_REGISTRIES = RegistryOptions()


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a caller says of a template himself; None: what the source says."""

    name: str | None = None
    user: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] | None = None
    owner: int = 0  # of a repository's files

    def apply(self, config: TemplateConfig) -> TemplateConfig:
        given = {"name": self.name, "user": self.user, "workdir": self.workdir}
        changed = {key: value for key, value in given.items() if value is not None}
        made = with_fields(config, **changed, env={**config.env, **(self.env or {})})
        made.check()
        return made


NO_WISHES = Wishes()


def parse(text: str) -> RegistryImage | FileImage | GitSource:
    """What a source or destination names.

    Raises:
        InvalidSpec: It is none of the forms; the message shows the one that was meant, or all.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        hint = f" (try: dir:{text})" if Path(text).is_dir() else ""
        if not hint and re.fullmatch(rf"{REPOSITORY}(?::\w[\w.-]*)?", text, re.ASCII):
            hint = f" (try: docker://HOST/{text}, with the registry's own address)"
        raise InvalidSpec(f"{text!r} is none of {', '.join(KINDS.values())}{hint}")
    if kind == "git":
        return GitSource.parse(rest)
    if kind != "docker":
        if not rest:
            raise InvalidSpec(f"{text!r} is not {KINDS[kind]}")
        name, _, tag = (rest, "", "") if kind == "dir" or Path(rest).exists() else rest.partition(":")
        return FileImage(kind, Path(name).absolute(), tag or None)
    found = REGISTRY_IMAGE.fullmatch(rest.removeprefix("//")) if rest.startswith("//") else None
    if found is None or not re.search(r"[.:]|^localhost$", found["host"]):
        shown = re.sub(r"//[^/]*@", "//", text)
        raise InvalidSpec(f"{shown!r} is not {KINDS[kind]}, with the host of the registry's own address")
    host, repository = found["host"], found["repository"]
    if host in HUB_NAMES:
        host, repository = HUB, repository if "/" in repository else f"library/{repository}"
    return RegistryImage(host, repository, found["digest"] or found["tag"] or "latest")


async def pull(
    store: ImageStore,
    source: str,
    *,
    kind: LayerKind,
    progress: Progress,
    wishes: Wishes = NO_WISHES,
    registries: RegistryOptions = DEFAULT_REGISTRIES,
    limits: Limits = DEFAULT_LIMITS,
) -> Template:
    """Make an image of a source; an older image of its name gives way once the new one is whole.

    For an event loop that serves nothing else: it waits for the store's lock.

    Args:
        kind: How layers are kept here: `erofs`, or `dir` where the kernel can't mount such files.

    Raises:
        InvalidSpec: The source's text, its image or an entry of a layer is not what can be taken.
        NotFound: There is no such image, or none for this machine.
        Denied: A registry wants (other) credentials.
        BlobCorrupt: Bytes are not those that their names promise.
        CapacityError: A registry answers no more for now (`retry_after_ms`), or the disk is full.
        TransportError: A registry can't be reached, or fails.
    """
    place = parse(source)
    if isinstance(place, GitSource):
        return await in_thread(lambda stop: _pull_git(store, place, kind, progress, stop, wishes, limits))
    if isinstance(place, FileImage) and place.kind == "dir":
        return await in_thread(lambda stop: _pull_directory(store, place.path, kind, progress, wishes, limits))
    async with AsyncExitStack() as exits:
        origin: ImageSource
        if isinstance(place, RegistryImage):
            session = await exits.enter_async_context(new_session())
            hosts = (*registries.mirrors, place.host)
            clients = [open_registry(host, session, registries) for host in hosts]
            origin = RegistrySource(place, clients)
            name = str(place).removeprefix(f"{place.host}/")
            said = f"docker://{place}"
        else:
            origin = await asyncio.to_thread(_open_file, place)
            name = place.path.name.removesuffix(".tar") + (f":{place.tag}" if place.tag else "")
            said = f"{place.kind}:{place.path}{f':{place.tag}' if place.tag else ''}"
        progress("reading what the image is")
        found = await origin.image()
        if found.name:
            name = re.sub(r"^[^/]*[.:][^/]*/", "", found.name)
        config = wishes.apply(template_config(found.config, name=wishes.name or name, source=said))
        workspace = exits.enter_context(store.workspace())
        layers = await take_in(store, origin, found, config, workspace, kind=kind, limits=limits, progress=progress)
        progress("storing the layers")
        return store.commit(config, layers)


def open_registry(host: str, session: ClientSession, options: RegistryOptions) -> Registry:
    """A client of one registry or mirror, with the credentials that there are for it."""
    found = read_credentials(options.auth_file, host) if options.auth_file is not None else None
    return Registry(host, session, plain_http=options.plain_http, credentials=found, retries=options.retries)


def _open_file(place: FileImage) -> ImageSource:
    where = f"{place.kind}:{place.path}"
    if place.kind == "docker-archive":
        return saved_or_layout(place.path, where, place.tag)
    if place.kind == "oci":
        if not place.path.is_dir():
            raise NotFound(f"{place.path} is not a directory", path=str(place.path))
        return LayoutSource(Directory(place.path), where, place.tag)
    return LayoutSource(Archive(place.path), where, place.tag)


def _pull_directory(
    store: ImageStore, tree: Path, kind: LayerKind, progress: Progress, wishes: Wishes, limits: Limits
) -> Template:
    if not tree.is_dir():
        raise NotFound(f"{tree} is not a directory", path=str(tree))
    config = TemplateConfig(
        name=wishes.name or tree.name,
        user=wishes.user or default_user(tree, "agent"),
        env={"PATH": GUEST_PATH},
        source=f"dir:{tree}",
    )
    return import_directory(store, tree, wishes.apply(config), kind, progress, limits)


def _pull_git(
    store: ImageStore,
    source: GitSource,
    kind: LayerKind,
    progress: Progress,
    stop: Event,
    wishes: Wishes,
    limits: Limits,
) -> Template:
    name = re.sub(r"\.git$", "", source.repository.rstrip("/")).replace(":", "/").rpartition("/")[2]
    if wishes.name is not None:
        TemplateConfig(name=wishes.name).check()
    with store.workspace() as workspace:
        tree, commit = make_tree(source, workspace, progress, stop, limits=limits, owner=wishes.owner)
        config = TemplateConfig(
            name=f"{name}@{commit[:12]}",
            user="root",
            workdir=source.workdir,
            env={"PATH": GUEST_PATH},
            source=f"{source.shown.rpartition('@')[0]}@{commit}",
        )
        progress("packing the layer")
        return store.commit(wishes.apply(config), (make_layer(tree, workspace, kind, limits),))
