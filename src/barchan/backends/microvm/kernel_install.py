"""Taking the kernel of microVMs from the distribution: the one it makes for clouds, with its drivers as modules."""

import gzip
import hashlib
import lzma
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

from barchan.backends.microvm import packages
from barchan.backends.microvm.kernel import DIRECTORY, MODULES, PART_PREFIX, VMLINUX, Record, installed, keep
from barchan.errors import BackendError
from barchan.image.tools import Progress, require

PACKAGE = "linux-image-cloud-amd64"
# What a machine needs before its root is there; what they need themselves comes first. Those built in are not missed.
WANTED = (
    *("virtio_mmio", "virtio_pci", "virtio_blk", "virtio_console", "virtio_net", "virtio_balloon", "virtio_rng"),
    *("ext4", "erofs", "overlay", "fuse"),
)
KERNEL_BYTES_MAX = 1 << 28
_SETUP_SECTORS, _PAYLOAD = 0x1F1, 0x248  # of a bzImage, in the boot protocol of x86


def install(state_dir: Path, progress: Progress) -> Record:
    """Put the newest one among the kernels of the state directory; at once where it is there. Blocking.

    Raises:
        RequirementMissing: The host lacks a tool, or knows no such package.
        BackendError: The package can't be had, or is not as expected.
    """
    package, version = packages.newest(PACKAGE)
    for _, record in installed(state_dir):
        if record.modules and record.package == f"{package} {version}":
            return record
    kernels = state_dir / DIRECTORY
    kernels.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=kernels, prefix=PART_PREFIX))
    try:
        progress(f"fetching {package} {version}")
        root = packages.fetch(package, version, work / "package")
        progress("taking its kernel and drivers")
        (image,) = root.glob("boot/vmlinuz-*")
        part = work / "kernel"
        (part / MODULES).mkdir(parents=True)
        vmlinux = extract(image.read_bytes())
        (part / VMLINUX).write_bytes(vmlinux)
        names = _take_modules(root, part / MODULES)
        record = Record(
            version=image.name.removeprefix("vmlinuz-"),
            package=f"{package} {version}",
            vmlinux=hashlib.sha256(vmlinux).hexdigest(),
            modules=names,
        )
        keep(part, record, state_dir, f"{package}_{version}")
        return record
    finally:
        shutil.rmtree(work)


def extract(image: bytes) -> bytes:
    """The kernel itself, out of a bzImage, which holds it compressed.

    Raises:
        BackendError: It is none, or is compressed in a way that is not known here.
        RequirementMissing: A program that decompresses it is missing.
    """
    if image[0x202:0x206] != b"HdrS" and image[0x1FE:0x200] != b"\x55\xaa":
        raise BackendError("the kernel of the package is no bzImage")
    sectors = image[_SETUP_SECTORS] or 4
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    start = (sectors + 1) * 512 + offset
    kernel = _decompress(image[start : start + length])
    if not kernel.startswith(b"\x7fELF"):
        raise BackendError("the bzImage of the package holds no ELF kernel")
    return kernel


def _decompress(payload: bytes) -> bytes:
    """The last four bytes tell the content's size, and are no part of the stream."""
    if payload.startswith(b"\x1f\x8b"):
        return gzip.decompress(payload[:-4])
    if payload.startswith((b"\xfd7zXZ", b"\x5d\x00\x00")):
        return lzma.LZMADecompressor().decompress(payload)
    for magic, program in ((b"\x28\xb5\x2f\xfd", "zstd"), (b"\x02\x21\x4c\x18", "lz4")):
        if payload.startswith(magic):
            tool = require(program, program, needed_for="unpacking a kernel")
            done = subprocess.run([tool, "-dc"], input=payload[:-4], capture_output=True, check=False)
            if done.returncode != 0 or len(done.stdout) > KERNEL_BYTES_MAX:
                raise BackendError(
                    f"{program} can't unpack the kernel: {done.stderr.decode('utf-8', 'replace')[-200:]}"
                )
            return done.stdout
    raise BackendError(f"the kernel of the package is compressed in an unknown way ({payload[:4].hex()})")


def _take_modules(root: Path, target: Path) -> tuple[str, ...]:
    """Copy what is wanted, unpacked; returns file names, each behind those that it depends on."""
    files = {_module_name(path): path for path in sorted(root.glob("lib/modules/*/kernel/**/*.ko*"))}
    files |= {_module_name(path): path for path in sorted(root.glob("usr/lib/modules/*/kernel/**/*.ko*"))}
    order: list[str] = []

    def take(name: str) -> None:
        if name in order or name not in files:
            return
        content = _unpacked(files[name])
        for needed in depends(content):
            take(needed)
        order.append(name)
        (target / f"{name}.ko").write_bytes(content)

    for name in WANTED:
        take(name)
    if "virtio_blk" not in order:
        raise BackendError("the kernel package has no virtio_blk module")
    return tuple(f"{name}.ko" for name in order)


def depends(module: bytes) -> list[str]:
    """Which others a module says it needs."""
    found = re.search(rb"\0depends=([A-Za-z0-9_,-]*)\0", module)
    return [name.replace("-", "_") for name in found[1].decode().split(",") if name] if found else []


def _module_name(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def _unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data
