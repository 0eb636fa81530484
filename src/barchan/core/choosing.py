"""Which backend a sandbox gets that asked for `auto`: the strongest isolation that fits.

Pure: what is wished for and what there is in, a choice with its reason out.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from msgspec import Struct

from barchan.errors import BarchanError, InvalidSpec, RequirementMissing
from barchan.model.image import TemplateKind
from barchan.model.sandbox import Network, Root, SandboxSpec

AUTO = "auto"
Isolation = Literal["worker", "container", "user_kernel", "kernel", "machine"]  # the strongest last
_STRENGTH = {name: rank for rank, name in enumerate(get_args(Isolation))}

# Seconds that a sandbox of a template takes to start where none of it has started yet, before any was seen on this
# node. Rounded up from what docs/measured.md has of two slow processors without hardware for virtual machines.
FIRST_START_S: Mapping[Isolation, float] = {
    "worker": 0.05,
    "container": 0.05,
    "user_kernel": 1.0,
    "kernel": 3.0,
    "machine": 40.0,
}
SEEN_MAX = 32  # starts that the middle one is taken of
TEMPLATES_MAX = 4096


class Offer(Struct, frozen=True, kw_only=True):
    """A backend that the node has, whether or not the host can run it.

    Attributes:
        has: What of `model.sandbox.Need` it has, and `zygote`.
        kinds: Of the templates that it can make a sandbox of.
        start_s: What a start of this template takes; `is_seen`: as it did on this node.
    """

    name: str
    isolation: Isolation
    has: frozenset[str]
    kinds: frozenset[TemplateKind]
    memory_mib_min: int
    networks: frozenset[Network]
    roots: frozenset[Root]
    start_s: float
    is_seen: bool = False


class Choice(Struct, frozen=True, kw_only=True):
    """What it came to, and why, in words."""

    backend: str
    reason: str


def wanted(spec: SandboxSpec, needs: Iterable[str]) -> frozenset[str]:
    """What a backend must have for this sandbox; `needs`: of its images."""
    return frozenset({*spec.needs, *needs, *(("zygote",) if spec.zygote is not None else ())})


def unfit(offer: Offer, spec: SandboxSpec, kind: TemplateKind, needs: Iterable[str]) -> str:
    """Why a backend can't be this sandbox's, whatever the host; "": it can."""
    if kind not in offer.kinds:
        return "it starts machines' disks only" if kind == "root" else "the template is a machine's disk"
    lacking = sorted(wanted(spec, needs) - offer.has)
    if lacking:
        return f"it has no {', no '.join(lacking)}"
    if spec.memory_mib < offer.memory_mib_min:
        return f"it needs memory_mib={offer.memory_mib_min} at least"
    if spec.network not in offer.networks:
        return f"it has no network={spec.network!r}"
    if spec.root not in offer.roots:
        return f"it has no root={spec.root!r}"
    if spec.start_within_s is not None and offer.start_s > spec.start_within_s:
        how = "as it did here" if offer.is_seen else "unless seen otherwise"
        return f"a start takes {offer.start_s:.3g} s ({how}), more than start_within_s={spec.start_within_s:g}"
    return ""


def ranked(offers: Iterable[Offer]) -> list[Offer]:
    """The strongest isolation first, and of equals the faster one."""
    return sorted(offers, key=lambda offer: (-_STRENGTH[offer.isolation], offer.start_s, offer.name))


def chosen(offer: Offer, refused: Mapping[str, str]) -> Choice:
    """`refused`: the stronger ones, with what speaks against each."""
    against = "; ".join(f"not {name}: {why}" for name, why in refused.items())
    return Choice(
        backend=offer.name,
        reason=f"{offer.name} is the strongest isolation that fits" + (f" ({against})" if against else ""),
    )


def none_fits(unfitting: Mapping[str, str], missing: Mapping[str, str]) -> BarchanError:
    """What a create is told that no backend fits.

    Args:
        unfitting: Why those can't be it, whatever the host.
        missing: What the host lacks for those that would.
    """
    told = "; ".join(f"{name}: {why}" for name, why in {**missing, **unfitting}.items())
    if missing:
        return RequirementMissing(f"this host can run no backend that fits: {told}")
    return InvalidSpec(f"no backend fits what is asked for: {told} (try: fewer wishes, or another template)")


class Starts:
    """How long starts have taken on this node, by template. Bounded: the templates used longest ago are forgotten."""

    def __init__(self) -> None:
        self._by_template: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()
        self._firsts: dict[str, deque[float]] = {}

    def seen(self, backend: str, digest: str, took_s: float) -> None:
        """One more start of a template."""
        key = (backend, digest)
        times = self._by_template.pop(key, None)
        if times is None:
            times = deque(maxlen=SEEN_MAX)
            self._firsts.setdefault(backend, deque(maxlen=SEEN_MAX)).append(took_s)
        times.append(took_s)
        self._by_template[key] = times
        while len(self._by_template) > TEMPLATES_MAX:
            self._by_template.popitem(last=False)

    def expected(self, backend: str, isolation: Isolation, digest: str) -> tuple[float, bool]:
        """Seconds, and whether they were seen here: the middle of the template's own starts; before there are any, of
        other templates' first ones, for a backend may make of the first what speeds up all others.
        """
        times = self._by_template.get((backend, digest)) or self._firsts.get(backend)
        return (_middle(times), True) if times else (FIRST_START_S[isolation], False)


def _middle(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]
