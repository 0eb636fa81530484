"""What goes wrong on a layer's way in is called what it is, and costs no more than it must."""

import errno
import gzip
import hashlib
import io
import os
import resource
import tarfile
import threading
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from barchan.errors import BackendError, BlobCorrupt, CapacityError, InvalidSpec
from barchan.image import intake
from barchan.image.archives import Archive
from barchan.image.diff_tar import END_BYTES, header
from barchan.image.erofs import Erofs
from barchan.image.implied import restore
from barchan.image.oci import Descriptor, Found
from barchan.image.pack import Limits, pack_tar
from barchan.image.store import ImageStore
from tests.layouts import GZIP, sha256, tar_of

LAYER = tar_of(("a", os.urandom(100_000)))
REFUSED = tar_of(("../a", b"x"))


class Given(io.RawIOBase):
    """Bytes in pieces, then zeros up to a size; an error at a place, if it has one."""

    def __init__(self, data: bytes, size: int, fails_at: int | None) -> None:
        self._data, self._size, self._fails_at = data, size, fails_at
        self.position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._fails_at is not None and self.position >= self._fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = min(len(buffer), self._size - self.position, 10_000)
        part = self._data[self.position : self.position + count]
        buffer[:count] = part + bytes(count - len(part))
        self.position += count
        return count


class OneLayer:
    """A source of one layer."""

    def __init__(self, data: bytes, size: int | None = None, fails_at: int | None = None) -> None:
        self.size = len(data) if size is None else size
        self.given = Given(data, self.size, fails_at)
        self.digest = sha256(data)

    async def image(self) -> Found:
        raise NotImplementedError

    def open(self, position: int, stop: threading.Event) -> BinaryIO:
        return io.BufferedReader(self.given)


def take(source: OneLayer, layer: bytes, folder: Path, limits: Limits | None = None) -> str:
    """Make the layer; returns its digest."""
    blob = Descriptor(GZIP, source.digest, source.size)
    limits = limits or Limits(bytes_max=1 << 30)
    budget = intake.Budget(limits.bytes_max, "too much")
    job = intake._LayerJob(source, 0, blob, sha256(layer), folder / "layer", "erofs", limits, budget, "the layer")
    return job.run(threading.Event()).layer.digest


@pytest.mark.parametrize("fails_at", [None, 50_000])
def test_a_disk_that_fails_is_not_a_damaged_layer(tmp_path: Path, fails_at: int | None) -> None:
    """An error of reading is the source's; an archive that ends too early is damaged."""
    data = gzip.compress(LAYER)
    if fails_at is not None:
        with pytest.raises(BackendError, match=r"reading a layer failed: .*Input/output error") as failure:
            take(OneLayer(data, fails_at=fails_at), LAYER, tmp_path)
        assert not isinstance(failure.value, BlobCorrupt)
    else:
        assert take(OneLayer(data), LAYER, tmp_path)
        (tmp_path / "other").mkdir()
        with pytest.raises(BlobCorrupt, match="can't be decompressed"):
            take(OneLayer(data[:50_000]), LAYER, tmp_path / "other")


def test_a_host_without_open_files_is_not_a_damaged_layer(tmp_path: Path) -> None:
    """No packer can be started then."""
    source = OneLayer(gzip.compress(LAYER))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/proc/self/fd")), hard))
    held = []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        pass
    try:
        with pytest.raises(CapacityError, match="no room for a packer"):
            take(source, LAYER, tmp_path)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_layer_that_says_it_is_huge_is_not_begun(tmp_path: Path) -> None:
    """What a manifest says is no reason to read for ever."""
    source = OneLayer(gzip.compress(LAYER), size=10**18)
    with pytest.raises(InvalidSpec, match=f"the layer has {10**18} bytes, of at most"):
        take(source, LAYER, tmp_path)
    assert source.given.position == 0


def test_the_rest_of_what_is_refused_is_not_read(tmp_path: Path) -> None:
    """It would only tell whose fault it is."""
    source = OneLayer(REFUSED, size=1 << 30)
    with pytest.raises(InvalidSpec, match=r"\.\. is refused"):
        take(source, REFUSED, tmp_path, Limits(bytes_max=1 << 30))
    assert source.given.position < 64 << 20


def test_zeros_behind_a_gzip_stream_are_bounded(tmp_path: Path) -> None:
    """Some are allowed, as are several streams; gigabytes are not waited for."""
    data = gzip.compress(LAYER[:70_000]) + bytes(3000) + gzip.compress(LAYER[70_000:]) + bytes(100_000)
    assert take(OneLayer(data), LAYER, tmp_path)
    source = OneLayer(gzip.compress(LAYER), size=1 << 30)
    (tmp_path / "other").mkdir()
    with pytest.raises(BlobCorrupt, match="zeros follow its gzip streams"):
        take(source, LAYER, tmp_path / "other")
    assert source.given.position < 4 << 20


def test_a_layer_that_is_elsewhere_is_not_known(tmp_path: Path) -> None:
    """Whoever pulls from a registry has named no blob store."""
    store = ImageStore(tmp_path)
    (store.root / "known").mkdir(exist_ok=True)
    digest, diff_id = hashlib.sha256(b"layer").hexdigest(), sha256(b"diff")
    intake.remember(store, diff_id, digest)
    (store.root / "layers").mkdir(exist_ok=True)
    (store.root / "layers" / f"{digest}.lazy").touch()
    assert intake.known_layer(store, diff_id) is None
    (store.root / "layers" / f"{digest}.erofs").touch()
    found = intake.known_layer(store, diff_id)
    assert found is not None
    assert found.kind == "erofs"


def tree_of(count: int, xattrs: dict[bytes, bytes]) -> bytes:
    """Directories of somebody else's, with attributes."""
    entries = (header(b"%d/" % number, b"5", 0o750, 7, 8, 0, 5 * 10**9, b"", xattrs) for number in range(count))
    return b"".join(entries) + bytes(END_BYTES)


def restored(folder: Path, count: int, xattrs: dict[bytes, bytes], **options: Any) -> str | None:
    """Say what is true of directories that a layer above only has files in."""
    pack_tar(io.BytesIO(tar_of(*((f"{number}/x", b"") for number in range(count)))), folder / "above")
    pack_tar(io.BytesIO(tree_of(count, xattrs)), folder / "below")
    with Erofs.open(folder / "above") as above, Erofs.open(folder / "below") as below:
        tracemalloc.start()
        try:
            made = restore([above, below], folder / "made", limits=Limits(), **options)
            (folder / "peak").write_text(str(tracemalloc.get_traced_memory()[1]))
        finally:
            tracemalloc.stop()
    return made


def test_attributes_of_any_name_are_restored(tmp_path: Path) -> None:
    """The kernel takes any bytes."""
    xattrs = {b"user.\xff": b"\xfe", b"user.x": b"y"}
    assert restored(tmp_path, 2, xattrs) is not None
    with Erofs.open(tmp_path / "made") as layer:
        found = layer.lookup("1")
        assert found is not None
        assert layer.xattrs(found) == xattrs
        assert (found.mode & 0o7777, found.uid, found.gid, found.mtime_ns) == (0o750, 7, 8, 5 * 10**9)


def test_many_directories_are_restored_one_by_one(tmp_path: Path) -> None:
    """What is said about all of them is not held together."""
    count = 4000
    assert restored(tmp_path, count, {}) is not None
    assert int((tmp_path / "peak").read_text()) < 2000 * count


def test_restoring_ends_when_nobody_waits(tmp_path: Path) -> None:
    """At the next directory."""
    seen = 0

    def go_on() -> None:
        nonlocal seen
        seen += 1
        if seen == 50:
            raise intake.Stopped

    with pytest.raises(intake.Stopped):
        restored(tmp_path, 100, {}, go_on=go_on)
    assert seen == 50
    assert not (tmp_path / "made").exists()


def test_headers_of_headers_are_bounded(tmp_path: Path) -> None:
    """Each is read inside the one before."""
    extended = tarfile.TarInfo("x")
    extended.type = tarfile.XHDTYPE
    (tmp_path / "deep.tar").write_bytes(extended.tobuf(tarfile.USTAR_FORMAT) * 3000 + bytes(1024))
    with pytest.raises(BlobCorrupt, match="no whole tar archive"):
        Archive(tmp_path / "deep.tar")


def test_a_damaged_header_is_no_end(tmp_path: Path) -> None:
    """Members behind it are not just missing."""
    data = bytearray(tar_of(("a", b"1"), ("b", b"2")))
    data[1024] ^= 1
    (tmp_path / "damaged.tar").write_bytes(data)
    with pytest.raises(BlobCorrupt, match="the header after 1 members is damaged"):
        Archive(tmp_path / "damaged.tar")
