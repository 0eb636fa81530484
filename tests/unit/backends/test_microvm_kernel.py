"""Kernels of microVMs: which one is taken, what it comes with, what it is told."""

import gzip
import hashlib
import lzma
import shutil
import struct
import subprocess
from pathlib import Path

import msgspec
import pytest

from barchan.backends.microvm import boot, clock, initrd, kernel, kernel_build, kernel_install
from barchan.errors import BackendError, RequirementMissing


@pytest.fixture(autouse=True)
def _own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was installed for the whole machine counts."""
    monkeypatch.setattr(kernel, "SHARED_STATE_DIR", tmp_path / "shared")


def keep(state_dir: Path, name: str, version: str, *, config: str = "", modules: tuple[str, ...] = ()) -> None:
    part = state_dir / kernel.DIRECTORY / f".part-{name}"
    (part / kernel.MODULES).mkdir(parents=True)
    (part / kernel.VMLINUX).write_bytes(version.encode())
    for module in modules:
        (part / kernel.MODULES / module).write_bytes(module.encode())
    digest = hashlib.sha256(version.encode()).hexdigest()
    record = kernel.Record(version=version, package="p 1", config=config, vmlinux=digest, modules=modules)
    kernel.keep(part, record, state_dir, name)


def test_without_a_kernel(tmp_path: Path) -> None:
    """The error says both ways to one."""
    with pytest.raises(RequirementMissing, match=r"kernel install.*kernel build"):
        kernel.find(tmp_path)


def test_which_kernel_is_taken(tmp_path: Path) -> None:
    """Ours of today's configuration before any other, the newest of its kind, and none of an older configuration."""
    keep(tmp_path, "a", "6.1.0-9-cloud", modules=("x.ko",))
    keep(tmp_path, "b", "6.1.0-57-cloud", modules=("x.ko", "y.ko"))
    keep(tmp_path, "c", "7.0-barchan", config="of long ago")
    found = kernel.find(tmp_path)
    assert (found.version, found.needs_modules) == ("6.1.0-57-cloud", True)
    keep(tmp_path / "shared", "d", "6.1.2-barchan", config=kernel.config_digest())
    own = kernel.find(tmp_path)
    assert (own.version, own.needs_modules) == ("6.1.2-barchan", False)
    assert own.digest != found.digest
    assert own.initrd.parent == tmp_path / kernel.DIRECTORY


def test_one_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    """Whole: nothing of the earlier one is left, and nothing half made is beside it."""
    keep(tmp_path, "a", "1", modules=("x.ko",))
    keep(tmp_path, "a", "2")
    assert kernel.find(tmp_path).version == "2"
    assert [path.name for path in (tmp_path / kernel.DIRECTORY).iterdir() if path.is_dir()] == ["a"]


@pytest.mark.requires("static-libc")
def test_initial_file_system(tmp_path: Path) -> None:
    """An archive that cpio's readers take, with the programs, the console and the drivers in their order."""
    modules = []
    for name in ("b.ko", "a.ko"):
        (tmp_path / name).write_bytes(name.encode())
        modules.append(tmp_path / name)
    data = initrd.archive(modules)
    names, at = [], 0
    while at < len(data):
        fields = [int(data[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        name = data[at + 110 : at + 110 + fields[11] - 1].decode()
        content_at = (at + 110 + fields[11] + 3) // 4 * 4
        names.append((name, oct(fields[1]), fields[9:11] if name == "dev/console" else fields[6] > 0))
        if name == "modules/00.ko":
            assert data[content_at : content_at + fields[6]] == b"b.ko"
        at = (content_at + fields[6] + 3) // 4 * 4
    assert names == [
        ("dev", "0o40755", False),
        ("dev/console", "0o20600", [5, 1]),
        ("init", "0o100755", True),
        ("barchan-init", "0o100755", True),
        ("modules", "0o40700", False),
        ("modules/00.ko", "0o100600", True),
        ("modules/01.ko", "0o100600", True),
        ("TRAILER!!!", "0o0", False),
    ]
    assert initrd.make(tmp_path / "out", modules) == initrd.make(tmp_path / "out", modules)


def bzimage(payload: bytes) -> bytes:
    image = bytearray(1024 + 64)
    image[0x1F1] = 1
    image[0x1FE:0x200] = b"\x55\xaa"
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 64, len(payload))
    return bytes(image) + payload


@pytest.mark.parametrize("way", ["gzip", "xz", "lz4", "zstd"])
def test_kernel_out_of_a_bzimage(way: str) -> None:
    """However the distribution has compressed it."""
    kernel_itself = b"\x7fELF" + bytes(range(256)) * 100
    size = struct.pack("<I", len(kernel_itself))
    if way == "gzip":
        payload = gzip.compress(kernel_itself)
    elif way == "xz":
        payload = lzma.compress(kernel_itself)
    else:
        if shutil.which(way) is None:
            pytest.skip(f"no {way}")
        argv = [way, *(["-l"] if way == "lz4" else []), "-c"]
        payload = subprocess.run(argv, input=kernel_itself, capture_output=True, check=True).stdout
    assert kernel_install.extract(bzimage(payload + size)) == kernel_itself
    with pytest.raises(BackendError, match="unknown way"):
        kernel_install.extract(bzimage(b"????" + size))


def test_what_a_module_needs() -> None:
    """By the names that files have."""
    module = b"\x7fELF\0license=GPL\0depends=virtio-ring,virtio\0retpoline=Y\0"
    assert kernel_install.depends(module) == ["virtio_ring", "virtio"]
    assert kernel_install.depends(b"\0depends=\0") == []


def test_every_line_of_the_configuration_is_a_setting() -> None:
    """The build holds each against what the kernel took, so none may be written in another way, or twice."""
    lines = [line for line in kernel.CONFIG.read_text().splitlines() if line and not line.startswith("#")]
    assert all(line.startswith("CONFIG_") and "=" in line for line in lines)
    assert len({line.partition("=")[0] for line in lines}) == len(lines)


def test_all_missing_tools_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is fetched."""
    monkeypatch.setattr(kernel_build, "TOOL_PATH", str(tmp_path))
    monkeypatch.setattr(kernel_build.packages, "newest", lambda package: (package, "1"))
    with pytest.raises(RequirementMissing, match=r"apt-get install make gcc binutils flex bison bc xz-utils"):
        kernel_build.build(tmp_path, print)


def test_command_line() -> None:
    """All that the boot program reads, and no more of a network than there is."""
    given = boot.Boot(layers=2, hostname="a-b", memory_bytes=1 << 20, pids=9, shm_bytes=3, spool_bytes=4)
    words = boot.command_line(given).removeprefix(boot.BASE).split()
    names = ("layers=2", "hostname=a-b", "memory=1048576", "pids=9", "shm=3", "spool=4", "root=plain")
    assert words == [f"barchan.{name}" for name in names]
    more = msgspec.structs.replace(given, net=("10.0.3.15/24", "10.0.3.2"))
    assert boot.command_line(more).endswith(" barchan.net=10.0.3.15/24,10.0.3.2")


def test_the_host_s_counter() -> None:
    """Rounded, so that two who measure agree."""
    assert clock.tsc_khz() % clock.ROUND_KHZ == 0
    assert clock.tsc_khz() > 100_000
