"""A microVM's initial file system: the boot program, the init and, where the kernel has its drivers apart, these."""

import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from barchan.errors import RequirementMissing

GUEST_PROGRAMS = Path(__file__).parents[2] / "_guest"
BOOT, INIT = "barchan-boot", "barchan-init"
MODULES_MAX = 100  # two digits in their names
_CONSOLE = (5, 1)
_TRAILER = b"TRAILER!!!"


def parts(modules: Sequence[Path]) -> Iterator[tuple[bytes, int, bytes]]:
    """What is in it, as names, modes and content. `modules`: in the order in which they are to be loaded.

    Raises:
        RequirementMissing: The guest programs were not built.
    """
    yield b"dev", stat.S_IFDIR | 0o755, b""
    yield b"dev/console", stat.S_IFCHR | 0o600, b""
    for name, program in ((b"init", BOOT), (b"barchan-init", INIT)):
        path = GUEST_PROGRAMS / program
        if not path.exists():
            raise RequirementMissing(
                f"a microVM needs {program}, which was not built (try: make setup, or install barchan again)",
                tool=program,
            )
        yield name, stat.S_IFREG | 0o755, path.read_bytes()
    if modules:
        yield b"modules", stat.S_IFDIR | 0o700, b""
    for number, module in enumerate(modules):
        yield b"modules/%02d.ko" % number, stat.S_IFREG | 0o600, module.read_bytes()


def archive(modules: Sequence[Path]) -> bytes:
    """The same input gives the same bytes: an archive in the form `newc` of cpio, not compressed."""
    found = [_entry(number, *part) for number, part in enumerate(parts(modules), 1)]
    return b"".join([*found, _entry(0, _TRAILER, 0, b"")])


def make(directory: Path, modules: Sequence[Path]) -> tuple[Path, str]:
    """The archive as a file of `directory`, which is made; returns its path and sha256. One that is there stays."""
    data = archive(modules)
    digest = hashlib.sha256(data).hexdigest()
    path = directory / f"initrd-{digest[:16]}.cpio"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(dir=directory, prefix=".initrd-")
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o644)
        Path(name).rename(path)
    return path, digest


def _entry(number: int, name: bytes, mode: int, data: bytes) -> bytes:
    device = _CONSOLE if stat.S_ISCHR(mode) else (0, 0)
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name + b"\0"
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)
