"""Layers in chunks: whole both ways, and nothing wrong believed."""

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from barchan.errors import BlobCorrupt
from barchan.image.chunks import (
    CHUNK_BYTES,
    ChunkIndex,
    decode_chunk,
    decode_index,
    encode_layer,
)

NOISE = b"".join(hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(CHUNK_BYTES // 32))
TEXT = (b"a line that shrinks\n" * CHUNK_BYTES)[:CHUNK_BYTES]


def superblock(metadata_block: int) -> bytes:
    """The start of an EROFS file, as far as it is looked at."""
    return bytes(1024) + struct.pack("<I", 0xE0F5E1E2) + bytes(36) + struct.pack("<I", metadata_block) + bytes(3028)


def layer_file(folder: Path, content: bytes) -> tuple[Path, str]:
    path = folder / "layer"
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


def stored_chunk(index: ChunkIndex, data: bytes, chunk: int) -> bytes:
    place = index.stored(chunk)
    return data[place.offset : place.offset + place.length]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    "content", [b"x", TEXT, NOISE + TEXT + bytes(3 * CHUNK_BYTES) + b"end", (NOISE + TEXT) * 50 + NOISE[:77]]
)
def test_a_layer_comes_back_chunk_by_chunk(tmp_path: Path, content: bytes, threads: int) -> None:
    """Whatever the chunks are like, each decodes alone, and all together are the layer."""
    path, digest = layer_file(tmp_path, content)
    index, stored = encode_layer(path, digest, tmp_path / "data", threads=threads)
    data = (tmp_path / "data").read_bytes()
    read = decode_index(stored, index.digest)
    assert (read.layer, read.raw_bytes, read.stored_bytes) == (digest, len(content), len(data))
    assert b"".join(decode_chunk(read, n, stored_chunk(read, data, n)) for n in range(read.count)) == content


def test_encoding_is_deterministic_and_sparse(tmp_path: Path) -> None:
    """The same file gives the same bytes; zeros take none, and noise takes no more than itself."""
    path, digest = layer_file(tmp_path, NOISE + bytes(10 * CHUNK_BYTES) + TEXT)
    first, stored = encode_layer(path, digest, tmp_path / "one", threads=4)
    _, again = encode_layer(path, digest, tmp_path / "two", threads=1)
    assert stored == again
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert first.stored(0) == (0, CHUNK_BYTES, False)
    assert {first.stored(n).length for n in range(1, 11)} == {0}
    assert first.stored(11).length < 200 and first.stored(11).compressed


def test_what_a_mount_reads_comes_first(tmp_path: Path) -> None:
    """The superblock's block and the metadata region at the end are named, by the superblock's own word."""
    content = superblock(16) + TEXT * 2 + NOISE[:5]
    path, digest = layer_file(tmp_path, content)
    index, _ = encode_layer(path, digest, tmp_path / "data")
    assert index.first == ((0, 4096), (16 * 4096, len(content)))
    assert index.first_chunks() == [0, 1, 2]
    assert list(index.chunks(CHUNK_BYTES - 1, CHUNK_BYTES + 1)) == [0, 1]
    assert list(index.chunks(len(content), len(content) + 9)) == []


@pytest.mark.parametrize("block", [0, 1 << 31])
def test_a_superblock_that_names_no_region_is_no_reason_to_read_all(tmp_path: Path, block: int) -> None:
    """Without a metadata region inside the file, only the superblock's block comes first."""
    path, digest = layer_file(tmp_path, superblock(block) + TEXT)
    assert encode_layer(path, digest, tmp_path / "data")[0].first == ((0, 4096),)


def test_a_damaged_layer_is_not_encoded(tmp_path: Path) -> None:
    """A file that is not the layer it is called is refused before anything is sent."""
    path, _ = layer_file(tmp_path, TEXT)
    with pytest.raises(BlobCorrupt, match="damaged here"):
        encode_layer(path, "0" * 64, tmp_path / "data")


def test_wrong_chunks_are_refused(tmp_path: Path) -> None:
    """Changed, cut, exchanged or other people's chunks: none gives bytes."""
    path, digest = layer_file(tmp_path, TEXT + NOISE + bytes(CHUNK_BYTES) + TEXT[:-1] + b"x")
    index, _ = encode_layer(path, digest, tmp_path / "data")
    data = (tmp_path / "data").read_bytes()
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    flipped = bytearray(stored_chunk(index, data, 1))
    flipped[100] ^= 1
    wrong = [
        (0, stored_chunk(index, data, 3)),
        (0, stored_chunk(index, data, 0)[:-1]),
        (0, b""),
        (0, bomb[: index.stored(0).length]),
        (1, bytes(flipped)),
        (2, b"x"),
        (3, stored_chunk(index, data, 0)),
    ]
    for chunk, stored in wrong:
        with pytest.raises(BlobCorrupt, match=f"chunk {chunk} of layer {digest}"):
            decode_chunk(index, chunk, stored)


def large() -> dict[str, Any]:
    """A layer of 512 MiB of zeros."""
    return {"raw_bytes": 512 << 20, "chunk_bytes": 4 << 20, "lengths": bytes(4 * 128), "hashes": bytes(32 * 128)}


ABSURD: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("format 9", lambda form: form.update(format=9)),
    ("names no layer", lambda form: form.update(layer="../../etc/passwd")),
    ("power of two", lambda form: form.update(chunk_bytes=CHUNK_BYTES + 1)),
    ("power of two", lambda form: form.update(chunk_bytes=0)),
    ("power of two", lambda form: form.update(chunk_bytes=1 << 40)),
    ("past the limits", lambda form: form.update(raw_bytes=1 << 60)),
    ("past the limits", lambda form: form.update(raw_bytes=0)),
    ("past the limits", lambda form: form.update(raw_bytes=-5)),
    ("does not describe", lambda form: form.update(lengths=form["lengths"] + b"1234")),
    ("does not describe", lambda form: form.update(hashes=form["hashes"][1:])),
    ("stored as", lambda form: form.update(lengths=struct.pack("<I", CHUNK_BYTES + 1) + form["lengths"][4:])),
    ("stored as", lambda form: form.update(lengths=struct.pack("<I", (1 << 31) + 5) + form["lengths"][4:])),
    ("outside of the layer", lambda form: form.update(first=[[0, 1 << 50]])),
    ("outside of the layer", lambda form: form.update(first=[[5, 2]])),
    ("outside of the layer, or not in order", lambda form: form.update(first=[[9, 12], [0, 3]])),
    ("outside of the layer, or not in order", lambda form: form.update(first=[[0, 9], [8, 12]])),
    ("length <= 16", lambda form: form.update(first=[[n, n + 1] for n in range(17)])),
    ("are to be read first", lambda form: form.update(large(), first=[[0, 1], [5, 257 << 20]])),
    ("unknown field", lambda form: form.update(more=1)),
    ("Expected", lambda form: form.update(hashes=7)),
]


@pytest.mark.parametrize(("why", "change"), ABSURD)
def test_absurd_indexes_are_refused(tmp_path: Path, why: str, change: Callable[[dict[str, Any]], None]) -> None:
    """An index that says what can't be is refused, even under its right digest."""
    path, digest = layer_file(tmp_path, TEXT * 3)
    _, stored = encode_layer(path, digest, tmp_path / "data")
    form = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(stored))
    change(form)
    changed = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(form))
    with pytest.raises(BlobCorrupt, match=why):
        decode_index(changed, hashlib.sha256(changed).hexdigest())


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    """Another digest, no zstd, a bomb, a cut frame, no msgpack."""
    path, digest = layer_file(tmp_path, TEXT)
    index, stored = encode_layer(path, digest, tmp_path / "data")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    with pytest.raises(BlobCorrupt, match="sha256 is another"):
        decode_index(stored + b"x", index.digest)
    for bad in (b"", b"garbage", bomb, stored[:-3], stored + b"x", zstandard.ZstdCompressor().compress(b"\xc1")):
        with pytest.raises(BlobCorrupt):
            decode_index(bad, hashlib.sha256(bad).hexdigest())
