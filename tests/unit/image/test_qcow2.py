"""Disk images that were given, and empty ones over others."""

import io
import struct
import subprocess
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec
from barchan.image.qcow2 import CLUSTER_BYTES, Image, empty_above, look

GIB = 1 << 30


def changed(data: bytes, at: int, layout: str, value: int) -> io.BytesIO:
    """The image with one field of its header changed."""
    buffer = bytearray(data)
    struct.pack_into(layout, buffer, at, value)
    return io.BytesIO(bytes(buffer))


def whole() -> bytes:
    """One that stands alone."""
    data = bytearray(empty_above("x", "raw", GIB))
    struct.pack_into(">QI", data, 8, 0, 0)
    return bytes(data)


def test_what_stands_alone_is_taken() -> None:
    """qcow2 tells its size; anything else is a disk's own bytes, if they are whole sectors."""
    assert look(io.BytesIO(whole()), "a") == Image(format="qcow2", size_bytes=GIB)
    assert look(io.BytesIO(bytes(1024)), "b") == Image(format="raw", size_bytes=1024)


@pytest.mark.parametrize(
    ("at", "layout", "value", "said"),
    [
        (4, ">I", 9, "version 9"),
        (8, ">Q", 600, "lies above another"),
        (24, ">Q", 100, "which no disk can have"),
        (24, ">Q", 1 << 60, "which no disk can have"),
        (32, ">I", 1, "encrypted"),
        (72, ">Q", 2, "corrupt"),
        (72, ">Q", 4, "another file"),
        (72, ">Q", 1 << 20, "not known"),
    ],
)
def test_what_can_not_stand_alone_is_refused(at: int, layout: str, value: int, said: str) -> None:
    """An image that would read other files of the host, or that nobody could read, is refused with its reason."""
    with pytest.raises(InvalidSpec, match=said):
        look(changed(whole(), at, layout, value), "disk.qcow2")


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"QFI\xfb" + bytes(20)])
def test_what_is_no_disk_is_refused(data: bytes) -> None:
    """Neither text nor half a header is a disk."""
    with pytest.raises(InvalidSpec):
        look(io.BytesIO(data), "file")


@pytest.mark.requires("qemu")
@pytest.mark.parametrize("size_bytes", [1 << 20, GIB, 700 * GIB, 20 << 40])
def test_qemu_reads_an_empty_image(tmp_path: Path, size_bytes: int) -> None:
    """QEMU's own tool finds no fault in one, and sees what lies below."""
    from barchan.backends.qemu import install

    below = tmp_path / "below"
    with below.open("wb") as file:
        file.write(b"lowest" * 1000)
        file.truncate(1 << 20)
    above = tmp_path / "above"
    above.write_bytes(empty_above("below", "raw", size_bytes))
    found = install.find(Path("/var/lib/barchan"))
    assert found is not None
    tool = install.command(found.root, install.IMG)
    subprocess.run([*tool, "check", "-q", above], check=True)
    subprocess.run(
        [*tool, "dd", f"if={above}", f"of={tmp_path / 'read'}", "bs=6000", "count=1", "-O", "raw"], check=True
    )
    assert (tmp_path / "read").read_bytes()[:6000] == b"lowest" * 1000
    assert above.stat().st_size % CLUSTER_BYTES == 0
