"""What a template and a layer are, and how a template gets its digest."""

import hashlib
import re
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from barchan.errors import InvalidSpec
from barchan.model.image import GUEST_PATH as GUEST_PATH
from barchan.model.image import TemplateKind
from barchan.model.sandbox import DEFAULT_USER, Name, Need

FORMAT = 1
LAYERS_MAX = 64  # that a sandbox can be made of
DISK_BYTES_MAX = 1 << 50
USER_DATA_CHARS_MAX = 16384
# lazy: its index is here, its data in a blob store, read on demand
LayerKind = Literal["erofs", "dir", "lazy"]


class Layer(NamedTuple):
    """One immutable filesystem diff: sha256 of its EROFS form, and how this store keeps it."""

    digest: str
    kind: LayerKind


class Disk(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a template is whose sandboxes are whole machines; its layers then hold `FOLDER/` and nothing else.

    Attributes:
        format: Of the lowest disk, `FOLDER/disk`; those above it are qcow2.
        base_bytes: Of the lowest disk, as a guest sees it; `size_bytes`: of the topmost one.
        depth: How many disks lie above the lowest one, for what a sandbox has written: `FOLDER/disk-1` and on.
        boot: `bios`: from the disk. `kernel`: `FOLDER/vmlinuz` and `FOLDER/initrd`, with the words of `append`.
        user_data: What cloud-init in the guest is told beside our own. Left out where there is nothing, so that images
            without are what they were.
    """

    FOLDER: ClassVar[str] = "machine"

    format: Literal["raw", "qcow2"]
    base_bytes: Annotated[int, Meta(ge=512, le=DISK_BYTES_MAX)]
    size_bytes: Annotated[int, Meta(ge=512, le=DISK_BYTES_MAX)]
    depth: Annotated[int, Meta(ge=0, le=LAYERS_MAX)] = 0
    boot: Literal["bios", "kernel"] = "bios"
    append: Annotated[str, Meta(max_length=2048)] = ""
    user_data: Annotated[str, Meta(min_length=1, max_length=USER_DATA_CHARS_MAX)] | UnsetType = UNSET

    @staticmethod
    def file_at(depth: int) -> str:
        """Where the disk of that depth lies in a layer."""
        return f"{Disk.FOLDER}/disk-{depth}" if depth else f"{Disk.FOLDER}/disk"

    def above(self, room_mib: int) -> "Disk":
        """With the disk of one sandbox above: as large as the lowest one and `room_mib`, and never smaller."""
        size_bytes = min(DISK_BYTES_MAX, max(self.size_bytes, self.base_bytes + (room_mib << 20)))
        return replace(self, size_bytes=size_bytes, depth=self.depth + 1)


class TemplateConfig(Struct, frozen=True, kw_only=True):
    """What a sandbox of a template starts with.

    Attributes:
        disk: It is a machine's disk, and not the root of a file system.
        needs: What a backend must have for its sandboxes, in order and each once.
        entrypoint, cmd: What other runtimes start; kept for them, nothing here starts by itself.
        source: What it was built from, in one line.
        base_layers: How many of its bottom layers are those of the image it was built on; 0: it stands on its own.
    """

    name: str
    user: str = DEFAULT_USER
    workdir: str = "/"
    env: dict[str, str] = {}
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    source: str = ""
    base_layers: int = 0
    disk: Disk | None = None
    needs: tuple[Need, ...] = ()

    def check(self) -> None:
        """Raise `InvalidSpec` for a name, user, directory or variable that no sandbox could have."""
        try:
            msgspec.convert(self.name, Name)
        except msgspec.ValidationError:
            raise InvalidSpec(
                f"template name {self.name!r} is not letters, digits and ._:/@+- (first a letter or digit, at most 128)"
            ) from None
        if re.fullmatch(r"[0-9a-f]{12,}", self.name) or self.name.startswith("sha256:"):
            raise InvalidSpec(f"template name {self.name!r} looks like a digest")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?", self.user):
            raise InvalidSpec(f"user {self.user!r} is not NAME, UID, NAME:GROUP or UID:GID")
        if not PurePosixPath(self.workdir).is_absolute() or "\0" in self.workdir:
            raise InvalidSpec(f"workdir {self.workdir!r} is not an absolute path")
        for key, value in self.env.items():
            if not key or "=" in key or "\0" in key + value:
                raise InvalidSpec(f"environment variable {key!r} is not NAME=VALUE")


class Template(Struct, frozen=True, kw_only=True):
    """A recipe for sandboxes, as the store keeps it.

    Attributes:
        digest: sha256 of layers, user, workdir and env: equal digests start equal sandboxes.
        layers: Topmost first.
        size_bytes: Of its layers on disk.
        disk: It is a machine's disk, and not the root of a file system.
        needs: What a backend must have for its sandboxes.
    """

    name: str
    digest: str
    layers: tuple[Layer, ...]
    size_bytes: int
    created_unix_s: float
    user: str
    workdir: str
    env: dict[str, str]
    source: str
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    base_layers: int = 0
    disk: Disk | None = None
    needs: tuple[Need, ...] = ()
    format: int = FORMAT

    @property
    def kind(self) -> TemplateKind:
        return "root" if self.disk is None else "disk"


def need_root(template: Template, backend: str) -> None:
    """Raise `InvalidSpec` for a machine's disk, of which this backend can't make a sandbox."""
    if template.disk is not None:
        raise InvalidSpec(
            f"image {template.name!r} is a machine's disk, and a {backend} sandbox needs the root of a file system "
            '(try: backend="vm")',
            template=template.name,
        )


def template_digest(config: TemplateConfig, layers: tuple[Layer, ...]) -> str:
    """sha256 of the canonical JSON of what a sandbox sees; name, age and kind of storage do not count."""
    content: dict[str, object] = {
        "env": dict(sorted(config.env.items())),
        "layers": [layer.digest for layer in layers],
        "user": config.user,
        "workdir": config.workdir,
    }
    if config.entrypoint or config.cmd:
        content |= {"entrypoint": config.entrypoint, "cmd": config.cmd}
    if config.disk is not None:
        content |= {"disk": config.disk}
    if config.needs:
        content |= {"needs": config.needs}
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()
