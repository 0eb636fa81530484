"""The node's images: found by name, put together when a sandbox is made, moved to other bases.

Layers are read and written in threads, one after the other: nothing here holds up the event loop.
"""

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from msgspec.structs import replace

from barchan.core.finished import finished
from barchan.errors import BarchanError, Conflict, InvalidSpec, NotFound, RequirementMissing
from barchan.image import compose
from barchan.image.compose import Clash, Meeting
from barchan.image.diff_tar import merge
from barchan.image.erofs import Erofs
from barchan.image.implied import MTIME_NS as IMPLIED_MTIME_NS
from barchan.image.implied import restore
from barchan.image.lazy_layer import open_lazy
from barchan.image.opaque import drop_needless_opaque
from barchan.image.pack import DEFAULT_LIMITS
from barchan.image.store import ImageStore, NewLayer, image_info, layer_gone
from barchan.image.template import LAYERS_MAX, Layer, Template, TemplateConfig, template_digest
from barchan.model.image import BUILT_PREFIX, MADE_PREFIXES, MERGED_PREFIX, NameRequest, Rebased, RebaseRequest
from barchan.model.node import ImageInfo
from barchan.model.sandbox import SandboxSpec
from barchan.node.store_images import StoreImages

MERGED_LAYERS = 24  # what a stack that is too long comes down to: the next merge is far, and lookups stay cheap
MEETINGS_MAX = 100_000  # remembered, in some 200 bytes each
RENAMES_MAX = 10_000
REBASE_BATCH = 50


class NodeImages:
    """Templates for sandboxes, from one image store; what is not there is asked of `remote`."""

    def __init__(self, store: ImageStore, store_url: str = "") -> None:
        self.store = store
        self.remote = StoreImages(store, store_url) if store_url else None
        self._clashes: dict[bytes, Clash | None] = {}  # by the keys of meetings
        self._renames = functools.lru_cache(RENAMES_MAX)(self._look_for_renames)
        self._implies = functools.lru_cache(RENAMES_MAX)(self._look_for_implied)
        self._looking = asyncio.Lock()
        self._merging = asyncio.Lock()

    async def resolve(self, name: str) -> Template:
        """The image of that name or digest. Those that nodes make for themselves are asked of no store.

        Raises:
            NotFound: There is none. BlobCorrupt: Its file is damaged.
            BlobUnavailable: It is not here, and the blob store can't be asked.
        """
        if (template := self.store.find(name)) is not None:
            return template
        try:  # a digest, or unknown: that may mean to look at all of them
            return await asyncio.to_thread(self.store.resolve, name)
        except NotFound:
            if self.remote is None or name.startswith(MADE_PREFIXES):
                raise
        return await self.remote.fetch(name)

    async def template_for(self, spec: SandboxSpec) -> Template:
        """What a sandbox is made of: its template's layers, above them those that the images of `spec.layers` add.

        Raises:
            NotFound: No such image.
            Conflict: One of the images has a directory where another has none, or they share a layer between which one
                has renamed directories.
            InvalidSpec: More layers than a sandbox can have, and of a kind that can't be merged.
        """
        base = await self.resolve(spec.template)
        above = [await self.resolve(name) for name in spec.layers]
        for used in (base, *above):
            self.store.note_use(used.name)
        if not above and len(base.layers) <= LAYERS_MAX:
            return base
        met = list(compose.meetings(base, above))
        clashes = await self._look(meeting for _, _, meeting in met)
        for upper, lower, meeting in met:
            if (clash := clashes[meeting]) is not None:
                raise compose.clash_error(upper.name, lower.name, clash)
        template = compose.compose(base, above)
        stacks = [*map(compose.own_layers, above), base.layers]
        await self._check_order(f"images {' + '.join((spec.template, *spec.layers))}", stacks, template.layers)
        stack = await self._with_directories(template, stacks[:-1])
        layers, base_layers = await self.fitted(stack, template.base_layers, LAYERS_MAX)
        if layers == template.layers:
            return template
        digest = template_digest(compose.config_of(template), layers)
        return replace(template, digest=digest, layers=layers, base_layers=base_layers)

    # conflicts

    def open_layer(self, layer: Layer) -> Erofs | None:
        """A layer to look into, to be closed; None if it is kept in a way that can't be. Blocking.

        Raises:
            NotFound: It is not in the store any more. BlobCorrupt, RequirementMissing: It can't be read.
            BlobUnavailable: It is lazily kept, and its blob store can't be asked.
        """
        if layer.kind == "dir":
            return None
        path = self.store.layer_path(layer)
        try:
            return open_lazy(path) if layer.kind == "lazy" else Erofs.open(path)
        except FileNotFoundError as error:
            raise layer_gone(layer) from error

    async def _look(self, met: Iterable[Meeting]) -> dict[Meeting, Clash | None]:
        """What clashes in each meeting; one that was looked at before costs nothing."""
        asked = {meeting.key: meeting for meeting in met}
        found = {key: self._clashes[key] for key in asked if key in self._clashes}
        if len(found) < len(asked):
            async with self._looking:
                unknown = {key: meeting for key, meeting in asked.items() if key not in self._clashes}
                self._clashes |= await finished(asyncio.to_thread(self._look_at, unknown))
                found |= {key: self._clashes[key] for key in asked if key in self._clashes}
                for key in list(self._clashes)[: max(0, len(self._clashes) - MEETINGS_MAX)]:
                    del self._clashes[key]
        return {meeting: found[key] for key, meeting in asked.items()}

    def _look_at(self, met: Mapping[bytes, Meeting]) -> dict[bytes, Clash | None]:
        opened: dict[Layer, Erofs | None] = {}
        with ExitStack() as closing:

            def open_once(layer: Layer) -> Erofs | None:
                if layer not in opened:
                    opened[layer] = erofs = self.open_layer(layer)
                    if erofs is not None:
                        closing.callback(erofs.close)
                return opened[layer]

            return {key: compose.clash_of(meeting, open_once) for key, meeting in met.items()}

    async def _check_order(self, what: str, stacks: Sequence[Sequence[Layer]], layers: Sequence[Layer]) -> None:
        """Refuse what would lose directories, see `compose.turned_over`."""
        for layer in compose.turned_over(stacks, layers):
            if await finished(asyncio.to_thread(self._renames, layer)):
                raise compose.turned_over_error(what, layer)

    def _look_for_renames(self, layer: Layer) -> bool:
        opened = self.open_layer(layer)
        if opened is None:
            return False
        with opened:
            return compose.renames(opened)

    def drop_needless_opaque(self, packed: Path, below: Sequence[Layer]) -> None:
        """Take out of a new layer what would hide other images in other stacks and hides nothing in this. Blocking.

        Where a layer below can't be looked into, all stays as it is.
        """
        with ExitStack() as closing:
            opened = self._opened(below, closing)
            if opened is not None:
                drop_needless_opaque(packed, opened)

    def _opened(self, layers: Sequence[Layer], closing: ExitStack) -> list[Erofs] | None:
        """All of them to look into, until `closing`; None if one can't be: it is elsewhere, or compressed as once."""
        opened: list[Erofs] = []
        for layer in layers:
            if layer.kind == "lazy":
                return None
            try:
                erofs = self.open_layer(layer)
            except RequirementMissing:
                return None
            if erofs is None:
                return None
            opened.append(closing.enter_context(erofs))
        return opened

    # directories of which the topmost layer that has them says nothing

    async def _with_directories(self, template: Template, above: Sequence[Sequence[Layer]]) -> tuple[Layer, ...]:
        """A stack with what its lower layers say of directories that those of `above` only have entries in.

        Made once for the same stack, as an image of its own. Where a layer can't be looked into, all stays as it is.
        """
        own = [layer for layers in above for layer in layers if layer in template.layers]
        if not own or not await finished(asyncio.to_thread(lambda: any(map(self._implies, own)))):
            return template.layers
        content = "directories:" + "".join(layer.digest for layer in template.layers)
        name = MERGED_PREFIX + hashlib.sha256(content.encode()).hexdigest()[:24]
        async with self._merging:
            made = self.store.find(name)
            if made is None:
                made = await finished(asyncio.to_thread(self._make_directories, name, template.layers))
        if made is None:
            return template.layers
        self.store.note_use(name)
        return (*made.layers, *template.layers)

    def _look_for_implied(self, layer: Layer) -> bool:
        if layer.kind == "lazy":
            return False
        try:
            opened = self.open_layer(layer)
        except RequirementMissing:
            return False
        if opened is None:
            return False
        with opened:
            return any(inode.is_dir and inode.mtime_ns == IMPLIED_MTIME_NS for _, inode in opened.walk())

    def _make_directories(self, name: str, layers: tuple[Layer, ...]) -> Template | None:
        with ExitStack() as closing, self.store.workspace() as workspace:
            opened = self._opened(layers, closing)
            if opened is None:
                return None
            target = workspace / "layer.erofs"
            digest = restore(opened, target, limits=DEFAULT_LIMITS)
            if digest is None:
                return None
            config = TemplateConfig(name=name, source=f"directories of {len(layers)} layers")
            return self.store.commit(config, (NewLayer(Layer(digest, "erofs"), target),))

    # long stacks

    async def fitted(self, layers: tuple[Layer, ...], base_layers: int, most: int) -> tuple[tuple[Layer, ...], int]:
        """At most `most` layers that show what these do, and how many of them are the base's: some are made one.

        Raises:
            InvalidSpec: Too many of them are of a kind that can't be merged.
        """
        while len(layers) > most:
            sizes = await asyncio.to_thread(self._sizes, layers)
            run = compose.run_to_merge(sizes, len(layers) - base_layers, len(layers) - min(most, MERGED_LAYERS))
            if run is None:
                raise InvalidSpec(
                    f"{len(layers) + LAYERS_MAX - most} layers are more than the {LAYERS_MAX} that a sandbox can have, "
                    "and can't be merged: only EROFS files that are all here can be",
                    layers=len(layers),
                )
            merged = await self._merged(layers, run)
            if run.start >= len(layers) - base_layers:
                base_layers -= len(run) - 1
            layers = (*layers[: run.start], merged, *layers[run.stop :])
        return layers, base_layers

    def _sizes(self, layers: Sequence[Layer]) -> list[int | None]:
        """Bytes of each that can be merged; the lowest one is what everything else stands on, and stays."""
        paths = [self.store.layer_path(layer) if layer.kind == "erofs" else None for layer in layers[:-1]]
        return [*(path.stat().st_size if path is not None and path.exists() else None for path in paths), None]

    async def _merged(self, layers: tuple[Layer, ...], run: range) -> Layer:
        """One layer in place of a run of them, made once: it has an image of its own, named after what was merged.

        What is below counts, too: directories that were renamed from there are written out whole.
        """
        parts = (layers[run.start : run.stop], layers[run.stop :])
        content = ":".join("".join(layer.digest for layer in part) for part in parts)
        name = MERGED_PREFIX + hashlib.sha256(content.encode()).hexdigest()[:24]
        async with self._merging:
            template = self.store.find(name)
            if template is None:
                template = await finished(asyncio.to_thread(self._merge, name, layers, run))
        self.store.note_use(name)
        return template.layers[0]

    def _merge(self, name: str, layers: tuple[Layer, ...], run: range) -> Template:
        with ExitStack() as closing, self.store.workspace() as workspace:
            opened = self._opened(layers[run.start : run.stop], closing)
            if opened is None:
                raise InvalidSpec("layers that are not here as EROFS files can't be merged")
            target = workspace / "layer.erofs"
            digest = merge(opened, target, below=self._opened(layers[run.stop :], closing))
            config = TemplateConfig(name=name, source=f"{len(run)} layers in one")
            return self.store.commit(config, (NewLayer(Layer(digest, "erofs"), target),))

    # names and bases

    async def name(self, asked: NameRequest) -> ImageInfo:
        """Give an image one more name.

        Raises:
            NotFound: No such image. InvalidSpec: No image can have that name.
        """
        template = await self.resolve(asked.image)
        config = compose.config_of(template, name=asked.name)
        return image_info(await finished(asyncio.to_thread(self.store.commit, config, template.layers)))

    async def rebase(self, asked: RebaseRequest) -> AsyncGenerator[Rebased, None]:
        """Put images on another base, one after the other, each at once and whole; gives each as it is done.

        Raises:
            NotFound: One of the named images, or a base, is not there; nothing was changed.
            InvalidSpec: Both bases are the same; nothing was changed.
        """
        old, new = await self.resolve(asked.old), await self.resolve(asked.new)
        if compose.digests(old.layers) == compose.digests(new.layers):
            raise InvalidSpec(
                f"images {asked.old!r} and {asked.new!r} have the same layers: there is nothing to replace"
            )
        if asked.names:
            chosen = [await self.resolve(name) for name in dict.fromkeys(asked.names)]
        else:
            every = await asyncio.to_thread(self.store.templates)
            chosen = [template for template in every if _is_meant(template, old, new)]
        for start in range(0, len(chosen), REBASE_BATCH):
            batch = chosen[start : start + REBASE_BATCH]
            met = [meeting for template in batch if (meeting := _new_ground(template, old, new)) is not None]
            with suppress(BarchanError):  # cheaper together, and remembered; which one can't be read is seen below
                await self._look(met)
            for template in batch:
                error = await self._clash_on(template, old, new)
                yield await finished(asyncio.to_thread(self._rebase, template, old, new, len(chosen), error))

    async def _clash_on(self, template: Template, old: Template, new: Template) -> BarchanError | None:
        """Why an image can't go to a new base, as far as its layers say; one that can't be read can't."""
        meeting = _new_ground(template, old, new)
        if meeting is None:
            return None
        try:
            clash = (await self._look([meeting]))[meeting]
            if clash is not None:
                return compose.clash_error(template.name, new.name, clash)
            stacks = (template.layers[: -len(old.layers)], new.layers)
            _, layers = compose.on_another_base(template, old, new)
            await self._check_order(f"image {template.name!r} and base {new.name!r}", stacks, layers)
        except BarchanError as error:
            return error
        return None

    def _rebase(
        self, template: Template, old: Template, new: Template, total: int, error: BarchanError | None
    ) -> Rebased:
        refused, digest = "", template.digest
        try:
            if error is not None:
                raise error
            if not compose.stands_on(template, old):
                raise Conflict(f"image {template.name!r} has no layers of its own on those of {old.name!r}")
            if template.name.startswith(BUILT_PREFIX):
                raise Conflict(f"image {template.name!r} is named after its base: build its recipe on the new one")
            config, layers = compose.on_another_base(template, old, new)
            digest = self.store.commit(config, layers, replaces=template.digest).digest
        except BarchanError as problem:
            refused = str(problem)
        return Rebased(name=template.name, digest=digest, refused=refused, total=total)


def _is_meant(template: Template, old: Template, new: Template) -> bool:
    """Whether an image that nobody named goes to the new base: not the new base itself, nor what is on it already."""
    is_on_new = len(new.layers) > len(old.layers) and (
        compose.digests(template.layers[-len(new.layers) :]) == compose.digests(new.layers)
    )
    is_cache = template.name.startswith((BUILT_PREFIX, MERGED_PREFIX))
    return compose.stands_on(template, old) and not is_on_new and not is_cache


def _new_ground(template: Template, old: Template, new: Template) -> Meeting | None:
    """What an image would meet in its new base."""
    if not compose.stands_on(template, old):
        return None
    return compose.meeting_of(replace(template, base_layers=len(old.layers)), new.layers)
