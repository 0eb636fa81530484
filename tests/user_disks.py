"""Disks of machines as a user has them: Debian's packages, a boot loader in the first sectors, nothing of ours."""

import struct
import subprocess
from pathlib import Path

from barchan.backends.qemu import install
from barchan.backends.tools import SHARED_STATE_DIR
from barchan.image.debian import MANUAL, host_sources, run_mmdebstrap
from barchan.image.debian_disk import INITRD_FILES, _writing
from barchan.image.tools import TOOL_PATH, in_namespaces, require

SUITE = "bookworm"
PACKAGES = (
    *("linux-image-cloud-amd64", "systemd-sysv", "udev", "procps", "iproute2"),
    *("grub-common", "grub-pc-bin"),
    *("cloud-init", "cloud-guest-utils", "fdisk", "e2fsprogs"),
    "qemu-guest-agent",
)
START = 1 << 20  # of the one partition; the boot loader lies before it
SPARE_BYTES = 256 << 20
SECTOR_BYTES = 512
TABLE_AT, LINUX_TYPE, IS_ACTIVE = 446, 0x83, 0x80
GRUB = "usr/lib/grub/i386-pc"
MENU = """set root=(hd0,msdos1)
linux /boot/{kernel} root=/dev/vda1 rw quiet console=ttyS0 net.ifnames=0 mitigations=off nokaslr no_timer_check
initrd /boot/{initrd}
boot
"""
FILES = {
    "etc/fstab": "/dev/vda1 / ext4 rw,noatime 0 0\n",
    "etc/hostname": "theirs\n",
    # Looking for other sources than a disk takes minutes, as on every machine that is in no cloud.
    "etc/cloud/cloud.cfg.d/90-source.cfg": "datasource_list: [NoCloud, None]\n",
}
MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "fstrim.timer", "e2scrub_all.timer")
UNITS = "etc/systemd/system"


def bootstrap(root: Path) -> None:
    """A system in a directory that is made, with cloud-init and qemu-guest-agent; takes a minute, and needs root."""
    run_mmdebstrap(
        [
            *("mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"),
            f"--include={','.join(PACKAGES)}",
            f"--setup-hook={MANUAL}",
            *(f"--essential-hook={_writing(path, text)}" for path, text in INITRD_FILES.items()),
            "--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr",
            '--aptopt=Acquire::Languages "none"',
            '--aptopt=Apt::Install-Recommends "false"',
            *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")),
            *(SUITE, root),
            *host_sources(SUITE),
        ],
        lambda _: None,
    )
    for path, text in FILES.items():
        (root / path).write_text(text)
    for name in MASKED:
        (root / UNITS / name).symlink_to("/dev/null")
    (root / "etc/machine-id").write_text("")


def without(root: Path, *, cloud_init: bool, guest_agent: bool) -> None:
    """Say which of the two is not to run; the other is."""
    off = root / "etc/cloud/cloud-init.disabled"
    masked = root / UNITS / "qemu-guest-agent.service"
    for path in (off, masked):
        path.unlink(missing_ok=True)
    if cloud_init:
        off.touch()
    if guest_agent:
        masked.symlink_to("/dev/null")


def make(root: Path, disk: Path) -> None:
    """The disk, raw: a partition table, GRUB in front of the first partition, and the system in that."""
    loader = _loader(root)
    used = int(subprocess.run(["du", "-s", "-B1", root], capture_output=True, check=True, text=True).stdout.split()[0])
    size = -(-(START + used + used // 10 + SPARE_BYTES) // START) * START
    with disk.open("wb") as file:
        file.truncate(size)
    mkfs = require("mkfs.ext4", "e2fsprogs", needed_for="a disk")
    options = ["-q", "-F", "-m", "0", "-O", "^metadata_csum_seed", "-E", f"offset={START},lazy_itable_init=1"]
    subprocess.run([mkfs, *options, "-d", root, disk, f"{(size - START) >> 10}k"], check=True, capture_output=True)
    with disk.open("r+b") as file:
        file.write(loader)
        file.seek(TABLE_AT)
        first, count = START // SECTOR_BYTES, (size - START) // SECTOR_BYTES
        file.write(struct.pack("<B3sB3sII", IS_ACTIVE, b"\xfe\xff\xff", LINUX_TYPE, b"\xfe\xff\xff", first, count))


def _loader(root: Path) -> bytes:
    """GRUB's first sector, which a BIOS starts, and behind it the rest, with all that it is to do."""
    kernel, initrd = (sorted((root / "boot").glob(pattern))[-1].name for pattern in ("vmlinuz-*", "initrd.img-*"))
    menu, core = root / "run/menu", root / "run/core"
    menu.write_text(MENU.format(kernel=kernel, initrd=initrd))
    argv = ["grub-mkimage", "-O", "i386-pc", "-p", "/boot/grub", "-c", "/run/menu", "-o", "/run/core"]
    modules = ["biosdisk", "part_msdos", "ext2", "linux"]
    subprocess.run(
        in_namespaces(["chroot", root, *argv, *modules]), env={"PATH": TOOL_PATH}, check=True, capture_output=True
    )
    loader = (root / GRUB / "boot.img").read_bytes()[:TABLE_AT].ljust(SECTOR_BYTES - 2, b"\0") + b"\x55\xaa"
    loader += core.read_bytes()
    for path in (menu, core):
        path.unlink()
    assert len(loader) < START
    return loader


def convert(raw: Path, target: Path) -> None:
    """The same as a compressed file of qcow2, as clouds' images come."""
    qemu = install.find(SHARED_STATE_DIR)
    assert qemu is not None
    libraries = qemu.root / "usr/lib/x86_64-linux-gnu"
    tool: list[str | Path] = [libraries / "ld-linux-x86-64.so.2"]
    tool += ["--library-path", libraries, qemu.root / "usr/bin/qemu-img"]
    subprocess.run([*tool, "convert", "-c", "-O", "qcow2", raw, target], check=True)
