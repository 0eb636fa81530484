"""Trees on their way from a sandbox to another one, as one tar. Pure.

Both ends look at every entry: what leaves the agent's sandbox is cleaned (what may not travel is left out), and what
enters a grader's is checked (what may not travel is refused), since the tar may have lain in a folder in between.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from copy import copy

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import InvalidSpec

ENTRIES_MAX = 200_000
DROPPED_NAMES_MAX = 20


class Tree(Struct, frozen=True, kw_only=True):
    """A declared path and what was there: a folder as a tar of what it holds, a file as its bytes."""

    path: str
    is_folder: bool
    data: bytes
    mode: int = 0o644


def packed(trees: Sequence[Tree]) -> tuple[bytes, tuple[str, ...]]:
    """One tar of them, with entries named by their whole paths (without the first slash), and what was left out:
    devices, links that lead out of their folder, and the like. Files become readable for everybody: whoever grades is
    another user.

    Raises:
        tarfile.TarError: A folder's bytes are no tar.
    """
    out, dropped = io.BytesIO(), 0
    names: list[str] = []
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for tree in trees:
            top = tree.path.strip("/")
            if not tree.is_folder:
                tar.addfile(_entry(top, tarfile.REGTYPE, tree.mode, len(tree.data)), io.BytesIO(tree.data))
                continue
            tar.addfile(_entry(top, tarfile.DIRTYPE, 0o755))
            for member, content in _members(tree.data):
                if _why_refused(member):
                    dropped += 1
                    names += [f"{top}/{member.name}"] if dropped <= DROPPED_NAMES_MAX else []
                    continue
                kept = _entry(f"{top}/{member.name}", member.type, member.mode, len(content))
                kept.linkname = member.linkname
                tar.addfile(kept, io.BytesIO(content))
    if dropped > len(names):
        names.append(f"and {dropped - len(names)} more")
    return out.getvalue(), tuple(names)


def unpacked(data: bytes, paths: Sequence[str], bytes_max: int) -> tuple[Tree, ...]:
    """The trees of a `packed` tar.

    Raises:
        InvalidSpec: It is none, or holds what may not enter a sandbox.
    """
    if len(data) > 2 * bytes_max + (ENTRIES_MAX << 11):
        raise InvalidSpec(f"the artifact is larger than {bytes_max} bytes")
    try:
        members = list(_members(data))
    except tarfile.TarError as error:
        raise InvalidSpec(f"the artifact is no tar: {error}") from error
    if sum(len(content) for _, content in members) > bytes_max:
        raise InvalidSpec(f"the artifact's files are larger than {bytes_max} bytes")
    tops = {path: path.strip("/") for path in paths}
    if any(not any(_is_at(member.name, top) for top in tops.values()) for member, _ in members):
        raise InvalidSpec("the artifact holds paths that the task does not declare")
    return tuple(tree for path, top in tops.items() if (tree := _tree(path, top, members)) is not None)


def contents(data: bytes) -> dict[str, tuple[int, str]]:
    """Sizes and digests of a tar's regular files, by name.

    Raises:
        tarfile.TarError: It is none.
    """
    return {
        member.name: (len(content), hashlib.sha256(content).hexdigest())
        for member, content in _members(data)
        if member.isreg() and not member.issparse()
    }


def files_of(tree: Tree) -> dict[str, bytes | None]:
    """The files of a folder's tree and what is in them, by their paths in it; None for a link. A tree that is a file
    has none.

    Raises:
        tarfile.TarError: Its bytes are no tar.
    """
    if not tree.is_folder:
        return {}
    found = ((member, content) for member, content in _members(tree.data) if not member.isdir())
    return {member.name: None if member.issym() else content for member, content in found}


def replaced(tree: Tree, files: Mapping[str, bytes | None]) -> Tree:
    """A folder's tree with other contents of some of its files; None leaves one out."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in _members(tree.data):
            given = files.get(member.name, content)
            if given is None:
                continue
            kept = copy(member)
            if member.name in files:
                kept.type, kept.linkname = tarfile.REGTYPE, ""
            kept.size = len(given)
            tar.addfile(kept, io.BytesIO(given))
    return replace(tree, data=out.getvalue())


def _tree(path: str, top: str, members: list[tuple[tarfile.TarInfo, bytes]]) -> Tree | None:
    itself = next(((member, content) for member, content in members if member.name == top), None)
    if itself is not None and itself[0].type == tarfile.REGTYPE:
        return Tree(path=path, is_folder=False, data=itself[1], mode=itself[0].mode)
    if itself is not None and not itself[0].isdir():
        raise InvalidSpec(f"the artifact's entry {top[:200]!r} is neither file nor folder")
    below = [(member, content) for member, content in members if member.name.startswith(f"{top}/")]
    return Tree(path=path, is_folder=True, data=_tar_below(top, below)) if itself or below else None


def _is_at(name: str, top: str) -> bool:
    return name == top or name.startswith(f"{top}/")


def _tar_below(top: str, members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in members:
            moved = copy(member)
            moved.name = member.name[len(top) + 1 :]
            if why := _why_refused(moved):
                raise InvalidSpec(f"the artifact's entry {member.name[:200]!r} {why}")
            tar.addfile(moved, io.BytesIO(content))
    return out.getvalue()


def _members(data: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Entries with their content. Every one is real bytes of `data`: a sparse one has none."""
    count = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # tarfile would keep every header
                count += 1
                if count > ENTRIES_MAX:
                    raise tarfile.TarError(f"more than {ENTRIES_MAX} entries")
                content = b""
                if member.isreg() and not member.issparse():
                    file = tar.extractfile(member)
                    content = file.read() if file is not None else b""
                    if len(content) != member.size:
                        raise tarfile.TarError("it is cut short")
                member.name = member.name.rstrip("/")
                yield member, content
    except (ValueError, OverflowError, EOFError, RecursionError) as error:
        raise tarfile.TarError(str(error)) from error


def _entry(name: str, kind: bytes, mode: int, size: int = 0) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = kind
    entry.size = size
    entry.mode = mode & 0o755 | (0o755 if kind == tarfile.DIRTYPE else 0o644)
    return entry


def _why_refused(member: tarfile.TarInfo) -> str:
    """Why an entry may not travel, "" if it may. The rules for links are those of the sandbox's own unpacking."""
    parts = member.name.split("/")
    if not member.name or member.name.startswith("/") or ".." in parts or "" in parts:
        return "does not stay below its folder"
    if member.issparse() or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE):
        return "is neither file, folder nor symbolic link"
    if member.issym():
        steps = [step for step in member.linkname.split("/") if step not in ("", ".")]
        climbs = next((index for index, step in enumerate(steps) if step != ".."), len(steps))
        if member.linkname.startswith("/") or ".." in steps[climbs:] or climbs > len(parts) - 1:
            return "is a link that may lead out of its folder"
    return ""
