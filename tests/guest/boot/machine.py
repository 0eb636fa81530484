"""A microVM of QEMU's own, without the rest of the platform: boot program, init and kernel as they are shipped."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from barchan.backends.microvm import boot, clock, kernel
from barchan.backends.qemu import install
from barchan.image.store import ImageStore
from barchan.sdk.endpoint import SYSTEM_STATE_DIR
from tests.guest.init.line import Line

MEMORY_MIB, GUEST_MIB, DISK_MIB, SPOOL_MIB = 128, 48, 64, 16
BOOT = boot.Boot(
    layers=1,
    hostname="tiny",
    memory_bytes=GUEST_MIB << 20,
    pids=64,
    shm_bytes=16 << 20,
    spool_bytes=SPOOL_MIB << 20,
)


class Vm:
    """A machine with the base image below an empty disk. `console` is what came over its serial line."""

    def __init__(self, *, command: boot.Boot = BOOT, network: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="barchan-vm-")
        self.folder = Path(self._folder.name)
        store = ImageStore(SYSTEM_STATE_DIR / "images")
        layers = [store.layer_path(layer) for layer in store.resolve("debian").layers]
        disk = self.folder / "disk"
        with disk.open("wb") as file:
            os.truncate(file.fileno(), (DISK_MIB + SPOOL_MIB) << 20)
        reserved = f"{100 * SPOOL_MIB / (DISK_MIB + SPOOL_MIB):.1f}"
        options = ("-q", "-F", "-O", "^has_journal", "-m", reserved)
        subprocess.run(["/sbin/mkfs.ext4", *options, disk], check=True)
        given = msgspec.structs.replace(command, tsc_khz=clock.tsc_khz(), layers=command.layers * len(layers))
        found = kernel.find(self.folder)
        disks = [("disk", disk, "cache=unsafe,discard=unmap")]
        disks += [(boot.layer_serial(index), path, "readonly=on") for index, path in enumerate(layers)]
        self.process = subprocess.Popen(
            [
                *_emulator(),
                *("-M", boot.machine_type(has_acpi=found.needs_modules), "-cpu", "max", "-m", f"{MEMORY_MIB}M"),
                *("-accel", "tcg,tb-size=64", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
                *("-kernel", str(found.vmlinux), "-initrd", str(found.initrd), "-append", boot.command_line(given)),
                *("-serial", f"file:{self.folder}/console", "-device", "virtio-serial-device"),
                *("-chardev", f"socket,id=line,path={self.folder}/line,server=on,wait=off"),
                *("-device", f"virtserialport,chardev=line,name={boot.PORT}"),
                *(("-netdev", "user,id=n,restrict=on", "-device", "virtio-net-device,netdev=n") if network else ()),
                *(word for name, path, more in disks for word in _disk(name, path, more)),
            ],
            stdin=subprocess.DEVNULL,
        )

    @property
    def console(self) -> str:
        return (self.folder / "console").read_text(errors="replace")

    def connect(self) -> Line:
        """Over QEMU's socket, one at a time, greeted and with HELLO said."""
        deadline = time.monotonic() + 10
        sock = socket.socket(socket.AF_UNIX)
        while True:
            try:
                sock.connect(f"{self.folder}/line")
                break
            except OSError:
                assert time.monotonic() < deadline, self.console
                time.sleep(0.02)
        line = Line(sock)
        try:
            line.greet()
            line.hello()
        except BaseException:
            line.close()
            raise
        return line

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        self._folder.cleanup()


def _emulator() -> Sequence[str]:
    qemu = install.find(SYSTEM_STATE_DIR)
    assert qemu is not None
    firmware = [word for path in install.FIRMWARE for word in ("-L", f"{qemu.root}{path}")]
    return [*install.command(qemu.root, install.EMULATOR), *firmware]


def _disk(name: str, path: Path, more: str) -> Sequence[str]:
    drive = f"if=none,id={name},file={path},format=raw,{more}"
    return ["-drive", drive, "-device", f"virtio-blk-device,drive={name},serial={name}"]
