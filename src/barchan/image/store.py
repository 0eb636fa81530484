"""The images of one machine on disk: templates by name, layers by digest.

    ROOT/templates/NAME.json   a `Template`; NAME percent-encoded
    ROOT/layers/SHA256.erofs   a layer (or SHA256.dir/ where the kernel can't mount EROFS files)
    ROOT/tmp/ID/               a build under way; its `lock` is held for as long as its builder lives
    ROOT/doubtful/LAYER        names a layer that may have come without a template, or lost its last one
    ROOT/lock                  held while any of the above changes names

Whatever has its final name is whole and on disk: it is written beside, synced and renamed. A builder that dies leaves
only its directory in `tmp`, which the next one removes; a layer is noted as doubtful before its use changes, so
that whoever holds the lock next can judge it. Readers take no lock.
"""

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, get_args
from urllib.parse import quote

import msgspec

from barchan.errors import BlobCorrupt, InvalidSpec, NotFound
from barchan.image.template import FORMAT, Layer, LayerKind, Template, TemplateConfig, template_digest
from barchan.model.node import ImageInfo

BUILD_HINT = "barchan image build debian"
DIGEST_PREFIX_MIN = 12
FILE_NAME_MAX = 240  # file systems take 255 bytes, and a write adds a few


class NewLayer(NamedTuple):
    """A finished layer that still lies in a workspace of the same store."""

    layer: Layer
    path: Path


class ImageStore:
    """Reads and changes one image directory; any number of processes may use the same one.

    Args:
        root: Made by the first build; a store that does not exist is empty.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._templates = root / "templates"
        self._layers = root / "layers"
        self._tmp = root / "tmp"
        self._doubtful = root / "doubtful"
        self._read_before: dict[Path, tuple[tuple[int, int, int], Template]] = {}

    def templates(self) -> list[Template]:
        """Every template, by name."""
        try:
            paths = sorted(path for path in self._templates.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            return []
        found = [_read(path) for path in paths]
        return sorted((template for template in found if template is not None), key=lambda template: template.name)

    def list(self) -> "list[ImageInfo]":
        """Every template, as nodes tell it to their clients."""
        return [image_info(template) for template in self.templates()]

    def resolve(self, name_or_digest: str) -> Template:
        """The template of that name or digest (`sha256:` is optional, so are digits after the first 12).

        Raises:
            NotFound: The message names what there is, or the command that builds a first one.
            BlobCorrupt: Its file is damaged, or of a newer release.
        """
        if len(_file_name(name_or_digest)) <= FILE_NAME_MAX:
            template = self._read_cached(self._template_path(name_or_digest))
            if template is not None:
                return template
        digest = name_or_digest.removeprefix("sha256:")
        templates = self.templates()
        if re.fullmatch(rf"[0-9a-f]{{{DIGEST_PREFIX_MIN},64}}", digest):
            hits = [template for template in templates if template.digest.startswith(digest)]
            if len({template.digest for template in hits}) == 1:
                return hits[0]
        names = ", ".join(template.name for template in templates)
        have = f"there are: {names}" if names else "the store is empty"
        raise NotFound(f"no image {name_or_digest!r}; {have} (try: {BUILD_HINT})", template=name_or_digest)

    def layer_path(self, layer: Layer) -> Path:
        """Where a layer lies: a file to mount, or a directory."""
        return self._layers / self._name(layer)

    @staticmethod
    def _name(layer: Layer) -> str:
        return f"{layer.digest}.{layer.kind}"

    def has_layer(self, digest: str) -> bool:
        """Whether a layer of this digest is kept here, in either form."""
        return any(self.layer_path(Layer(digest, kind)).exists() for kind in get_args(LayerKind))

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory of one's own to build in, on the store's file system; removed on leaving.

        Entering also removes what builders that died have left.
        """
        with self._locked():
            self._sweep_workspaces()
            path = self._tmp / secrets.token_hex(8)
            path.mkdir()
            lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            with self._locked():  # a sweep must not meet a directory half removed
                shutil.rmtree(path)
            os.close(lock)

    def commit(self, config: TemplateConfig, layers: tuple[NewLayer | Layer, ...]) -> Template:
        """Name a template and keep its layers (topmost first); an older template of this name gives way to it.

        Raises:
            NotFound: A `Layer`, which must be in the store, is not: its image was removed.
        """
        config.check()
        if len(_file_name(config.name)) > FILE_NAME_MAX:
            raise InvalidSpec(f"template name {config.name!r} is too long")
        brought = [item for item in layers if isinstance(item, NewLayer)]
        for new in brought:
            _sync_tree(new.path)
        stored = tuple(item.layer if isinstance(item, NewLayer) else item for item in layers)
        with self._locked():
            self._check_kept(set(stored) - {new.layer for new in brought})
            self._doubt(self._name(layer) for layer in stored)
            self._doubt(self._names_of(config.name))
            for new in brought:
                self._keep(new)
            template = Template(
                name=config.name,
                digest=template_digest(config, stored),
                layers=stored,
                size_bytes=sum(_size_bytes(self.layer_path(layer)) for layer in stored),
                created_unix_s=time.time(),
                user=config.user,
                workdir=config.workdir,
                env=config.env,
                source=config.source,
                entrypoint=config.entrypoint,
                cmd=config.cmd,
                base_layers=config.base_layers,
            )
            self._write(self._template_path(config.name), msgspec.json.format(msgspec.json.encode(template)))
            self._settle(stored)
        return template

    def remove(self, name_or_digest: str) -> Template:
        """Forget a template, and its layers unless another one needs them. Running sandboxes keep what they mounted."""
        with self._locked():
            template = self.resolve(name_or_digest)
            self._doubt(self._name(layer) for layer in template.layers)
            self._template_path(template.name).unlink()
            _sync_directory(self._templates)
            self._settle()
        return template

    def _check_kept(self, layers: Iterable[Layer]) -> None:
        for layer in layers:
            if not self.layer_path(layer).exists():
                raise NotFound(f"layer {layer.digest} is not in the store any more: its image was removed")

    def _read_cached(self, path: Path) -> Template | None:
        """As `_read`; a file that is the same as last time is not read again, since every create asks."""
        try:
            found = path.stat()
        except FileNotFoundError:
            self._read_before.pop(path, None)
            return None
        version = (found.st_ino, found.st_mtime_ns, found.st_size)
        known = self._read_before.get(path)
        if known is None or known[0] != version:
            template = _read(path)
            if template is None:
                return None
            known = self._read_before[path] = (version, template)
        return known[1]

    def _template_path(self, name: str) -> Path:
        return self._templates / _file_name(name)

    def _keep(self, new: NewLayer) -> None:
        """Give a layer its final name; content is the name, so one that is there already stays."""
        target = self.layer_path(new.layer)
        if not target.exists():
            new.path.rename(target)
            _sync_directory(self._layers)

    def _write(self, target: Path, data: bytes) -> None:
        beside = target.parent / f".{target.name}.new"  # one writer at a time: the store is locked
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(target)
        _sync_directory(target.parent)

    def _names_of(self, name: str) -> Iterable[str]:
        """The layers of the template of that name, if there is one; if its file is damaged, any layer may be."""
        try:
            template = self._read_cached(self._template_path(name))
        except BlobCorrupt:
            return [path.name for path in self._layers.iterdir()]
        return [self._name(layer) for layer in template.layers] if template is not None else []

    def _doubt(self, names: Iterable[str]) -> None:
        """Note layers before their use changes: whoever dies then leaves the notes to the next one."""
        for name in names:
            (self._doubtful / name).touch()

    def _settle(self, known_used: Iterable[Layer] = ()) -> None:
        """Remove the layers in doubt that no template names; templates are looked at only if there is a doubt."""
        used = {self._name(layer) for layer in known_used}
        notes = tuple(self._doubtful.iterdir())
        if any(note.name not in used for note in notes):
            try:
                used |= self._all_used()
            except BlobCorrupt:
                return  # nobody knows what it names: the doubts stay until it is built again or removed
        for note in notes:
            if note.name not in used:
                _remove(self._layers / note.name)
            note.unlink()

    def _all_used(self) -> set[str]:
        found = (self._read_cached(path) for path in self._templates.iterdir() if path.suffix == ".json")
        return {self._name(layer) for template in found if template is not None for layer in template.layers}

    def _sweep_workspaces(self) -> None:
        for path in self._tmp.iterdir():
            lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its builder is alive
            else:
                shutil.rmtree(path)
            finally:
                os.close(lock)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        for directory in (self._templates, self._layers, self._tmp, self._doubtful):
            directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._settle()  # what one that died has left
            yield
        finally:
            os.close(lock)


def _file_name(name: str) -> str:
    return quote(name, safe="@+:") + ".json"


def image_info(template: Template) -> ImageInfo:
    return ImageInfo(
        name=template.name,
        digest=template.digest,
        layers=tuple(layer.digest for layer in template.layers),
        size_bytes=template.size_bytes,
        created_unix_s=template.created_unix_s,
        user=template.user,
        workdir=template.workdir,
        env=template.env,
        base_layers=template.base_layers,
    )


def _read(path: Path) -> Template | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        template = msgspec.json.decode(data, type=Template)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BlobCorrupt(f"template {path.name} can't be read: {error} (try: build it again with --force)") from error
    if template.format != FORMAT:
        raise BlobCorrupt(f"template {path.name} has format {template.format}; this release reads {FORMAT}")
    return template


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _size_bytes(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(os.lstat(os.path.join(top, name)).st_size for top, _, names in os.walk(path) for name in names)


def _sync_tree(path: Path) -> None:
    """Force a finished layer to disk before it gets its name."""
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    else:
        os.sync()  # one call for a tree of files: fsync of each takes far longer


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
