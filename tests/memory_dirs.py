"""Memory directories as CRIU and the backend would make them, with pages of a test's choice."""

from collections.abc import Sequence
from pathlib import Path

from barchan.model.snapshot import MemoryRecord
from barchan.snapshot.pagemap import PAGE_BYTES, PageMap, Run, encode_pagemap

ADDRESS = 0x7F00_0000_0000
RECORD = MemoryRecord(
    criu="4.1.1",
    kernel="6.18.5-cloud-amd64",
    machine="x86_64",
    cpu_features=("avx", "sse2"),
    uid_base=65536,
    mounts=(),
    files=(),
    places={},
    monotonic_ns=0,
    boottime_ns=0,
    hostname="sandbox",
    network="none",
    layers=(),
    processes=1,
    resident_bytes=1 << 20,
)


def page(number: int) -> bytes:
    """A page of its own; of number 0 it is zeros."""
    return number.to_bytes(4, "little") * (PAGE_BYTES // 4)


def make_memory(root: Path, *processes: Sequence[int], files: dict[str, bytes] | None = None, lazy: int = 1) -> Path:
    """A memory directory at the new folder `root`.

    Args:
        processes: The pages of each, by number. Every fourth begins a run, with a gap before it.
        files: More small files, by path.
        lazy: Every so manyth run has pages that need not be there at once.
    """
    for folder in ("criu", "spool"):
        (root / folder).mkdir(parents=True)
    for number, pages in enumerate(processes, 1):
        runs = []
        for start in range(0, len(pages), 4):
            address = ADDRESS + 2 * start * PAGE_BYTES
            runs.append(Run(address, len(pages[start : start + 4]), True, (start // 4) % lazy == 0))
            runs.append(Run(address + 4 * PAGE_BYTES, 1, False, True))
        (root / f"criu/pagemap-{number}.img").write_bytes(encode_pagemap(PageMap(number, tuple(runs))))
        (root / f"criu/pages-{number}.img").write_bytes(b"".join(map(page, pages)))
    for name, content in {"record.json": b"{}", "criu/inventory.img": b"inventory", **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def content(root: Path) -> dict[str, bytes | None]:
    """What a directory holds: the bytes of each file, None for a folder."""
    return {path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}
