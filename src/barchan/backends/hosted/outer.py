"""Containers that hold a guest of another kind."""

import hashlib
import os
import socket
import stat
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from msgspec.structs import replace

from barchan.backends.container.backend import ContainerBackend, ContainerHandle
from barchan.backends.container.outer_ids import backend_of, guest_of, outer_id
from barchan.errors import ConnectionLost
from barchan.image.template import Template
from barchan.model.sandbox import SandboxSpec


class HostLayer(NamedTuple):
    """A directory of this host that an outer sees read-only, at its root. Equal names (letters, digits, `-`, `.`) have
    equal content, which never changes.
    """

    name: str
    path: Path


class Outers:
    """The outers of one backend: ordinary containers, under ids that no user knows."""

    def __init__(self, backend: str, container: ContainerBackend) -> None:
        self.backend = backend
        self.container = container

    async def create(
        self,
        sandbox_id: str,
        spec: SandboxSpec,
        layers: Sequence[HostLayer],
        *,
        template: Template | None = None,
        cut: str | None = None,
    ) -> ContainerHandle:
        """Start one for a sandbox.

        Args:
            spec: The outer's own: its memory limit has room for what runs the guest.
            layers: Topmost first; above those of `template`, where there is one.
            cut: What its writable layer starts as.

        Raises:
            BootFailed, BackendError: See `Backend.create`.
        """
        made = self._template(layers, template)
        return await self.container.create(outer_id(sandbox_id, self.backend), self._spec(spec), made, cut=cut)

    async def adopt(
        self, sandbox_id: str, spec: SandboxSpec, layers: Sequence[HostLayer], *, template: Template | None = None
    ) -> ContainerHandle:
        """Take over one that an earlier node started; its programs go on."""
        made = self._template(layers, template)
        return await self.container.adopt(outer_id(sandbox_id, self.backend), self._spec(spec), made)

    async def found(self) -> list[str]:
        """Ids of the sandboxes whose outers are alive."""
        return [guest_of(found) for found in await self.container.found_all() if backend_of(found) == self.backend]

    def let_go(self, outer: ContainerHandle) -> None:
        """Close what this node has of one, which lives on."""
        outer.guest.close()
        self.container.forget(outer.sandbox_id)
        outer.release()

    async def discard(self, sandbox_id: str) -> None:
        """Remove one. Raises `NotFound` where there is none."""
        await self.container.discard(outer_id(sandbox_id, self.backend))

    async def drop_layer(self, name: str) -> bool:
        """Let go of a host layer, so that its directory can go; False: an outer uses it."""
        return await self.container.layers.drop_host(name)

    def _template(self, layers: Sequence[HostLayer], below: Template | None) -> Template:
        hosts = tuple(self.container.layers.add_host(layer.name, layer.path) for layer in layers)
        all_layers = hosts + (below.layers if below is not None else ())
        digest = hashlib.sha256(":".join(layer.digest for layer in all_layers).encode()).hexdigest()
        if below is not None:
            return replace(below, layers=all_layers, digest=digest, disk=None)
        return Template(
            name=self.backend,
            digest=digest,
            layers=all_layers,
            size_bytes=0,
            created_unix_s=time.time(),
            user="root",
            workdir="/",
            env={},
            source="",
        )

    @staticmethod
    def _spec(spec: SandboxSpec) -> SandboxSpec:
        return replace(spec, backend="container", zygote=None)


def init_of(outer: ContainerHandle) -> int:
    """The directory under /proc of an outer's init, opened before it is looked at: what is opened through it is of no
    other process, whoever has its number by then. Close it.

    Raises:
        ConnectionLost: It is gone.
    """
    try:
        init = os.open(f"/proc/{outer.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConnectionLost(f"the init of {outer.sandbox_id} is gone: {error.strerror}") from error
    try:
        if outer.sandbox_id not in read_in(init, "cgroup").replace("\n", "/").split("/"):
            raise ConnectionLost(f"the init of {outer.sandbox_id} is gone: another process has its number")
    except BaseException as error:
        os.close(init)
        if isinstance(error, OSError):
            raise ConnectionLost(f"the init of {outer.sandbox_id} is gone: {error.strerror}") from error
        raise
    return init


def read_in(directory: int, name: str) -> str:
    """The text of one of the kernel's files. Raises `OSError`."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(fd, encoding="utf-8", errors="replace", newline="\n") as file:
        return file.read()


def reach(handle: ContainerHandle, path: str) -> socket.socket:
    """Connect to a unix socket in an outer, following no link in there. Does not wait.

    Raises:
        ConnectionLost: Nobody listens there (yet).
    """
    at = init_of(handle)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        above, at = at, os.open("root", os.O_PATH | os.O_DIRECTORY, dir_fd=at)
        os.close(above)
        for part in PurePosixPath(path).relative_to("/").parts:
            above, at = at, os.open(part, os.O_PATH | os.O_NOFOLLOW, dir_fd=at)
            os.close(above)
        if not stat.S_ISSOCK(os.fstat(at).st_mode):
            raise ConnectionLost(f"{path} of {handle.sandbox_id} is no socket")
        sock.setblocking(False)
        sock.connect(f"/proc/self/fd/{at}")
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"{path} of {handle.sandbox_id} can't be reached: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(at)
    return sock
