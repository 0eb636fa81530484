"""A layer as a directory, for hosts that can't mount EROFS files.

Packing is reproducible, so a directory in which nothing is missing gives the same file again. All but its identity:
that may have been changed since it was packed, so the directory's root bears it as an attribute that no guest sees and
no layer keeps (see `image.verify`). A directory that can't say all that the file does has none.
"""

import os
import stat
from contextlib import ExitStack
from pathlib import Path

from barchan.image.erofs import IDENTITY_AT, IDENTITY_BYTES, Erofs, Inode

IDENTITY = "trusted.barchan.identity"
_LINK_MODE = 0o777  # the only one that the kernel has
_PIECE_BYTES = 1 << 20


def unpack(packed: Path, target: Path) -> None:
    """Make the directory `target` of a layer's file. Blocking. Owners and the overlay's attributes need root.

    Raises:
        BlobCorrupt: The layer is damaged.
    """
    with Erofs.open(packed) as layer, ExitStack() as exits:
        target.mkdir(mode=0o700)
        unpacking = _Unpacking(layer, os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        exits.callback(unpacking.close)
        for path, inode in layer.walk():
            unpacking.make(path, inode)
        unpacking.leave(0)
        if unpacking.is_exact:
            with packed.open("rb") as file:
                os.setxattr(target, IDENTITY, os.pread(file.fileno(), IDENTITY_BYTES, IDENTITY_AT))


class _Unpacking:
    """Makes what `Erofs.walk` gives, in its order, each in the directory that is open for it."""

    def __init__(self, layer: Erofs, root: int) -> None:
        self._layer = layer
        self._open: list[tuple[int, Inode | None]] = [(root, None)]  # from the root down
        self._links: dict[int, bytes] = {}  # the first path of files that have several
        self._is_root = os.geteuid() == 0
        self.is_exact = self._is_root

    def make(self, path: bytes, inode: Inode) -> None:
        if not path:
            self._open[0] = (self._open[0][0], inode)
            return
        self.leave(path.count(b"/") + 1)
        parent, name = self._open[-1][0], path.rpartition(b"/")[2]
        if inode.number in self._links:
            root = self._open[0][0]
            os.link(self._links[inode.number], name, src_dir_fd=root, dst_dir_fd=parent, follow_symlinks=False)
            return
        if inode.is_dir:
            os.mkdir(name, 0o700, dir_fd=parent)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._open.append((os.open(name, flags, dir_fd=parent), inode))
            return  # the rest when all that is in it is there
        if inode.links > 1:
            self._links[inode.number] = path
        if stat.S_ISREG(inode.mode):
            self._write(parent, name, inode)
        elif stat.S_ISLNK(inode.mode):
            os.symlink(self._layer.readlink(inode), name, dir_fd=parent)
            self.is_exact &= stat.S_IMODE(inode.mode) == _LINK_MODE
        elif stat.S_ISFIFO(inode.mode) or stat.S_ISSOCK(inode.mode) or inode.is_whiteout:
            os.mknod(name, stat.S_IFMT(inode.mode) | 0o600, dir_fd=parent)
        else:
            self._layer.damaged(f"{path.decode(errors='backslashreplace')} is a device")
        self._dress(b"/proc/self/fd/%d/%b" % (parent, name), inode)

    def leave(self, depth: int) -> None:
        """Finish the directories below the first `depth` ones that are open."""
        while len(self._open) > depth:
            fd, inode = self._open.pop()
            try:
                if inode is not None:
                    self._dress(b"/proc/self/fd/%d/." % fd, inode)
            finally:
                os.close(fd)

    def close(self) -> None:
        """Free what is open, after an error, too."""
        while self._open:
            os.close(self._open.pop()[0])

    def _write(self, parent: int, name: bytes, inode: Inode) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
            position = 0
            for at, size in self._layer.extents(inode, 0, inode.size):
                for start in range(position, position + size if at is not None else position, _PIECE_BYTES):
                    file.seek(start)
                    file.write(self._layer.read(inode, start, min(_PIECE_BYTES, position + size - start)))
                position += size
            file.truncate(inode.size)

    def _dress(self, path: bytes, inode: Inode) -> None:
        """Owner first, for a change of it takes set-id bits; the time last."""
        if self._is_root:
            os.chown(path, inode.uid, inode.gid, follow_symlinks=False)
        if not stat.S_ISLNK(inode.mode):
            os.chmod(path, stat.S_IMODE(inode.mode))
        for key, value in self._layer.xattrs(inode).items():
            os.setxattr(path, key, value, follow_symlinks=False)
        os.utime(path, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=False)
