"""Directories of files that outers see as layers: hard links to what lies elsewhere on this host."""

import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from barchan.backends.hosted.outer import HostLayer
from barchan.backends.qemu.ram import copy_sparse

_PART = ".part"


class Links:
    """Layers of one backend, by name, in a directory of its own. Blocking."""

    def __init__(self, backend: str, root: Path) -> None:
        self._backend = backend
        self._root = root

    def layer(self, name: str) -> HostLayer:
        """The layer of that name, whether it is there or not."""
        return HostLayer(f"{self._backend}-{name}", self._root / name)

    def make(self, name: str, files: Mapping[str, Path]) -> HostLayer:
        """Have a layer: it is made unless it is there.

        Args:
            files: What lies at each path in it.

        Raises:
            OSError: A file is not there, or there is no room.
        """
        layer = self.layer(name)
        if layer.path.exists():
            return layer
        part = self._root / f"{name}.{secrets.token_hex(4)}{_PART}"
        try:
            for path, source in files.items():
                target = part / path.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                _link(source, target)
            for folder in (part, *(path for path in part.rglob("*") if path.is_dir())):
                folder.chmod(0o755)
            try:
                part.rename(layer.path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return layer

    def remove(self, name: str) -> None:
        """Remove a layer that no outer uses; one that is not there needs nothing."""
        shutil.rmtree(self._root / name, ignore_errors=True)

    def set_aside(self, name: str) -> Path:
        """Take a layer that no outer uses away under its name; returns what is to be removed of it. Does not block."""
        part = self._root / f"{name}.{secrets.token_hex(4)}{_PART}"
        (self._root / name).rename(part)
        return part

    def names(self) -> list[str]:
        """Of all layers that are there."""
        if not self._root.exists():
            return []
        return sorted(path.name for path in self._root.iterdir() if path.suffix != _PART)

    def clean(self) -> None:
        """Remove what a node that was killed had half made; before anything is made."""
        for path in self._root.glob(f"*{_PART}"):
            shutil.rmtree(path, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file lies on another file system."""
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
    with open(source, "rb") as old:
        copy_sparse(old.fileno(), target)
