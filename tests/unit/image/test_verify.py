"""What is stored is compared with its digests, and a damage is told with the images that need what is damaged."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from barchan.errors import NotFound
from barchan.image.chunks import decode_index, encode_layer
from barchan.image.lazy.cache import Cache
from barchan.image.pack import pack_tree
from barchan.image.store import ImageStore, NewLayer
from barchan.image.stored import write_lazy
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.image.verify import VerifyReport, verify


def pack(store: ImageStore, name: str, content: bytes, below: tuple[Layer, ...] = ()) -> Template:
    """An image of a layer with one file of these bytes, and those below it."""
    with store.workspace() as workspace:
        (workspace / "tree").mkdir()
        (workspace / "tree" / "file").write_bytes(content)
        digest = pack_tree(workspace / "tree", workspace / "layer", mtime_unix_s=0)
        new = NewLayer(Layer(digest, "erofs"), workspace / "layer")
        return store.commit(TemplateConfig(name=name, base_layers=len(below)), (new, *below))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    """A base, two images on it and one that stands alone."""
    store = ImageStore(tmp_path / "images")
    base = pack(store, "base", b"base" * 3000)
    pack(store, "one", b"one", base.layers)
    pack(store, "two", b"two", base.layers)
    pack(store, "alone", b"alone" * 5000)
    return store


def checked(store: ImageStore, *names: str) -> VerifyReport:
    return verify(store, names, lambda stage: None)


def found(store: ImageStore, *names: str) -> dict[str, tuple[str, ...]]:
    """What is damaged, and who needs it."""
    return {damage.what: damage.images for damage in checked(store, *names).damages}


def change(path: Path, at: int) -> None:
    """Turn one bit of a file over."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_whole_store_is_read_once(store: ImageStore) -> None:
    """Every layer once, however many images have it; names narrow it down."""
    report = checked(store)
    layers = list((store.root / "layers").iterdir())
    assert (report.images, report.layers, report.damages) == (4, 4, ())
    assert report.bytes_read == sum(path.stat().st_size for path in layers)
    assert (checked(store, "one", "one").images, checked(store, "one").layers) == (1, 2)
    with pytest.raises(NotFound):
        checked(store, "nobody")


@pytest.mark.parametrize("at", [0, 1024, 4096, -1])
def test_a_changed_bit_is_found_and_told_with_whom_it_concerns(store: ImageStore, at: int) -> None:
    """Of a layer that three images have: each is named, and what to do; others are not looked at."""
    base = store.resolve("base").layers[0]
    path = store.layer_path(base)
    change(path, at % path.stat().st_size)
    (damage,) = checked(store).damages
    assert (damage.what, damage.images) == (f"layer {base.digest}.erofs", ("base", "one", "two"))
    assert "damaged" in damage.cause
    assert "remove its image" in damage.cause
    assert found(store, "alone") == {}


def test_what_is_missing_or_cut_is_found(store: ImageStore) -> None:
    """A layer that is gone, and one that is shorter than it was."""
    alone, one = store.resolve("alone").layers[0], store.resolve("one").layers[0]
    store.layer_path(alone).unlink()
    with store.layer_path(one).open("r+b") as file:
        file.truncate(100)
    assert found(store) == {f"layer {alone.digest}.erofs": ("alone",), f"layer {one.digest}.erofs": ("one",)}


def test_a_template_is_checked_too(store: ImageStore) -> None:
    """One that can't be read, and one that says something else than its digest; the others are still checked."""
    templates = store.root / "templates"
    (templates / "one.json").write_bytes(b"{")
    text = (templates / "two.json").read_text()
    (templates / "two.json").write_text(text.replace('"workdir": "/"', '"workdir": "/elsewhere"'))
    assert found(ImageStore(store.root)) == {"template one": ("one",), "template two": ("two",)}


@pytest.fixture
def lazy(tmp_path: Path) -> Iterator[tuple[ImageStore, Layer, Path]]:
    """An image whose one layer is read on demand, all of it in the reader's cache."""
    whole = ImageStore(tmp_path / "whole")
    noise = b"".join(hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(8192))
    layer = pack(whole, "x", noise).layers[0]
    path = whole.layer_path(layer)
    index, stored = encode_layer(path, layer.digest, tmp_path / "data")
    store = ImageStore(tmp_path / "state" / "images")
    (tmp_path / "state").mkdir()
    kept = Layer(layer.digest, "lazy")
    with store.workspace() as workspace:
        write_lazy(workspace / "layer", "file:///nowhere", index.digest, stored)
        store.commit(TemplateConfig(name="x"), (NewLayer(kept, workspace / "layer"),))
    cache = Cache(tmp_path / "state" / "cache", 1 << 30)
    cached = cache.open(layer.digest, index.raw_bytes, index.chunk_bytes)
    read = decode_index(stored, index.digest)
    with path.open("rb") as file:
        for chunk in range(read.count - 1):
            cached.write(chunk, file.read(read.chunk_bytes))
            cache.keep(cached, chunk)
    yield store, kept, tmp_path / "state" / "cache" / f"{layer.digest}.data"
    cached.close()


def test_cached_chunks_are_checked_where_the_reader_would_believe_them(lazy: tuple[ImageStore, Layer, Path]) -> None:
    """Those that are noted, and no others; the index by the digest that it is stored under."""
    store, layer, data = lazy
    report = checked(store)
    assert report.damages == ()
    assert 0 < report.bytes_read < data.stat().st_size
    with data.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")  # of the chunk that is not there
    assert checked(store).damages == ()
    change(data, 100_000)
    assert found(store) == {f"layer {layer.digest}.lazy": ("x",)}


def test_a_damaged_index_is_found(lazy: tuple[ImageStore, Layer, Path]) -> None:
    """Without a cache only that is looked at."""
    store, layer, data = lazy
    shutil.rmtree(data.parent)
    assert checked(store).bytes_read == 0
    path = store.layer_path(layer)
    change(path, path.stat().st_size - 10)
    assert found(store) == {f"layer {layer.digest}.lazy": ("x",)}


def test_a_cache_that_goes_meanwhile_is_no_damage(lazy: tuple[ImageStore, Layer, Path]) -> None:
    """The last sandbox ends between what is noted and what is read: the layer itself is not missing."""
    store, _, data = lazy
    data.unlink()
    report = checked(store)
    assert (report.damages, report.bytes_read) == ((), 0)
