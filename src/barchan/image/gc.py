"""Which images go to make room: a pure decision."""

from collections import Counter
from collections.abc import Collection, Mapping, Set
from typing import NamedTuple

from barchan.image.template import Layer, Template
from barchan.model.gc import GcRequest
from barchan.model.image import ASLEEP_PREFIX, BUILT_PREFIX, MERGED_PREFIX

CACHE = (BUILT_PREFIX, MERGED_PREFIX)  # images that were made on the way to others, and would be made again
GRACE_S = 120.0  # uses are noted once a minute, and a create may still be on its way


class Chosen(NamedTuple):
    """A template to remove, and the bytes of the layers that nobody needs then."""

    template: Template
    freed_bytes: int


class _Rank(NamedTuple):
    """What speaks for an image, all those counted that stand on it: the least goes first."""

    is_wanted: bool  # by more than builds
    used_unix_s: float


def choose(
    templates: Collection[Template],
    used_unix_s: Mapping[str, float],
    sizes: Mapping[Layer, int],
    busy: Set[str],
    asked: GcRequest,
    now_unix_s: float,
) -> list[Chosen]:
    """The templates to remove, in order.

    Args:
        used_unix_s: When each was last used or made, by name.
        sizes: Bytes on disk of every layer that they name.
        busy: Digests of the layers of live sandboxes.
    """
    if asked.unused_for_s is None and asked.keep_bytes is None:
        return []
    ranks = _ranks(templates, used_unix_s)
    latest = now_unix_s - max(GRACE_S, asked.unused_for_s or 0.0)
    # Of images that rank alike, one goes before what it stands on.
    order = sorted(templates, key=lambda template: (ranks[template.name], -len(template.layers), template.name))
    uses = Counter(layer for template in templates for layer in set(template.layers))
    left_bytes = sum(sizes[layer] for layer in uses)
    stood_on: set[str] = set()  # digests of the layers of images that stay
    chosen = []
    for template in order:
        if asked.keep_bytes is not None and left_bytes <= asked.keep_bytes:
            break
        ending = [layer for layer in set(template.layers) if uses[layer] == 1]
        is_busy = any(layer.digest in busy for layer in (*template.layers[:1], *ending))
        is_busy = is_busy or template.name.startswith(ASLEEP_PREFIX)  # a sandbox on disk, whose node may not run
        is_base = any(layer.digest in stood_on for layer in template.layers[:1])
        if ranks[template.name].used_unix_s > latest or is_busy or is_base:
            stood_on.update(layer.digest for layer in template.layers)
            continue
        uses.subtract(set(template.layers))
        freed_bytes = sum(sizes[layer] for layer in ending)
        left_bytes -= freed_bytes
        chosen.append(Chosen(template, freed_bytes))
    return chosen


def _ranks(templates: Collection[Template], used_unix_s: Mapping[str, float]) -> dict[str, _Rank]:
    """An image is used when one that stands on it is: such a one has the image's topmost layer among its own."""
    by_layer: dict[str, _Rank] = {}  # by digest: an image may name its base's layer as it was kept once
    own: dict[str, _Rank] = {}
    for template in templates:
        used = used_unix_s[template.name]
        own[template.name] = _Rank(not template.name.startswith(CACHE), used)
        for layer in template.layers:
            by_layer[layer.digest] = _greater(by_layer.get(layer.digest), own[template.name])
    return {
        template.name: by_layer[template.layers[0].digest] if template.layers else own[template.name]
        for template in templates
    }


def _greater(one: _Rank | None, other: _Rank) -> _Rank:
    if one is None:
        return other
    return _Rank(one.is_wanted or other.is_wanted, max(one.used_unix_s, other.used_unix_s))
