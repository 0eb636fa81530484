"""A guest's memory as the kernel shows it in a process: here one of the test's own, mapped as QEMU maps it."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.backends.hosted import target
from barchan.backends.qemu import ram
from barchan.backends.qemu.machine import main_of
from barchan.backends.qemu.ram import PAGE, Block, Process, blocks, copy_sparse
from barchan.errors import BackendError
from tests.memory_dirs import page

PAGES = 64
SAID = """\
              Block Name    PSize              Offset               Used              Total                HVA  RO
                     ram    4 KiB  0x0000000000000000 0x0000000000040000 0x0000000000040000 0x00007f703bfff000  rw
                 pc.bios    4 KiB  0x0000000008000000 0x0000000000010000 0x0000000000010000 0x00007f7038a00000  rw
"""
# Maps a file, or memory that has a name, writes some pages, says where, and waits.
PROGRAM = """
import ctypes, mmap, os, sys
path, pages = sys.argv[1], 64
fd = os.memfd_create("ram") if path == "-" else os.open(path, os.O_RDONLY)
if path == "-":
    os.ftruncate(fd, pages * 4096)
flags = mmap.MAP_SHARED if path == "-" else mmap.MAP_PRIVATE
memory = mmap.mmap(fd, pages * 4096, flags, mmap.PROT_READ | mmap.PROT_WRITE)
for number in (0, 9, 10, 63):
    memory[number * 4096 : (number + 1) * 4096] = (100 + number).to_bytes(4, "little") * 1024
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The file below a clone: pages 9, 20 and 21 have data."""
    path = tmp_path / "base"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.ftruncate(fd, PAGES * PAGE)
    for number in (9, 20, 21):
        os.pwrite(fd, page(number), number * PAGE)
    os.close(fd)
    return path


@pytest.fixture(params=["shared", "private"])
def mapped(request: pytest.FixtureRequest, base: Path) -> Iterator[tuple[int, int, bytes]]:
    """(its pid, where its memory is, what is in there)."""
    path = "-" if request.param == "shared" else os.fspath(base)
    expected = bytearray(PAGES * PAGE) if path == "-" else bytearray(base.read_bytes())
    for number in (0, 9, 10, 63):
        expected[number * PAGE : (number + 1) * PAGE] = page(100 + number)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline()), bytes(expected)
        process.kill()


def test_blocks_are_read_from_qemus_table() -> None:
    """Names, places and sizes."""
    assert blocks(SAID) == [
        Block("ram", 0x7F703BFFF000, 0x40000),
        Block("pc.bios", 0x7F7038A00000, 0x10000),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing here",
        ["not a text"],
        SAID.replace("0x00007f703bfff000", "0x00007f703bfff001"),
        SAID.replace("0x00007f703bfff000", "0xfffffffffffff000"),
        SAID.replace("0x00007f703bfff000", "0x1" + 16 * "0"),
        SAID + "\n" * ram.TEXT_CHARS_MAX,
    ],
    ids=["nothing", "other words", "no text", "no page", "no address", "beyond 64 bits", "endless"],
)
def test_what_is_no_table_is_refused(text: object) -> None:
    """A QEMU that says anything else is not asked for more."""
    with pytest.raises(BackendError):
        blocks(text)


def test_only_memory_that_was_given_is_saved() -> None:
    """A QEMU that was taken over may say that it has terabytes, twice, or large devices."""
    main, bios = Block("ram", 0, 64 << 20), Block("pc.bios", 0, 1 << 16)
    assert main_of([main, bios], 64) == (main, [bios])
    for said in ([bios], [main, main], [Block("ram", 0, 1 << 42)], [main, Block("vram", 0, 1 << 32)]):
        with pytest.raises(BackendError, match="other memory than it was given"):
            main_of(said, 64)


@pytest.mark.requires("root")
@pytest.mark.parametrize("pagemap_pages", [ram.PAGEMAP_PAGES, 10])
def test_memory_is_saved_as_it_is(
    mapped: tuple[int, int, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pagemap_pages: int
) -> None:
    """That of a machine that booted, and that of a clone: its own pages over those of the file; the rest are holes."""
    monkeypatch.setattr(ram, "PAGEMAP_PAGES", pagemap_pages)
    pid, address, expected = mapped
    with Process(pid) as process:
        process.save(Block("ram", address, PAGES * PAGE), tmp_path / "ram")
        assert process.read(Block("ram", address, PAGES * PAGE)) == expected
    assert (tmp_path / "ram").read_bytes() == expected
    assert (tmp_path / "ram").stat().st_blocks * 512 < PAGES * PAGE


@pytest.mark.requires("root")
def test_memory_that_is_not_there_is_an_error(mapped: tuple[int, int, bytes], tmp_path: Path) -> None:
    """QEMU may name any place of its own; where nothing is mapped, nothing is stored."""
    with Process(mapped[0]) as process, pytest.raises(BackendError, match="nothing mapped"):
        process.save(Block("ram", PAGE, PAGES * PAGE), tmp_path / "ram")


@pytest.mark.requires("root")
def test_a_small_block_is_written() -> None:
    """Into the process, whatever its mapping allows itself."""
    memory = mmap.mmap(-1, 2 * PAGE)
    block = Block("vram", ctypes.addressof(ctypes.c_char.from_buffer(memory)), 2 * PAGE)
    with Process(os.getpid()) as process:
        process.write(block, page(5) + page(6))
    assert memory[:] == page(5) + page(6)


@pytest.mark.requires("root")
def test_a_device_in_the_place_of_memory_is_refused(tmp_path: Path) -> None:
    """It has neither data nor an end."""
    argv = [sys.executable, "-c", PROGRAM, "/dev/zero"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        address = int(running.stdout.readline())
        with Process(running.pid) as process, pytest.raises(BackendError, match="no plain file"):
            process.save(Block("ram", address, PAGES * PAGE), tmp_path / "ram")
        running.kill()


def test_a_file_is_copied_with_its_holes_and_within_its_bound(base: Path, tmp_path: Path) -> None:
    """One that is larger than it may be is not begun with."""
    with base.open("rb") as source:
        copy_sparse(source.fileno(), tmp_path / "copy", PAGES * PAGE)
        with pytest.raises(BackendError, match="more than"):
            copy_sparse(source.fileno(), tmp_path / "none", PAGES * PAGE - 1)
    assert (tmp_path / "copy").read_bytes() == base.read_bytes()
    assert (tmp_path / "copy").stat().st_blocks == base.stat().st_blocks
    assert not (tmp_path / "none").exists()


def test_a_full_disk_is_not_filled_to_the_end(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else that a node writes needs some of it."""
    monkeypatch.setattr(target, "FREE_BYTES_MIN", 1 << 60)
    with base.open("rb") as source, pytest.raises(OSError, match="No space"):
        copy_sparse(source.fileno(), tmp_path / "copy")
