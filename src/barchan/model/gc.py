"""What is removed from a node's images to make room, and what came of it."""

from typing import Annotated

from msgspec import Meta, Struct


class GcRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to remove beside layers that no image names; neither given: only those.

    What a live sandbox was made of stays, so does the base of an image that stays, and what was used or made within
    the last minutes.

    Attributes:
        unused_for_s: Images from which no sandbox started for this long.
        keep_bytes: Images, until the layers of the others take at most this much of the disk: those of the build cache
            first, then those that were used longest ago.
        dry_run: Say what would go, and remove nothing.
    """

    unused_for_s: Annotated[float, Meta(ge=0)] | None = None
    keep_bytes: Annotated[int, Meta(ge=0)] | None = None
    dry_run: bool = False


class GcImage(Struct, frozen=True, kw_only=True):
    """An image that was removed. `freed_bytes`: of the layers that went with it, on disk."""

    name: str
    digest: str
    used_unix_s: float
    freed_bytes: int


class GcLayer(Struct, frozen=True):
    """A layer that no image named; `size_bytes` on disk."""

    digest: str
    kind: str
    size_bytes: int


class GcReport(Struct, frozen=True, kw_only=True):
    """What was removed (`dry_run`: would be), in this order.

    Attributes:
        freed_bytes: Of images and left-overs together.
        kept_bytes: What the layers of the images that stay take on disk.
    """

    images: tuple[GcImage, ...]
    left_overs: tuple[GcLayer, ...]
    freed_bytes: int
    kept_bytes: int
    dry_run: bool
