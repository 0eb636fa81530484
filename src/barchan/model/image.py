"""What is asked and told of images beside what they are: composition, other names, other bases."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from barchan.errors import InvalidSpec
from barchan.model.sandbox import Name, Need

GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TemplateKind = Literal["root", "disk"]  # a file system's root, or the disk of a machine
NEEDS_LABEL = "barchan.needs"  # by which Dockerfiles and images of other tools say what they need
NAMES_MAX = 100_000
# Names that nobody has chosen; the first three say what is in them, so that whoever needs the same again finds it:
BUILT_PREFIX = "prep-"  # what a recipe made
MERGED_PREFIX = "merged-"  # layers of a long stack as one
VERIFIER_PREFIX = "verify-"  # what a task's verifier installs
ASLEEP_PREFIX = "asleep-"  # what a sandbox had written when it was hibernated; its node removes it
FRESH_PREFIX = "snap-"  # a snapshot that nobody has named
MADE_PREFIXES = (BUILT_PREFIX, MERGED_PREFIX, VERIFIER_PREFIX, ASLEEP_PREFIX)


class NameRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Give an image, found by its name or digest, one more name; an image that has it gives way."""

    image: Name
    name: Name


class RebaseRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Put images that were built on `old` on `new` instead; no `names`: every one that was."""

    old: Name
    new: Name
    names: Annotated[tuple[Name, ...], Meta(max_length=NAMES_MAX)] = ()


class Rebased(Struct, frozen=True, kw_only=True):
    """What became of one image of a rebase.

    Attributes:
        digest: What it has now.
        refused: Why it was left as it was; empty if it has the new base.
        total: How many images the rebase is about.
    """

    name: str
    digest: str
    refused: str = ""
    total: int


def layered_env(base: Mapping[str, str], above: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The variables of a base image under those of the images above it, each over the ones before.

    A PATH that is only the usual one says nothing about what an image brings, and gives way to any other below it.
    """
    merged = dict(base)
    for env in above:
        merged |= {
            key: value for key, value in env.items() if (key, value) != ("PATH", GUEST_PATH) or key not in merged
        }
    return merged


def needs_of(words: str, origin: str) -> tuple[Need, ...]:
    """What the label says that an image needs: words, in order and each once.

    Raises:
        InvalidSpec: One of them is nothing that a backend has; `origin` is named.
    """
    try:
        return msgspec.convert(tuple(sorted(set(words.replace(",", " ").split()))), tuple[Need, ...])
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"{origin}: {NEEDS_LABEL} is of {', '.join(get_args(Need))}, not {words[:80]!r}") from error
