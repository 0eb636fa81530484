"""The documents of OCI and Docker images: descriptors, manifests, indexes and configs, checked before anything is used.

Formats: the image specification of the Open Container Initiative, and Docker's second manifest schema, which has the
same fields under other media types.
"""

import hashlib
import platform
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct, field

from barchan.errors import BlobCorrupt, InvalidSpec, NotFound
from barchan.image.template import GUEST_PATH, Template, TemplateConfig
from barchan.model.image import NEEDS_LABEL, needs_of

DOCUMENT_BYTES_MAX = 4 << 20  # of a manifest, an index or a config; what registries accept, too
INDEXES_MAX = 4  # an index in an index is usual, more is not
LAYERS_READ_MAX = 1000  # of one manifest; no real image comes near
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER_GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
LAYER_ZSTD = "application/vnd.oci.image.layer.v1.tar+zstd"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
ACCEPTED = (MANIFEST, INDEX, DOCKER_MANIFEST, DOCKER_INDEX)
INDEXES = (INDEX, DOCKER_INDEX)
REF_NAME = "org.opencontainers.image.ref.name"
SAVED_NAME = "io.containerd.image.name"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}
CREATED = "2000-01-01T00:00:00Z"  # of all that is exported: when it was made must not change a digest


class Platform(Struct, frozen=True, rename={"os_": "os"}):
    architecture: str = ""
    os_: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os_, self.architecture, self.variant) if part)


class Descriptor(Struct, frozen=True, rename="camel", omit_defaults=True):
    """Where bytes are named: their kind, digest and size."""

    media_type: str
    digest: str
    size: int
    platform: Platform | None = None
    annotations: dict[str, str] | None = None
    urls: tuple[str, ...] | None = None

    def check(self) -> "Descriptor":
        """Raise `InvalidSpec` for a digest that is not sha256, or a size that can't be."""
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", self.digest):
            raise InvalidSpec(
                f"digest {self.digest[:100]!r} is not sha256: and 64 hex digits; no other kind is read here"
            )
        if self.size < 0:
            raise InvalidSpec(f"{self.digest} has the size {self.size}")
        return self


class Index(Struct, frozen=True, rename="camel"):
    manifests: tuple[Descriptor, ...]
    media_type: str = INDEX
    schema_version: int = 2


class Manifest(Struct, frozen=True, rename="camel"):
    config: Descriptor
    layers: tuple[Descriptor, ...]
    media_type: str = MANIFEST
    schema_version: int = 2


class Running(Struct, frozen=True, rename="pascal"):
    """How an image starts; other runtimes write null where we write nothing."""

    user: str | None = None
    env: tuple[str, ...] | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    working_dir: str | None = None
    labels: dict[str, str] | None = None


class RootFs(Struct, frozen=True):
    diff_ids: tuple[str, ...] | None = None
    type: str = "layers"


class ImageConfig(Struct, frozen=True):
    architecture: str = ""
    os: str = ""
    config: Running | None = None
    rootfs: RootFs = field(default_factory=RootFs)


Document = TypeVar("Document", Index, Manifest, ImageConfig, Descriptor)


def sha256(data: bytes) -> str:
    """The digest of bytes, as descriptors write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def decode(data: bytes, kind: type[Document], what: str) -> Document:
    """Read a document.

    Raises:
        BlobCorrupt: It is too large, no JSON, or lacks what it must have.
    """
    if len(data) > DOCUMENT_BYTES_MAX:
        raise BlobCorrupt(f"{what} has more than {DOCUMENT_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BlobCorrupt(f"{what} can't be read: {error}") from error


def is_index(data: bytes, media_type: str = "") -> bool:
    """Whether a document lists manifests. What it is called by whoever sent it counts less than what it holds."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return media_type in INDEXES
    if isinstance(found, dict) and found.get("schemaVersion") == 1:
        raise InvalidSpec("this is an image of Docker's first manifest schema, which is not read (try: push it again)")
    return isinstance(found, dict) and "manifests" in found and "layers" not in found


def read_manifest(data: bytes, what: str) -> Manifest:
    """A manifest whose layers can all be had.

    Raises:
        BlobCorrupt: It can't be read.
        InvalidSpec: It has no layers of ours: too many, of another place, or no file systems at all.
    """
    manifest = decode(data, Manifest, what)
    if len(manifest.layers) > LAYERS_READ_MAX:
        raise InvalidSpec(f"{what} has {len(manifest.layers)} layers; at most {LAYERS_READ_MAX} are read")
    manifest.config.check()
    for layer in manifest.layers:
        layer.check()
        if "foreign" in layer.media_type or "nondistributable" in layer.media_type or layer.urls:
            raise InvalidSpec(f"{what}: layer {layer.digest} is kept elsewhere (a foreign layer), which is refused")
        if "encrypted" in layer.media_type or ".tar" not in layer.media_type:
            raise InvalidSpec(
                f"{what}: {layer.digest} is {layer.media_type[:100]!r}, which is no layer of a file system"
            )
    return manifest


def read_config(data: bytes, manifest: Manifest, what: str) -> ImageConfig:
    """The config of a manifest, with one diff_id for each of its layers."""
    config = decode(data, ImageConfig, what)
    diff_ids = config.rootfs.diff_ids or ()
    if len(diff_ids) != len(manifest.layers):
        raise BlobCorrupt(f"{what} names {len(diff_ids)} layers, its manifest {len(manifest.layers)}")
    for diff_id in diff_ids:
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", diff_id):
            raise InvalidSpec(f"{what}: diff_id {diff_id[:100]!r} is not sha256: and 64 hex digits")
    return config


def this_platform() -> Platform:
    machine = platform.machine()
    return Platform(ARCHITECTURES.get(machine, machine), "linux")


def tagged(index: Index, tag: str | None, what: str) -> Index:
    """What an index of several images has under a tag; without one, the only image that there is.

    Raises:
        NotFound: There is no such tag, or there are several and none is named; the message lists them.
    """
    names = [_names_of(item) for item in index.manifests]
    have = sorted({found[0] for found in names if found})
    if tag is None and len(have) > 1:
        raise NotFound(f"{what} holds several images: {', '.join(have)} (try: {what}:{have[0]})")
    meant = meant_by(tag) if tag is not None else set()
    named = zip(index.manifests, names, strict=True)
    manifests = tuple(item for item, found in named if tag is None or meant.intersection(found))
    if not manifests:
        hint = f" (try: {what}:{have[0]})" if have else ""
        raise NotFound(f"{what} has no image {tag or ''!r}; it has: {', '.join(have) or 'none with a tag'}{hint}")
    return Index(manifests=manifests)


def meant_by(name: str) -> set[str]:
    """What an image may be called whose name somebody wrote: the host that tools put before it is often left out."""
    return {prefix + name for prefix in ("", "docker.io/library/", "docker.io/", "localhost/")}


def _names_of(item: Descriptor) -> list[str]:
    """What a layout calls an image: one that `docker save` wrote has its whole name, others the tag alone."""
    notes = item.annotations or {}
    return [notes[key] for key in (SAVED_NAME, REF_NAME) if notes.get(key)]


def choose(index: Index, what: str, wanted: Platform | None = None) -> Descriptor:
    """The manifest of an index for this machine.

    Raises:
        NotFound: There is none; the message lists the platforms there are.
    """
    wanted = wanted or this_platform()
    offered = [item for item in index.manifests if item.platform is None or item.platform.os_ != "unknown"]
    for item in offered:
        place = item.platform
        if place is not None and (place.os_, place.architecture) == (wanted.os_, wanted.architecture):
            return item.check()
    if len(offered) == 1 and offered[0].platform is None:  # it doesn't say; its config will
        return offered[0].check()
    have = ", ".join(sorted({str(item.platform or "no platform") for item in offered})) or "nothing"
    raise NotFound(f"{what} has no image for {wanted}; it has: {have}")


class Found(NamedTuple):
    """An image as its source describes it; nothing of its layers has been read."""

    manifest: Manifest
    config: ImageConfig
    name: str = ""  # that the source has for it


async def find_image(
    root: bytes, media_type: str, fetch: Callable[[Descriptor], Awaitable[bytes]], what: str, tag: str | None = None
) -> Found:
    """Go from a manifest or an index of them to this machine's image.

    Args:
        fetch: Gives a document by its descriptor; what it gives is verified here.
    """
    for depth in range(INDEXES_MAX):
        if not is_index(root, media_type):
            manifest = read_manifest(root, f"the manifest of {what}")
            config = _verified(await fetch(manifest.config), manifest.config, what)
            return Found(manifest, read_config(config, manifest, f"the config of {what}"))
        index = decode(root, Index, f"the index of {what}")
        chosen = choose(tagged(index, tag, what) if depth == 0 else index, what)
        root, media_type = _verified(await fetch(chosen), chosen, what), chosen.media_type
    raise InvalidSpec(f"{what}: its indexes name each other more than {INDEXES_MAX} deep")


def _verified(data: bytes, described: Descriptor, what: str) -> bytes:
    if sha256(data) != described.digest:
        raise BlobCorrupt(f"{what}: {described.digest} has other bytes, of {sha256(data)}")
    return data


def template_config(image: ImageConfig, *, name: str, source: str) -> TemplateConfig:
    """What a sandbox of an image starts with.

    Raises:
        InvalidSpec: The image is for another machine, or says something that no sandbox could have.
    """
    wanted = this_platform()
    if (image.os or wanted.os_, image.architecture or wanted.architecture) != (wanted.os_, wanted.architecture):
        raise InvalidSpec(f"{source} is an image for {image.os}/{image.architecture}; this machine is {wanted}")
    running = image.config or Running()
    env = {"PATH": GUEST_PATH}
    for pair in running.env or ():
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise InvalidSpec(f"{source}: environment variable {pair[:100]!r} is not NAME=VALUE")
        env[key] = value
    workdir = running.working_dir or "/"
    config = TemplateConfig(
        name=name,
        user=running.user or "root",
        workdir=workdir if workdir.startswith("/") else f"/{workdir}",
        env=env,
        entrypoint=tuple(running.entrypoint or ()),
        cmd=tuple(running.cmd or ()),
        needs=needs_of((running.labels or {}).get(NEEDS_LABEL, ""), source),
        source=source,
    )
    config.check()
    return config


def image_config(template: Template, diff_ids: Sequence[str]) -> bytes:
    """A template's config in OCI form; `diff_ids` lowest first. Equal templates give equal bytes."""
    place = this_platform()
    running: dict[str, Any] = {
        "User": template.user,
        "Env": [f"{key}={value}" for key, value in template.env.items()],
        "WorkingDir": template.workdir,
    }
    if template.entrypoint:
        running["Entrypoint"] = template.entrypoint
    if template.cmd:
        running["Cmd"] = template.cmd
    if template.needs:
        running["Labels"] = {NEEDS_LABEL: " ".join(template.needs)}
    layers = [layer.digest for layer in reversed(template.layers)]
    return msgspec.json.encode(
        {
            "architecture": place.architecture,
            "config": running,
            "created": CREATED,
            "history": [{"created": CREATED, "created_by": f"layer {digest}"} for digest in layers],
            "os": place.os_,
            "rootfs": {"diff_ids": diff_ids, "type": "layers"},
        }
    )


def image_manifest(config: bytes, layers: Sequence[Descriptor]) -> bytes:
    described = Descriptor(CONFIG, sha256(config), len(config))
    value = {"config": described, "layers": layers, "mediaType": MANIFEST, "schemaVersion": 2}
    return msgspec.json.encode(value)


def image_index(manifests: Sequence[Descriptor]) -> bytes:
    return msgspec.json.encode({"manifests": manifests, "mediaType": INDEX, "schemaVersion": 2})
