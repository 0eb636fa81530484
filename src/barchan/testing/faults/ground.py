"""Where faults may happen: a node of a run's own, with images, file system and store of its own, and proxies before
whatever the run talks to. What is done to it is done to nothing else, and it leaves nothing.
"""

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from barchan.core.finished import finished
from barchan.errors import BackendError, RequirementMissing
from barchan.image.blobs import BlobStore
from barchan.image.remote import push
from barchan.image.store import ImageStore
from barchan.sdk.aio.client import AsyncClient
from barchan.testing.expect import present
from barchan.testing.faults import http_proxy
from barchan.testing.faults.http_proxy import HttpProxy
from barchan.testing.faults.plan import Plan
from barchan.testing.faults.stream_proxy import StreamProxy
from barchan.testing.node import NodeProcess

DISK_MIB = 4096  # sparse: the pool of a node takes half, and at least 1 GiB
UNMOUNT_S = 60.0  # longer than a supervisor waits for the next node
CACHE_MIB = 64  # the least of what is read of images, so that a store's faults are felt
FOLDERS = ("layers", "templates")


class Ground:
    """One running node and what stands before it; `opened` gives it.

    Attributes:
        folder: Of its own; gone at the end.
        proxy: Where the run's client connects.
        store, endpoint: None where the plan has no such fault.
        left: What remained on the host after its end.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        self.images = folder / "images"
        self.state_dir = folder / "disk/state" if plan.needs("disk-") else folder / "state"
        self.blobs = folder / "blobs"
        self.store: HttpProxy | None = None
        self.endpoint: HttpProxy | None = None
        self.has_disk = plan.needs("disk-")
        self.left: list[str] = []
        self.node: NodeProcess
        self.proxy: StreamProxy
        self._options: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """The node's address for a client that shall feel the faults."""
        return f"unix://{self.proxy.path}"

    @property
    def node_pid(self) -> int:
        """Of the node that runs, which this has started."""
        return present(self.node.process, "node that runs").pid

    async def start_node(self) -> None:
        """Start the node, also after it was killed; what holds it up, as a full disk, is raised."""
        await finished(asyncio.to_thread(self.node.start, *self._options))

    async def kill_node(self) -> None:
        await finished(asyncio.to_thread(self.node.kill))

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[AsyncClient]:
        """A client that asks the node itself, past the proxy."""
        from barchan import connect_async

        async with connect_async(f"unix://{self.node.socket}") as client:
            yield client

    async def open(self, stack: AsyncExitStack, images: Path, template: str, base_url: str | None) -> None:
        """Make everything and start the node; what is made goes with the stack.

        Args:
            images: The store whose images it has, which is left as it is.
            template: Put into the blob store, where the plan wants one.
            base_url: A model's server, where the plan wants one of a run that asks one.
        """
        await asyncio.to_thread(copy_images, images, self.images)
        if self.has_disk:
            disk = self.state_dir.parent
            stack.push_async_callback(asyncio.to_thread, unmount, disk)
            await finished(asyncio.to_thread(make_disk, self.folder / "disk.img", disk))
        self.state_dir.mkdir(mode=0o700)
        if self.store is not None:
            await stack.enter_async_context(self.store.opened())
            await push(ImageStore(self.images), template, BlobStore.open(os.fspath(self.blobs)), _silent)
            for name in FOLDERS:
                await asyncio.to_thread(shutil.rmtree, self.images / name)
                (self.images / name).mkdir()
            self._options = ("--store", self.store.url, "--image-cache-mib", str(CACHE_MIB))
        if base_url is not None:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            self.endpoint = HttpProxy(http_proxy.server(session, base_url))
            await stack.enter_async_context(self.endpoint.opened())
        self.node = NodeProcess(self.state_dir, self.images)
        stack.push_async_callback(self._end_node)
        await self.start_node()
        self.proxy = await stack.enter_async_context(StreamProxy(self.folder / "node.sock", self.node.socket))

    async def _end_node(self) -> None:
        if self.node.process is not None and self.node.process.poll() is not None:
            self.node.process = None
        if self.node.process is None:
            await self.start_node()
        self.left = await asyncio.to_thread(self.node.end)


@asynccontextmanager
async def opened(plan: Plan, images: Path, template: str, base_url: str | None = None) -> AsyncIterator[Ground]:
    """A node of its own for a plan, until this is left; then `left` says what it left behind.

    Raises:
        RequirementMissing: The host lacks something that a fault of the plan needs.
    """
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="barchan-faults-", dir="/var/tmp"))
    ground = Ground(folder, plan)
    try:
        if plan.needs("store-"):
            # Without manifests and indexes a run would not even start.
            ground.store = HttpProxy(http_proxy.folder(ground.blobs), touches=".data")
        async with AsyncExitStack() as stack:
            await ground.open(stack, images, template, base_url if plan.needs("endpoint-") else None)
            yield ground
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def copy_images(source: Path, target: Path) -> None:
    """The images of a store as one that may be taken apart: what can be linked is, since nobody changes a file."""
    for name in FOLDERS:
        (target / name).mkdir(parents=True)
        for path in (source / name).iterdir():
            try:
                os.link(path, target / name / path.name, follow_symlinks=False)
            except OSError:  # another file system, or a directory
                _copy(path, target / name / path.name)


def _copy(path: Path, to: Path) -> None:
    with suppress(FileNotFoundError):  # removed meanwhile
        subprocess.run(["cp", "-a", "--reflink=auto", path, to], check=True)


def make_disk(file: Path, at: Path) -> None:
    """A small file system of its own.

    Raises:
        RequirementMissing: There is no mkfs.ext4.
    """
    if shutil.which("mkfs.ext4") is None:
        raise RequirementMissing("disk-full needs mkfs.ext4 (Debian package e2fsprogs)")
    at.mkdir()
    with file.open("wb") as sparse:
        sparse.truncate(DISK_MIB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", file], check=True)
    subprocess.run(["mount", "-o", "loop", file, at], check=True)


def unmount(at: Path) -> None:
    """Once the supervisor, whose pool lies there, has let go of it."""
    give_up_at = time.monotonic() + UNMOUNT_S
    if not at.is_mount():  # it was never made
        return
    while subprocess.run(["umount", at], capture_output=True).returncode != 0:
        if time.monotonic() > give_up_at:
            raise BackendError(f"{at} can't be unmounted: something still uses it (try: fuser -m {at})")
        time.sleep(0.1)


def _silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
