"""What many sandboxes over many images that share a base take: on disk, and of the page cache.

    sudo python bench/images_density.py --images 50 --sandboxes 200 --out density.json

Every image is the base and a layer of its own; every sandbox reads all files that it sees. Without sharing, the disk
would hold every image whole, and memory every sandbox's image whole. The page cache is read from /proc/meminfo, so the
machine must be quiet; take a state directory whose node has just started, or what it has read before does not count.
"""

import argparse
import asyncio
import ctypes
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from msgspec import Struct

import barchan
from barchan.image.store import ImageStore
from barchan.image.template import Layer

READ_ALL = "find / -xdev -type f -exec cat {} + > /dev/null 2>&1; true"
PREFIX = "density-"
AT_ONCE = 8
CACHESTAT = 451  # the number of the system call on every architecture
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Density(Struct, frozen=True, kw_only=True):
    """Bytes. `images_bytes`, `sandboxes_bytes`: of every image, and of every sandbox's image, each counted whole.

    Attributes:
        disk_bytes: Of the layers of these images in the store.
        cached_bytes: What the page cache grew by, anonymous and shared memory left out.
        layer_files_bytes: The part of it that is of the layers' own files.
        base_only_bytes: What one sandbox that read the base alone let it grow by.
    """

    images: int
    sandboxes: int
    own_bytes: int
    images_bytes: int
    disk_bytes: int
    sandboxes_bytes: int
    base_only_bytes: int
    cached_bytes: int
    layer_files_bytes: int


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cache", "dirty", "writeback", "evicted", "recent"))


def cached_bytes() -> int:
    """Of files, on the whole machine."""
    found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(value.split()[0]) for name, value in found.items()}
    return (kib["Cached"] - kib["Shmem"]) << 10


def cached_bytes_of(path: Path) -> int:
    """Of one file, by its own mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    whole, found = _Range(0, 0), _Stat()
    with path.open("rb") as file:
        if libc.syscall(CACHESTAT, file.fileno(), ctypes.byref(whole), ctypes.byref(found), 0) < 0:
            raise OSError(ctypes.get_errno(), "cachestat")
    return int(found.cache) * PAGE_BYTES


def forget(path: Path) -> None:
    """Take a file out of the page cache: it is there because it was just written."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def make_images(client: barchan.AsyncClient, base: str, count: int, own_mib: int) -> list[str]:
    """Images that are the base and a file of noise each."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def make(number: int) -> str:
        async with turns, await client.create(base, disk_mib=4 * own_mib + 64, user="root") as sandbox:
            (await sandbox.exec(f"head -c {own_mib << 20} /dev/urandom > /usr/noise")).check()
            return (await sandbox.snapshot(f"{PREFIX}{number}")).name

    return list(await asyncio.gather(*(make(number) for number in range(count))))


async def read_all(client: barchan.AsyncClient, images: list[str], sandboxes: int) -> AsyncExitStack:
    """Sandboxes that have read everything, spread over the images, alive until the stack is left."""
    alive, turns = AsyncExitStack(), asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with turns:
            sandbox = await client.create(images[number % len(images)], user="root", memory_mib=256)
            await alive.enter_async_context(sandbox)
            (await sandbox.exec(READ_ALL, timeout_s=600)).check()

    await asyncio.gather(*(one(number) for number in range(sandboxes)))
    return alive


async def measure(arguments: argparse.Namespace) -> Density:
    async with barchan.connect_async(state_dir=arguments.state_dir) as client:
        store = ImageStore(Path(arguments.state_dir) / "images")
        base = store.resolve(arguments.base)
        try:
            names = await make_images(client, arguments.base, arguments.images, arguments.own_mib)
            templates = [store.resolve(name) for name in names]
            layers: set[Layer] = {layer for template in templates for layer in template.layers}
            for layer in layers:
                forget(store.layer_path(layer))
            on_disk = sum(store.layer_bytes(layer) for layer in layers)
            before = cached_bytes()
            async with await read_all(client, [arguments.base], 1):
                base_only = cached_bytes() - before
            async with await read_all(client, names, arguments.sandboxes):
                grown = cached_bytes() - before
                of_files = sum(cached_bytes_of(store.layer_path(layer)) for layer in layers)
        finally:
            for image in await client.images():
                if image.name.startswith(PREFIX):
                    await client.remove_image(image.name)
    sizes = [template.size_bytes for template in templates]
    return Density(
        images=len(names),
        sandboxes=arguments.sandboxes,
        own_bytes=sum(sizes) - len(sizes) * base.size_bytes,
        images_bytes=sum(sizes),
        disk_bytes=on_disk,
        sandboxes_bytes=sum(sizes[number % len(sizes)] for number in range(arguments.sandboxes)),
        base_only_bytes=base_only,
        cached_bytes=grown,
        layer_files_bytes=of_files,
    )


def report(found: Density) -> str:
    def row(what: str, used: int, whole: int) -> str:
        return f"{what:34}{used / 2**20:10.1f} MiB of {whole / 2**20:10.1f} MiB = {100 * used / whole:6.1f} %"

    return "\n".join(
        (
            f"{found.sandboxes} sandboxes over {found.images} images",
            row("disk, of the images' sum", found.disk_bytes, found.images_bytes),
            row("page cache, of the images' sum", found.cached_bytes, found.images_bytes),
            row("page cache, of the sandboxes' sum", found.cached_bytes, found.sandboxes_bytes),
            row("  of which layer files", found.layer_files_bytes, found.sandboxes_bytes),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--state-dir", default="/var/lib/barchan", help="of the node; started if it does not run")
    parser.add_argument("--base", default="debian")
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--sandboxes", type=int, default=200)
    parser.add_argument("--own-mib", type=int, default=16, help="of each image")
    parser.add_argument("--out", type=Path, help="a file for the figures as JSON")
    arguments = parser.parse_args()
    found = asyncio.run(measure(arguments))
    sys.stdout.write(report(found) + "\n")
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
