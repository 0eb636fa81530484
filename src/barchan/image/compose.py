"""Images put together out of others, and moved to another base: what lies where, and what can't. Decisions only."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from barchan.errors import Conflict, InvalidSpec, RequirementMissing
from barchan.image.template import Layer, Template, TemplateConfig, template_digest
from barchan.model.image import layered_env

if TYPE_CHECKING:
    from barchan.image.erofs import Erofs

EXAMPLES_MAX = 5


class Meeting(NamedTuple):
    """Two images in one stack whose layers were not made for each other.

    Attributes:
        above, below: The layers that meet, topmost first.
        known: What the layers above were made on: what they already replace there, they may replace elsewhere.
    """

    above: tuple[Layer, ...]
    known: tuple[Layer, ...]
    below: tuple[Layer, ...]

    @property
    def key(self) -> bytes:
        """Short, and equal for equal layers that are kept alike."""
        return hashlib.sha256(repr(tuple(self)).encode()).digest()


class Clash(NamedTuple):
    """How many paths are a directory in one image and something else in the other, and some of them in words."""

    paths: int
    examples: tuple[str, ...]


def own_layers(template: Template) -> tuple[Layer, ...]:
    """The layers that an image adds to the one it was built on, topmost first."""
    return template.layers[: len(template.layers) - template.base_layers]


def compose(base: Template, above: Sequence[Template]) -> Template:
    """The template of sandboxes that have the own layers of `above`, the last one topmost, on a base.

    User, directory and what other runtimes start are the base's; variables and needs are merged. Of a layer that
    would come twice only the upper one stays: the lower one could show nothing that is not there already, but for
    directories that a layer between both has renamed (`turned_over`).

    Raises:
        InvalidSpec: One of several is a machine's disk.
    """
    if not above:
        return base
    for image in (base, *above):
        if image.disk is not None:
            raise InvalidSpec(f"image {image.name!r} is a machine's disk: nothing can lie above or below its layers")
    stack = [layer for image in reversed(above) for layer in own_layers(image)]
    layers = distinct((*stack, *base.layers))
    needs = tuple(sorted({need for image in (base, *above) for need in image.needs}))
    config = config_of(base, env=layered_env(base.env, [image.env for image in above]), needs=needs)
    return replace(
        base,
        digest=template_digest(config, layers),
        layers=layers,
        env=config.env,
        needs=needs,
        source=" + ".join(image.name for image in (base, *above)),
        base_layers=len(layers) - len(distinct(stack)),
        size_bytes=0,  # of layers that other images account for
    )


def digests(layers: Iterable[Layer]) -> tuple[str, ...]:
    """What tells layers apart: however each is kept, now or when an image was made on it, it shows the same."""
    return tuple(layer.digest for layer in layers)


def distinct(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Each digest once, at its topmost place."""
    found: dict[str, Layer] = {}
    for layer in layers:
        found.setdefault(layer.digest, layer)
    return tuple(found.values())


def turned_over(stacks: Iterable[Sequence[Layer]], layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Those of `layers`, made of all `stacks`, that lie below a layer that they lie above in their own stack.

    That comes of counting a layer once. A directory that they renamed there, and that it has, would be empty.
    """
    places = {layer.digest: place for place, layer in enumerate(layers)}
    found = []
    for stack in stacks:
        highest = len(layers)
        for layer in reversed(stack):
            place = places[layer.digest]
            if highest < place:
                found.append(layer)
            highest = min(highest, place)
    return distinct(found)


def renames(layer: "Erofs") -> bool:
    """Whether a directory goes on in the layers below under another name. Blocking.

    Raises:
        BlobCorrupt: The layer is damaged.
    """
    from barchan.image.stack import REDIRECT

    return any(inode.is_dir and inode.xattr_bytes and REDIRECT in layer.xattrs(inode) for _, inode in layer.walk())


def turned_over_error(what: str, layer: Layer) -> Conflict:
    return Conflict(
        f"{what} can't be put together: layer {layer.digest[:12]} has renamed a directory of a layer that another "
        "image has, too, and that would lie above it (try: another order, or build one image on the other)",
        layer=layer.digest,
    )


def meetings(base: Template, above: Sequence[Template]) -> Iterator[tuple[Template, Template, Meeting]]:
    """Each pair of a composition, as (upper, lower, what meets); an image and the base it was built on are none."""
    for index, upper in enumerate(above):
        for lower in (base, *above[:index]):
            if (meeting := meeting_of(upper, lower.layers if lower is base else own_layers(lower))) is not None:
                yield upper, lower, meeting


def meeting_of(upper: Template, below: Sequence[Layer]) -> Meeting | None:
    """What the own layers of an image meet in layers that they were not made on; None: nothing."""
    mine = {layer.digest for layer in upper.layers}
    strange = tuple(layer for layer in below if layer.digest not in mine)
    own = own_layers(upper)
    return Meeting(own, upper.layers[len(own) :], strange) if own and strange else None


def clash_of(meeting: Meeting, open_layer: "Callable[[Layer], Erofs | None]") -> Clash | None:
    """Look into the layers of a meeting; those that can't be looked into clash with nothing. Blocking.

    Raises:
        BlobCorrupt, RequirementMissing: A layer can't be read.
    """
    from barchan.image.stack import conflicts

    def opened(layers: Iterable[Layer]) -> "list[Erofs]":
        return [erofs for layer in layers if (erofs := open_layer(layer)) is not None]

    above = opened(meeting.above)
    found = conflicts(above, opened(meeting.below))
    if found:
        try:
            replaced = {conflict.path for conflict in conflicts(above, opened(meeting.known))}
        except RequirementMissing:  # compressed, as earlier releases made them: nobody can say what they have
            replaced = set()
        found = sorted(conflict for conflict in found if conflict.path not in replaced)
    if not found:
        return None
    told = [f"{item.path} ({item.above_kind} over {item.below_kind})" for item in found[:EXAMPLES_MAX]]
    return Clash(len(found), tuple(told))


def clash_error(upper: str, lower: str, clash: Clash) -> Conflict:
    more = f" and {clash.paths - len(clash.examples)} more" if clash.paths > len(clash.examples) else ""
    return Conflict(
        f"image {upper!r} can't lie above {lower!r}: one has a directory where the other has none: "
        f"{', '.join(clash.examples)}{more} (try: build one of them on the other)",
        upper=upper,
        lower=lower,
        paths=clash.paths,
    )


def config_of(template: Template, **changes: object) -> TemplateConfig:
    """What a template was committed with, changed."""
    config = TemplateConfig(
        name=template.name,
        user=template.user,
        workdir=template.workdir,
        env=template.env,
        entrypoint=template.entrypoint,
        cmd=template.cmd,
        source=template.source,
        base_layers=template.base_layers,
        disk=template.disk,
        needs=template.needs,
    )
    return replace(config, **changes)


# Long stacks


def run_to_merge(sizes: Sequence[int | None], own: int, surplus: int) -> range | None:
    """Which consecutive layers of a stack to make one of, so that it gets shorter by `surplus` or as much as can be.

    Of all runs of that length the one of the least bytes, and of equal ones the lowest: what is large and at the
    bottom is what images share, and is not written a second time.

    Args:
        sizes: Bytes of each layer, topmost first; None: can't be merged.
        own: How many of them are the image's own: none of those is merged with one of its base.
    """
    runs: list[range] = []
    start = 0
    for index, size in enumerate(sizes):
        if size is None or index == own:
            runs.append(range(start, index))
            start = index + (size is None)
    runs.append(range(start, len(sizes)))
    length = min(surplus + 1, max(len(run) for run in runs))
    if length < 2:
        return None
    starts = [at for run in runs for at in range(run.start, run.stop - length + 1)]
    best = min(starts, key=lambda at: (sum(size or 0 for size in sizes[at : at + length]), -at))
    return range(best, best + length)


# Another base


def stands_on(template: Template, base: Template) -> bool:
    """Whether an image has layers of its own on exactly those of the base."""
    count = len(base.layers)
    return len(template.layers) > count and digests(template.layers[-count:]) == digests(base.layers)


def on_another_base(template: Template, old: Template, new: Template) -> tuple[TemplateConfig, tuple[Layer, ...]]:
    """What an image that stands on `old` would be, had it been built on `new`.

    Whatever setting it has just as `old` has it, it gets as `new` has it.
    """
    above = template.layers[: -len(old.layers)]
    between = max(0, template.base_layers - len(old.layers))  # of the image it was built on, if that is on the old base
    env = {key: value for key, value in template.env.items() if old.env.get(key) != value}
    # What the image took away from its base stays away.
    taken = {key: value for key, value in new.env.items() if key in template.env or key not in old.env}
    config = config_of(
        template,
        env={**taken, **env},
        user=new.user if template.user == old.user else template.user,
        workdir=new.workdir if template.workdir == old.workdir else template.workdir,
        entrypoint=new.entrypoint if template.entrypoint == old.entrypoint else template.entrypoint,
        cmd=new.cmd if template.cmd == old.cmd else template.cmd,
    )
    layers = distinct((*above, *new.layers))
    return replace(config, base_layers=len(layers) - len(above) + between), layers
