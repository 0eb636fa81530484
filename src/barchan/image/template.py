"""What a template and a layer are, and how a template gets its digest."""

import hashlib
import re
from pathlib import PurePosixPath
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from barchan.errors import InvalidSpec
from barchan.model.image import GUEST_PATH as GUEST_PATH
from barchan.model.sandbox import DEFAULT_USER, Name

FORMAT = 1
LAYERS_MAX = 64  # that a sandbox can be made of
# lazy: its index is here, its data in a blob store, read on demand
LayerKind = Literal["erofs", "dir", "lazy"]


class Layer(NamedTuple):
    """One immutable filesystem diff: sha256 of its EROFS form, and how this store keeps it."""

    digest: str
    kind: LayerKind


class TemplateConfig(Struct, frozen=True, kw_only=True):
    """What a sandbox of a template starts with.

    Attributes:
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
    format: int = FORMAT


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
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()
