"""The images of one machine on disk: templates by name, layers by digest.

    ROOT/templates/NAME.json   a `Template`; NAME percent-encoded
    ROOT/layers/SHA256.erofs   a layer (or SHA256.dir/ where the kernel can't mount EROFS files, or SHA256.lazy)
    ROOT/tmp/ID/               a build under way; its `lock` is held for as long as its builder lives
    ROOT/doubtful/LAYER        names a layer that may have come without a template, or lost its last one
    ROOT/live/NODE/            what the live sandboxes of a node are made of (see `image.holds`)
    ROOT/used/NAME.json        empty; its time is when a sandbox last started from the template
    ROOT/lock                  held while any of the above changes names; its content changes with any template

Whatever has its final name is whole and on disk: it is written beside, synced and renamed. A builder that dies leaves
only its directory in `tmp`, which the next one removes; a layer is noted as doubtful before its use changes, so
that whoever holds the lock next can judge it. Readers take no lock.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from barchan.errors import BlobCorrupt, Conflict, InvalidSpec, NotFound
from barchan.image import gc
from barchan.image.disk import NO_ROOM, needs_room, remove, size_bytes, sync_directory, sync_tree
from barchan.image.holds import Holder, held
from barchan.image.index import TemplateIndex, layer_file, template_file
from barchan.image.template import Layer, LayerKind, Template, TemplateConfig, template_digest
from barchan.model.gc import GcImage, GcLayer, GcReport, GcRequest
from barchan.model.image import FRESH_PREFIX, MADE_PREFIXES
from barchan.model.node import ImageInfo

BUILD_HINT = "barchan image build debian"
DIGEST_PREFIX_MIN = 12
FILE_NAME_MAX = 240  # file systems take 255 bytes, and a write adds a few
NAMES_TOLD = 20
KNOWN_MAX = 1 << 16  # remembered sizes of layers, and uses of templates
NOTE_USE_S = 60.0  # of one template, at most once in this time
GENERATION_BYTES = 16
LAYER_FILE = re.compile(rf"([0-9a-f]{{64}})\.({'|'.join(get_args(LayerKind))})")
_KINDS: tuple[LayerKind, ...] = get_args(LayerKind)


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
        self._used = root / "used"
        self._live = root / "live"
        self._index = TemplateIndex(self._templates)
        self._sizes: dict[str, int] = {}  # by file
        self._noted: dict[str, float] = {}

    def templates(self) -> list[Template]:
        """Every template that can be read, by name."""
        return self._index.all()

    def list(self) -> "list[ImageInfo]":
        """Every template, as nodes tell it to their clients."""
        templates = self.templates()
        uses = Counter(layer for template in templates for layer in template.layers)
        used = self.used_unix_s(templates)
        return [
            image_info(
                template,
                shared_bytes=sum(self.layer_bytes(layer) for layer in template.layers if uses[layer] > 1),
                used_unix_s=used[template.name],
            )
            for template in templates
        ]

    def find(self, name: str) -> Template | None:
        """The template of that name; it looks at one file only.

        Raises:
            BlobCorrupt: The file is damaged, or of a newer release.
        """
        file = template_file(name)
        return self._index.get(file) if len(file) <= FILE_NAME_MAX else None

    def resolve(self, name_or_digest: str) -> Template:
        """The template of that name or digest (`sha256:` is optional, so are digits after the first 12).

        For digests and unknown names it may look at every template.

        Raises:
            NotFound: The message names some of what there is, or the command that builds a first one.
            BlobCorrupt: Its file is damaged, or of a newer release.
        """
        template = self.find(name_or_digest)
        if template is not None:
            return template
        digest = name_or_digest.removeprefix("sha256:")
        if re.fullmatch(rf"[0-9a-f]{{{DIGEST_PREFIX_MIN},64}}", digest):
            hits = self._index.of_digest(digest)
            if len({template.digest for template in hits}) == 1:
                return hits[0]
        every = self._index.names()
        names = [name for name in every if not name.startswith((*MADE_PREFIXES, FRESH_PREFIX))] or every
        more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
        have = f"there are: {', '.join(names[:NAMES_TOLD])}{more}" if names else "the store is empty"
        hint = BUILD_HINT if name_or_digest == "debian" or not names else "barchan image pull, or one of these"
        raise NotFound(f"no image {name_or_digest!r}; {have} (try: {hint})", template=name_or_digest)

    def layer_path(self, layer: Layer) -> Path:
        """Where a layer lies: a file to mount, or a directory."""
        return self._layers / layer_file(layer)

    def layer_bytes(self, layer: Layer) -> int:
        """What a layer takes on this disk; 0 if it is not there. Of a lazy one: its index."""
        size = self._sizes.get(layer_file(layer))
        if size is None:
            try:
                size = size_bytes(self.layer_path(layer))
            except FileNotFoundError:
                return 0
            if len(self._sizes) >= KNOWN_MAX:  # most of them of layers that other processes have removed
                self._sizes.clear()
            self._sizes[layer_file(layer)] = size
        return size

    def has_layer(self, digest: str) -> bool:
        """Whether a layer of this digest is kept here, in any form."""
        return any(self.layer_path(Layer(digest, kind)).exists() for kind in _KINDS)

    def is_damaged(self, layer: Layer) -> bool:
        """Whether what is kept as this layer is something else. It reads all of it; of a directory nobody can tell."""
        path = self.layer_path(layer)
        try:
            if layer.kind == "lazy":
                from barchan.image.stored import read_lazy  # which not every store needs

                read_lazy(path)
            elif layer.kind == "erofs":
                with path.open("rb") as file:
                    return hashlib.file_digest(file, "sha256").hexdigest() != layer.digest
        except FileNotFoundError:
            pass
        except BlobCorrupt:
            return True
        return False

    def note_use(self, name: str) -> None:
        """Remember that a sandbox starts from a template now; a file's time is set at most once a minute for each."""
        now = time.monotonic()
        if now - self._noted.get(name, -NOTE_USE_S) < NOTE_USE_S:
            return
        if len(self._noted) >= KNOWN_MAX:
            self._noted.clear()
        self._noted[name] = now
        try:
            self._used.mkdir(exist_ok=True)
            (self._used / template_file(name)).touch()
        except OSError as error:
            # The sandbox starts all the same: only the order of what is removed first suffers.
            if error.errno not in (*NO_ROOM, errno.EROFS, errno.EACCES):
                raise

    def used_unix_s(self, templates: Iterable[Template]) -> dict[str, float]:
        """When a sandbox last started from each, by name and to the minute; the time it was made, if none has since."""
        noted = {}
        with suppress(FileNotFoundError):  # of the directory: nothing was ever noted
            for entry in os.scandir(self._used):
                with suppress(FileNotFoundError):  # its template has been removed meanwhile
                    noted[entry.name] = entry.stat().st_mtime
        return {
            template.name: max(noted.get(template_file(template.name), 0.0), template.created_unix_s)
            for template in templates
        }

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        """A directory of one's own to build in, on the store's file system; removed on leaving.

        Entering also removes what builders that died have left.

        Raises:
            CapacityError: There was no room on the disk, for this or for what was made in it.
        """
        with needs_room(self.root):
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

    def commit(
        self, config: TemplateConfig, layers: tuple[NewLayer | Layer, ...], *, replaces: str | None = None
    ) -> Template:
        """Name a template and keep its layers (topmost first); an older template of this name gives way to it.

        Args:
            replaces: The digest that the older one must have.

        Raises:
            Conflict: The older one is not the one that was to be replaced.
            NotFound: A `Layer`, which must be in the store, is not: its image was removed.
            CapacityError: The disk is full; nothing of it is left.
        """
        config.check()
        if len(template_file(config.name)) > FILE_NAME_MAX:
            raise InvalidSpec(f"template name {config.name!r} is too long")
        brought = [item for item in layers if isinstance(item, NewLayer)]
        stored = tuple(item.layer if isinstance(item, NewLayer) else item for item in layers)
        with needs_room(self.root):
            for new in brought:
                sync_tree(new.path)
            damaged = {new.layer for new in brought if self.is_damaged(new.layer)}
            with self._locked() as lock:
                if replaces is not None and self.resolve(config.name).digest != replaces:
                    raise Conflict(f"image {config.name!r} was made anew meanwhile", template=config.name)
                self._check_kept(set(stored) - {new.layer for new in brought})
                self._doubt(layer_file(layer) for layer in stored)
                self._doubt(self._layer_files_of(config.name))
                for new in brought:
                    self._keep(new, is_damaged=new.layer in damaged)
                template = Template(
                    name=config.name,
                    digest=template_digest(config, stored),
                    layers=stored,
                    size_bytes=sum(self.layer_bytes(layer) for layer in stored),
                    created_unix_s=time.time(),
                    user=config.user,
                    workdir=config.workdir,
                    env=config.env,
                    source=config.source,
                    entrypoint=config.entrypoint,
                    cmd=config.cmd,
                    base_layers=config.base_layers,
                    disk=config.disk,
                    needs=config.needs,
                )
                self._write(lock, template)
                self._settle(lock, stored)
        return template

    def remove(self, name_or_digest: str) -> Template:
        """Forget a template, and its layers unless another one or a live sandbox needs them.

        One whose file is damaged, or of a newer release, goes by its name; what it was is not told then.
        """
        with self._locked() as lock:
            try:
                template = self.resolve(name_or_digest)
            except BlobCorrupt:
                template = _unreadable(name_or_digest)
            self._forget(lock, template)
            sync_directory(self._templates)
            self._settle(lock)
        return template

    def hold_as(self, node: str) -> Holder:
        """Notes of one node, of what its live sandboxes are made of."""
        with self._locked():
            return Holder(self._live, node)

    def settle(self) -> bool:
        """Remove layers that nothing needs any more. False: there were none in doubt."""
        if not (self._doubtful.exists() and any(self._doubtful.iterdir())):
            return False
        with self._locked():  # which does it
            return True

    def collect(self, asked: GcRequest, busy: Collection[str] = ()) -> GcReport:
        """Remove the layers that no template names, then images by the rules of `image.gc`.

        Args:
            busy: Digests of layers that are about to be used; those of live sandboxes stay anyhow.

        Raises:
            BlobCorrupt: A template can't be read, so that nobody knows which layers it names. Nothing was removed.
        """
        with self._locked() as lock:
            self._sweep_workspaces()
            uses = self._index.uses(_generation(lock))
            in_use = held(self._live)
            unnamed = [layer for layer in self._layers_here() if not uses.get(layer_file(layer))]
            left_overs = [layer for layer in unnamed if layer.digest not in in_use]
            found = tuple(GcLayer(layer.digest, layer.kind, self.layer_bytes(layer)) for layer in left_overs)
            templates = self.templates()
            used = self.used_unix_s(templates)
            sizes = {layer: self.layer_bytes(layer) for template in templates for layer in template.layers}
            chosen = gc.choose(templates, used, sizes, in_use.union(busy), asked, time.time())
            if not asked.dry_run:
                self._doubt(layer_file(layer) for layer in left_overs)
                for item in chosen:
                    self._forget(lock, item.template)
                sync_directory(self._templates)
                self._settle(lock)
                self._forget_uses()
        freed = sum(item.freed_bytes for item in chosen)
        return GcReport(
            images=tuple(
                GcImage(
                    name=item.template.name,
                    digest=item.template.digest,
                    freed_bytes=item.freed_bytes,
                    used_unix_s=used[item.template.name],
                )
                for item in chosen
            ),
            left_overs=found,
            freed_bytes=freed + sum(layer.size_bytes for layer in found),
            kept_bytes=sum(sizes.values()) - freed,
            dry_run=asked.dry_run,
        )

    def _layers_here(self) -> tuple[Layer, ...]:
        found = (LAYER_FILE.fullmatch(path.name) for path in self._layers.iterdir())
        return tuple(msgspec.convert((match[1], match[2]), Layer) for match in found if match)

    def _forget_uses(self) -> None:
        for path in self._used.iterdir():
            if not (self._templates / path.name).exists():
                path.unlink()

    def _forget(self, lock: int, template: Template) -> None:
        """Unlink a template's file, its layers being in doubt then."""
        self._doubt(self._layer_files_of(template.name))
        file = template_file(template.name)
        before, after = _next_generation(lock)
        (self._templates / file).unlink()
        (self._used / file).unlink(missing_ok=True)
        self._noted.pop(template.name, None)
        self._index.changed(file, None, before, after)

    def _check_kept(self, layers: Iterable[Layer]) -> None:
        for layer in layers:
            if not self.layer_path(layer).exists():
                raise layer_gone(layer)

    def _keep(self, new: NewLayer, *, is_damaged: bool) -> None:
        """Give a layer its final name; content is the name, so one that is there already stays unless it is damaged."""
        target = self.layer_path(new.layer)
        if is_damaged or not target.exists():
            new.path.rename(target)
            sync_directory(self._layers)
            self._sizes.pop(target.name, None)

    def _write(self, lock: int, template: Template) -> None:
        file = template_file(template.name)
        beside = self._tmp / f"{file}.new"  # one writer at a time: the store is locked
        try:
            with beside.open("wb") as new:
                new.write(msgspec.json.format(msgspec.json.encode(template)))
                new.flush()
                os.fsync(new.fileno())
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        before, after = _next_generation(lock)
        beside.rename(self._templates / file)
        sync_directory(self._templates)
        self._index.changed(file, template, before, after)

    def _layer_files_of(self, name: str) -> Iterable[str]:
        """The layers of the template of that name, if there is one; if its file is damaged, any layer may be."""
        try:
            template = self._index.get(template_file(name))
        except BlobCorrupt:
            return [path.name for path in self._layers.iterdir()]
        return [layer_file(layer) for layer in template.layers] if template is not None else []

    def _doubt(self, names: Iterable[str]) -> None:
        """Note layers before their use changes: whoever dies then leaves the notes to the next one."""
        for name in names:
            (self._doubtful / name).touch()

    def _settle(self, lock: int, known_used: Iterable[Layer] = ()) -> None:
        """Remove the layers in doubt that no template names; templates are looked at only if there is a doubt.

        Those that live sandboxes need stay in doubt until these have ended.
        """
        notes = tuple(self._doubtful.iterdir())
        used: Container[str] = {layer_file(layer) for layer in known_used}
        in_use: Container[str] = ()
        if doubted := [note for note in notes if note.name not in used]:
            in_use = held(self._live)
        if any(note.stem not in in_use for note in doubted):
            try:
                used = self._index.uses(_generation(lock))
            except BlobCorrupt:
                return  # nobody knows what it names: the doubts stay until it is built again or removed
        for note in notes:
            if note.name not in used:
                if note.stem in in_use:
                    continue
                self._drop(note.name)
            note.unlink()

    def _drop(self, file: str) -> None:
        remove(self._layers / file)
        self._sizes.pop(file, None)

    def _sweep_workspaces(self) -> None:
        for path in self._tmp.iterdir():
            if not path.is_dir():  # a template that its writer, who held the store's lock, never came to name
                path.unlink()
                continue
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
    def _locked(self) -> Iterator[int]:
        for directory in (self._templates, self._layers, self._tmp, self._doubtful, self._used):
            directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._settle(lock)  # what one that died has left
            try:
                yield lock
            except BaseException:
                self._settle(lock)
                raise
        finally:
            os.close(lock)


def image_info(template: Template, *, shared_bytes: int = 0, used_unix_s: float = 0.0) -> ImageInfo:
    return ImageInfo(
        name=template.name,
        digest=template.digest,
        layers=tuple(layer.digest for layer in template.layers),
        size_bytes=template.size_bytes,
        created_unix_s=template.created_unix_s,
        user=template.user,
        workdir=template.workdir,
        env=template.env,
        kind=template.kind,
        needs=template.needs,
        base_layers=template.base_layers,
        shared_bytes=shared_bytes,
        used_unix_s=used_unix_s,
        entrypoint=template.entrypoint,
        cmd=template.cmd,
        source=template.source,
    )


def _unreadable(name: str) -> Template:
    """What can be said of a template whose file can't be read."""
    return Template(
        name=name, digest="", layers=(), size_bytes=0, created_unix_s=0.0, user="", workdir="", env={}, source=""
    )


def layer_gone(layer: Layer) -> NotFound:
    return NotFound(f"layer {layer.digest} is not in the store any more: its image was removed", layer=layer.digest)


def _generation(lock: int) -> bytes:
    return os.pread(lock, GENERATION_BYTES, 0)


def _next_generation(lock: int) -> tuple[bytes, bytes]:
    """Tell every index of this store, before a template changes, that its count is not good any more."""
    before, after = _generation(lock), secrets.token_bytes(GENERATION_BYTES)
    os.pwrite(lock, after, 0)
    return before, after
