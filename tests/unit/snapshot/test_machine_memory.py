"""The packed file of a machine's memory: `ram` and `disk` are pages without a map, and holes stay holes."""

import os
from pathlib import Path

import pytest

from barchan.errors import BackendError
from barchan.snapshot.memory_file import MemoryFile
from barchan.snapshot.pack import pack
from barchan.snapshot.pagemap import PAGE_BYTES
from tests.memory_dirs import page

MIB = 1 << 20


def make(root: Path) -> Path:
    root.mkdir()
    (root / "record.json").write_bytes(b"{}")
    (root / "state").write_bytes(b"devices")
    for name, size, places in (("ram", 64 * MIB, {0: 1, 5000: 2, 16383: 1}), ("disk", 8 * MIB, {7: 2, 8: 3})):
        fd = os.open(root / name, os.O_WRONLY | os.O_CREAT)
        os.ftruncate(fd, size)
        for at, number in places.items():
            os.pwrite(fd, page(number), at * PAGE_BYTES)
        os.close(fd)
    return root


def test_a_machine_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every byte, and no more of the disk than before; equal pages of memory and disk are stored once."""
    memory = make(tmp_path / "memory")
    packed = pack(memory, tmp_path / "m.mem")
    with MemoryFile.open(tmp_path / "m.mem") as file:
        file.unpack(tmp_path / "again")
        assert file.page_maps() == {}
    assert (packed.pages, packed.pages_own) == ((72 * MIB) // PAGE_BYTES, 3)
    for name in ("ram", "disk", "state", "record.json"):
        assert (tmp_path / "again" / name).read_bytes() == (memory / name).read_bytes()
    assert (tmp_path / "again/ram").stat().st_blocks * 512 <= 64 * PAGE_BYTES


def test_memory_of_no_whole_pages_is_refused(tmp_path: Path) -> None:
    """A file that was cut short is no machine's memory."""
    memory = make(tmp_path / "memory")
    os.truncate(memory / "ram", 64 * MIB - 1)
    with pytest.raises(BackendError, match=r"ram has .* bytes, which are no whole pages"):
        pack(memory, tmp_path / "m.mem")
