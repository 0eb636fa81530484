"""Layers on each other, as overlayfs shows them: what is where, and which images can't be put together.

This follows the kernel's rules of lookup: the topmost file wins, directories of the same name are one, a whiteout or an
opaque directory ends the search, and a renamed directory goes on below under the name it had there. As in the kernel,
the marks of a layer's root mean nothing.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from barchan.errors import BlobCorrupt
from barchan.image.erofs import Erofs, Inode

OPAQUE = b"trusted.overlay.opaque"
REDIRECT = b"trusted.overlay.redirect"
PRIVATE = b"trusted.overlay."  # what an overlay tells itself, and nobody who looks at it
REDIRECT_BYTES_MAX = 4096
DEPTH_MAX = 4096
ENTRIES_MAX = 16_000_000  # renamed directories of a hostile layer could show one tree very often
CONFLICTS_MAX = 1000

Kind = Literal["file", "directory", "link", "special"]


class Node(msgspec.Struct, frozen=True):
    """Something in a stack.

    Attributes:
        parts: The directories that are one here, topmost first, each with its layer's index; of anything else, one.
        ends: Whether nothing of layers that may lie below the stack can show through.
        is_moved: Whether what lies below the stack is looked for at another path: the directory was renamed.
    """

    parts: tuple[tuple[int, Inode], ...]
    ends: bool = False
    is_moved: bool = False

    @property
    def level(self) -> int:
        """Index of the topmost layer that has it."""
        return self.parts[0][0]

    @property
    def inode(self) -> Inode:
        """Where its owner, mode, time and content are."""
        return self.parts[0][1]


class Conflict(NamedTuple):
    """A path where one side has a directory and the other has not."""

    path: str
    above_kind: Kind
    below_kind: Kind


class Stack:
    """The union of layers, topmost first. Not for several threads at once, as the layers are.

    Raises:
        BlobCorrupt: A layer is damaged; so do all methods.
    """

    def __init__(self, layers: Sequence[Erofs]) -> None:
        self.layers = tuple(layers)
        self.root = Node(tuple((level, layer.root) for level, layer in enumerate(self.layers)))

    def listing(self, directory: Node) -> list[tuple[bytes, Node | None]]:
        """All that a directory's layers say, sorted by name: what is there, and None for what is gone."""
        if len(directory.parts) == 1:
            return self._listing_of_one(directory)
        first: dict[bytes, int] = {}  # of the parts that has the name
        for index, (level, inode) in enumerate(directory.parts):
            for entry in self.layers[level].entries(inode):
                first.setdefault(entry.name, index)
        return [(name, self._resolve(directory, name, index)) for name, index in sorted(first.items())]

    def _listing_of_one(self, directory: Node) -> list[tuple[bytes, Node | None]]:
        """The same for the many directories that are in one layer only, in a tenth of the time."""
        found: list[tuple[bytes, Node | None]] = []
        (level, only), layer = directory.parts[0], self.layers[directory.level]
        for entry in layer.entries(only):
            inode = layer.entry_inode(entry)
            if inode.is_dir and inode.xattr_bytes:
                found.append((entry.name, self._resolve(directory, entry.name, 0)))
            elif inode.is_dir:
                node = Node(((level, inode),), directory.ends, directory.is_moved)
                found.append((entry.name, node))
            else:
                found.append((entry.name, None if inode.is_whiteout else Node(((level, inode),), ends=True)))
        return found

    def entries(self, directory: Node) -> Iterator[tuple[bytes, Node]]:
        """What is in a directory, sorted by name."""
        return ((name, node) for name, node in self.listing(directory) if node is not None)

    def child(self, directory: Node, name: bytes) -> Node | None:
        """What a directory has under a name: None if it never had it, or if it's gone."""
        return self._resolve(directory, name, 0) if directory.inode.is_dir else None

    def lookup(self, path: bytes | str) -> Node | None:
        """What lies at a path from the root; links are not followed."""
        found: Node | None = self.root
        for name in os.fsencode(path).split(b"/"):
            if name and found is not None:
                found = self.child(found, name)
        return found

    def walk(self) -> Iterator[tuple[bytes, Node]]:
        """Everything with its path from the root (the root's is empty), by name, a directory before what is in it."""
        yield b"", self.root
        count = 0
        open_directories = [(b"", self.entries(self.root))]
        while open_directories:
            prefix, entries = open_directories[-1]
            for name, node in entries:
                yield prefix + name, node
                count += 1
                if count > ENTRIES_MAX or len(open_directories) > DEPTH_MAX:
                    raise BlobCorrupt(
                        f"these layers show more than {ENTRIES_MAX} files or are too deep; build them again"
                    )
                if node.inode.is_dir:
                    open_directories.append((prefix + name + b"/", self.entries(node)))
                    break
            else:
                open_directories.pop()

    def xattrs(self, node: Node) -> dict[bytes, bytes]:
        """Its extended attributes, without those in which overlays note things for themselves."""
        found = self.layers[node.level].xattrs(node.inode)
        return {name: value for name, value in found.items() if not name.startswith(PRIVATE)}

    def readlink(self, node: Node) -> bytes:
        """What a symbolic link says."""
        return self.layers[node.level].readlink(node.inode)

    def stream(self, node: Node) -> Iterator[bytes]:
        """A file's whole content, in parts of at most 1 MiB."""
        return self.layers[node.level].stream(node.inode)

    def _resolve(self, parent: Node, name: bytes, first: int) -> Node | None:
        """Look a name up from the parent's part `first` on, as overlayfs does."""
        search = _Search((name,))
        found: list[tuple[int, Inode]] = []
        places, index = parent.parts, first
        while index < len(places) and not search.is_over:
            level, directory = places[index]
            inode = self._look(level, directory, search)
            index += 1
            if inode is not None:
                found.append((level, inode))
                if search.is_absolute and places is not self.root.parts:
                    places, index = self.root.parts, level + 1
        if not found:
            return None
        is_elsewhere = search.is_absolute
        ends = search.is_over or (parent.ends and not is_elsewhere)
        return Node(tuple(found), ends, not ends and (parent.is_moved or is_elsewhere or search.path != (name,)))

    def _look(self, level: int, directory: Inode, search: "_Search") -> Inode | None:
        """Go along the path that is looked for, in one layer; it may be another one for the layers below."""
        layer, found = self.layers[level], directory
        walked: tuple[bytes, ...] = ()
        ahead = search.path
        while ahead:
            name, ahead = ahead[0], ahead[1:]
            inode = layer.find(found, name)
            if inode is None:
                search.path = (*walked, name, *ahead)
                return None
            if inode.is_whiteout or (not inode.is_dir and (ahead or search.is_dir)):
                search.is_over = True
                return None
            if not inode.is_dir:
                search.is_over = True
                return inode
            search.is_dir = search.is_dir or not ahead
            walked = (*walked, name)
            notes = layer.xattrs(inode) if inode.xattr_bytes else {}
            if notes.get(OPAQUE) == b"y":
                search.is_over = True
            elif REDIRECT in notes:
                walked = self._redirected(layer, notes[REDIRECT], walked, search)
            found = inode
        search.path = walked
        return found

    def _redirected(
        self, layer: Erofs, target: bytes, walked: tuple[bytes, ...], search: "_Search"
    ) -> tuple[bytes, ...]:
        names = tuple(target.removeprefix(b"/").split(b"/"))
        is_absolute = target.startswith(b"/")
        if len(target) > REDIRECT_BYTES_MAX or not all(names) or (len(names) > 1 and not is_absolute):
            layer.damaged("a directory was renamed from a path that is none")
        if not is_absolute:
            return (*walked[:-1], *names)
        # Also where a directory above it hides what is below: this one says where to look.
        search.is_absolute, search.is_over = True, False
        return names


class _Search:
    """What is looked for in the next layer below: a name in the parent's directory there, or a path from the root."""

    def __init__(self, path: tuple[bytes, ...]) -> None:
        self.path = path
        self.is_absolute = False
        self.is_dir = False
        self.is_over = False


def conflicts(above: Erofs | Sequence[Erofs], below: Erofs | Sequence[Erofs]) -> list[Conflict]:
    """Where layers that are put on others have a directory and those have none, or the other way round; at most 1,000.

    No conflict is what the upper ones replace knowingly: a whiteout, an opaque or a renamed directory. That a file
    replaces a directory can't be told from a conflict, so don't ask about the layers that `above` was built on. It
    costs as much time as the smaller of both is large. Blocking.

    Raises:
        BlobCorrupt: A layer is damaged.
    """
    upper = Stack([above] if isinstance(above, Erofs) else above)
    lower = Stack([below] if isinstance(below, Erofs) else below)
    found: list[Conflict] = []
    if not upper.layers or not lower.layers:
        return found
    pending, count = [(b"", upper.root, lower.root)], 0
    while pending and len(found) < CONFLICTS_MAX:
        prefix, upper_directory, lower_directory = pending.pop()
        is_upper_small = _directory_bytes(upper_directory) <= _directory_bytes(lower_directory)
        small, directory = (upper, upper_directory) if is_upper_small else (lower, lower_directory)
        deeper = []
        for name, node in small.listing(directory):
            count += 1
            if count > ENTRIES_MAX:
                raise BlobCorrupt(f"these layers show more than {ENTRIES_MAX} files; build them again")
            one = node if is_upper_small else upper.child(upper_directory, name)
            other = lower.child(lower_directory, name) if is_upper_small else node
            if one is None or other is None or (one.inode.is_dir and (one.ends or one.is_moved)):
                continue
            if one.inode.is_dir and other.inode.is_dir:
                deeper.append((prefix + name + b"/", one, other))
            elif one.inode.is_dir or other.inode.is_dir:
                path = (b"/" + prefix + name).decode("utf-8", "backslashreplace")
                found.append(Conflict(path, kind_of(one.inode), kind_of(other.inode)))
        pending += reversed(deeper)
    return sorted(found)


def _directory_bytes(directory: Node) -> int:
    return sum(inode.size for _, inode in directory.parts)


def kind_of(inode: Inode) -> Kind:
    """What a conflict calls it."""
    if inode.is_dir:
        return "directory"
    if stat.S_ISREG(inode.mode):
        return "file"
    return "link" if stat.S_ISLNK(inode.mode) else "special"
