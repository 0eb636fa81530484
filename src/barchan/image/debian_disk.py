"""The ready disk of a machine: a small Debian with our agent, and somebody logged in on its screen."""

import os
import shlex
import shutil
from pathlib import Path

from msgspec import Struct

from barchan.errors import BackendError, Conflict, NotFound, RequirementMissing
from barchan.image import agent
from barchan.image.debian import HOME, LEFT_OUT, MANUAL, USER, DebianSpec, finish, host_sources, put, run_mmdebstrap
from barchan.image.disks import Boot, add_disk
from barchan.image.store import ImageStore
from barchan.image.template import GUEST_PATH, LayerKind, Template, TemplateConfig
from barchan.image.tools import Progress, in_namespaces, require, run

PACKAGES = ("kmod", "linux-image-amd64", "procps", "python3", "systemd-sysv", "udev")
# An X server on the framebuffer of the standard VGA, and what a person would try it with.
DESKTOP_PACKAGES = ("openbox", "x11-utils", "xinit", "xserver-xorg-core", "xserver-xorg-input-libinput", "xterm")
APPEND = (
    "root=/dev/vda rw quiet console=ttyS0 console=tty0 net.ifnames=0 panic=-1 mitigations=off nokaslr "
    "no_timer_check tsc=reliable random.trust_cpu=1 systemd.show_status=0 consoleblank=0"
)
SPARE_BYTES = 192 << 20  # free in the disk; a sandbox's `disk_mib` come on top, and the file system grows into them
SPARE_SHARE = 0.1  # of its files, for the file system's own
# All but what no machine of QEMU has, which is two thirds of the modules.
MODULES_KEPT = ("arch", "crypto", "fs", "lib", "net", "mm", "virt")
DRIVERS_KEPT = (
    "block",
    "char",
    "cdrom",
    "gpu",
    "hid",
    "i2c",
    "input",
    "net",
    "scsi",
    "ata",
    "usb",
    "video",
    "virtio",
    "virt",
)
LEFT_OUT_OF = {
    "net": ("bluetooth", "can", "ieee802154", "mac80211", "mac802154", "nfc", "wireless", "rfkill"),
    "drivers/net": ("can", "dsa", "ethernet", "fddi", "ieee802154", "phy", "usb", "wireless", "wwan"),
    "drivers/gpu/drm": ("amd", "ast", "gma500", "i915", "mgag200", "nouveau", "radeon", "vmwgfx"),
}
MASKED = (
    *("apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer"),
    *("e2scrub_reap.service", "systemd-timesyncd.service", "systemd-pstore.service", "systemd-update-utmp.service"),
    *("systemd-journal-flush.service", "systemd-random-seed.service", "systemd-update-utmp-runlevel.service"),
    *(
        "serial-getty@ttyS0.service",
        "systemd-binfmt.service",
        "sys-kernel-debug.mount",
        "sys-kernel-tracing.mount",
        "dev-hugepages.mount",
    ),
)
PROPERTIES = "\n".join(agent.PROPERTIES)
AGENT_SERVICE = f"""[Unit]
Description=Barchan agent
BindsTo=dev-virtio\\x2dports-barchan.device
After=dev-virtio\\x2dports-barchan.device
[Service]
ExecStart={agent.LAUNCH_PATH}
{PROPERTIES}
Restart=on-failure
RestartSec=1
[Install]
WantedBy=multi-user.target
"""
AUTOLOGIN = """[Service]
ExecStart=
ExecStart=-/sbin/agetty --autologin {user} --noclear %I linux
"""
NETWORK = """[Match]
Name=eth0
[Network]
DHCP=ipv4
"""
SESSION_PATH = "usr/local/bin/desktop-session"
SESSION = f"""#!/bin/sh
exec runuser -u {USER} -- openbox --startup 'xterm -geometry 80x24+40+40'
"""
XORG = """Section "Device"
    Identifier "screen"
    Driver "modesetting"
    Option "AccelMethod" "none"
EndSection
"""
DESKTOP_SERVICE = """[Unit]
Description=A desktop on the screen
After=systemd-udev-settle.service
Wants=systemd-udev-settle.service
[Service]
WorkingDirectory={home}
Environment=HOME={home} DISPLAY=:0
ExecStart=/usr/bin/xinit /{session} -- /usr/bin/X :0 vt7 -ac
ExecStartPost=/bin/sh -c "until xprop -root; do sleep 0.3; done >/dev/null 2>&1"
TimeoutStartSec=300
Restart=on-failure
[Install]
WantedBy=multi-user.target
"""
# The initrd has nothing but the way to the disk, and is hardly compressed: an emulated processor unpacks it.
INITRD_MODULES = "virtio_pci\nvirtio_blk\next4\ncrc32c_generic\n"
INITRD_SETTINGS = "MODULES=list\nCOMPRESS=gzip\nCOMPRESSLEVEL=1\nBUSYBOX=n\nRESUME=none\n"
INITRD_FILES = {
    "etc/initramfs-tools/conf.d/barchan": INITRD_SETTINGS,
    "usr/share/initramfs-tools/modules.d/barchan": INITRD_MODULES,
}


class DiskSpec(Struct, frozen=True, kw_only=True):
    """What to build; `desktop`: with an X server and a terminal on the screen, in place of a text console."""

    name: str = "debian-disk"
    suite: str = "bookworm"
    include: tuple[str, ...] = ()
    desktop: bool = False

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(sorted({*PACKAGES, *(DESKTOP_PACKAGES if self.desktop else ()), *self.include}))

    @property
    def source(self) -> str:
        return f"debian-disk:{self.suite} {' '.join(self.packages)}"


def build_disk(store: ImageStore, spec: DiskSpec, kind: LayerKind, progress: Progress, *, force: bool) -> Template:
    """Build the disk, or return the one that was built from the same packages before. Blocking, for a minute or two.

    Raises:
        Conflict: The name is taken by something else, and `force` is not set.
        RequirementMissing: Not root, or a tool is missing.
        BackendError: A package could not be had or set up.
    """
    DebianSpec(name=spec.name, suite=spec.suite, include=spec.include).check()
    config = TemplateConfig(
        name=spec.name, user=USER, workdir=HOME, env={"LANG": "C.UTF-8", "PATH": GUEST_PATH}, source=spec.source
    )
    config.check()
    if not force and (existing := _existing(store, spec)) is not None:
        return existing
    if os.geteuid() != 0:
        raise RequirementMissing("building a disk needs root (try: sudo barchan image disk debian)")
    mkfs = require("mkfs.ext4", "e2fsprogs", needed_for="building a disk")
    with store.workspace() as workspace:
        root, disk = workspace / "root", workspace / "disk"
        _bootstrap(root, spec, progress)
        progress("making it a machine's")
        _equip(root, spec)
        _trim_modules(root)
        finish(root)
        boot = _boot_files(root, workspace)
        progress("making the file system")
        _make_file_system(mkfs, root, disk)
        shutil.rmtree(root)
        return add_disk(store, config, disk, kind, progress, boot=boot)


def _existing(store: ImageStore, spec: DiskSpec) -> Template | None:
    try:
        template = store.resolve(spec.name)
    except NotFound:
        return None
    if template.source != spec.source:
        raise Conflict(
            f"there is an image {spec.name!r} already, made from {template.source or 'something else'!r} "
            "(try: another --name, or --force to replace it)"
        )
    return template


def _bootstrap(root: Path, spec: DiskSpec, progress: Progress) -> None:
    mmdebstrap = require("mmdebstrap", "mmdebstrap", needed_for="building a disk")
    argv: list[str | Path] = [
        *(mmdebstrap, "--mode=root", "--variant=minbase", "--format=directory"),
        f"--include={','.join(spec.packages)}",
        f"--setup-hook={MANUAL}",
        *(f"--essential-hook={_writing(path, text)}" for path, text in INITRD_FILES.items()),
        "--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr",
        '--aptopt=Acquire::Languages "none"',
        '--aptopt=Apt::Install-Recommends "false"',
        *(f"--dpkgopt=path-exclude={path}/*" for path in LEFT_OUT),
        spec.suite,
        root,
        *host_sources(spec.suite),
    ]
    run_mmdebstrap(argv, progress)


def _writing(path: str, text: str) -> str:
    """The hook that writes a file before the kernel's package makes its initrd."""
    return f'mkdir -p "$1/{path.rpartition("/")[0]}" && printf %s {shlex.quote(text)} > "$1/{path}"'


def _equip(root: Path, spec: DiskSpec) -> None:
    """The agent, somebody on the screen, a file system that grows, and nothing that only takes time."""
    if not agent.PROGRAM.exists():
        raise RequirementMissing(f"the guest programs were not built: {agent.PROGRAM} is missing (try: make setup)")
    shutil.copyfile(agent.PROGRAM, root / agent.PATH.lstrip("/"))
    put(root / agent.LAUNCH_PATH.lstrip("/"), agent.LAUNCH)
    for path in (agent.PATH, agent.LAUNCH_PATH):
        (root / path.lstrip("/")).chmod(0o755)
    units = root / "etc/systemd/system"
    _write(units / "barchan-agent.service", AGENT_SERVICE)
    _write(units / "getty@tty1.service.d/autologin.conf", AUTOLOGIN.format(user=USER))
    _write(root / "etc/systemd/network/eth0.network", NETWORK)
    _write(root / "etc/motd", "")
    _write(root / "etc/fstab", "/dev/vda / ext4 rw,noatime,x-systemd.growfs 0 0\n")
    enabled = ["barchan-agent.service", "systemd-networkd.service"]
    if spec.desktop:
        _write(units / "desktop.service", DESKTOP_SERVICE.format(home=HOME, session=SESSION_PATH))
        _write(root / "etc/X11/xorg.conf.d/screen.conf", XORG)
        _write(root / SESSION_PATH, SESSION)
        (root / SESSION_PATH).chmod(0o755)
        enabled.append("desktop.service")
    for name in MASKED:
        (units / name).symlink_to("/dev/null")
    wanted = units / "multi-user.target.wants"
    wanted.mkdir(parents=True, exist_ok=True)
    for name in enabled:
        at = units / name if (units / name).exists() else Path("/lib/systemd/system") / name
        (wanted / name).unlink(missing_ok=True)
        (wanted / name).symlink_to(f"/{at.relative_to(root)}" if at.is_relative_to(root) else at)
    (units / "default.target").unlink(missing_ok=True)
    (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    put(path, text)


def _trim_modules(root: Path) -> None:
    """Remove the drivers of hardware that QEMU does not offer."""
    for kernel in (root / "lib/modules").glob("*/kernel"):
        _keep_only(kernel, (*MODULES_KEPT, "drivers"))
        _keep_only(kernel / "drivers", DRIVERS_KEPT)
        for folder, names in LEFT_OUT_OF.items():
            for name in names:
                shutil.rmtree(kernel / folder / name, ignore_errors=True)
        run(in_namespaces(["chroot", root, "depmod", kernel.parent.name]), env={"PATH": GUEST_PATH})


def _keep_only(folder: Path, names: tuple[str, ...]) -> None:
    for path in folder.iterdir():
        if path.is_dir() and path.name not in names:
            shutil.rmtree(path)


def _boot_files(root: Path, workspace: Path) -> Boot:
    """Kernel and initrd leave the disk: they are read from beside it."""
    found: list[Path] = []
    for pattern in ("vmlinuz-*", "initrd.img-*"):
        paths = sorted((root / "boot").glob(pattern))
        if not paths:
            raise BackendError(f"the packages brought no {pattern} into /boot")
        target = workspace / pattern.partition("-")[0]
        paths[-1].rename(target)
        found.append(target)
    shutil.rmtree(root / "boot")
    (root / "boot").mkdir()
    return Boot(kernel=found[0], initrd=found[1], append=APPEND)


def _make_file_system(mkfs: str, root: Path, disk: Path) -> None:
    used = sum(
        -(-os.lstat(os.path.join(top, name)).st_size // 4096) * 4096
        for top, folders, names in os.walk(root)
        for name in (*folders, *names)
    )
    size = used + int(used * SPARE_SHARE) + SPARE_BYTES
    with disk.open("wb") as file:
        file.truncate(-(-size // (1 << 20)) << 20)
    run(
        [
            mkfs,
            "-q",
            "-F",
            "-L",
            "root",
            "-m",
            "0",
            "-E",
            "lazy_itable_init=1",
            "-O",
            "^metadata_csum_seed",
            "-d",
            root,
            disk,
        ]
    )
