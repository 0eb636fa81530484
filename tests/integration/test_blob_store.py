"""Images in blob stores: there and back, through a directory and a real HTTP server; killed, cut and corrupted."""

import asyncio
import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zstandard

from barchan.errors import (
    BackendError,
    BarchanError,
    BlobCorrupt,
    ConnectionLost,
    Denied,
    InvalidSpec,
    NotFound,
    ReadTimeout,
    TransportError,
)
from barchan.image.blobs import BlobStore
from barchan.image.hot import HOT_BYTES_MAX, cut_hot, merge_hot, read_hot, write_hot
from barchan.image.pack import pack_tree
from barchan.image.remote import fetch, pull, push
from barchan.image.store import ImageStore, NewLayer
from barchan.image.stored import read_chunks, read_lazy
from barchan.image.template import Layer, Template, TemplateConfig
from tests.hostile_layers import pack_hostile, pack_labelled
from tests.stores_http import served

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


def quiet(what: str, done: int, total: int) -> None:
    """No progress is shown."""


@functools.cache
def content(seed: int, mib: int = 3) -> bytes:
    """A layer's bytes: some shrink, some do not."""
    words = random.Random(seed)
    parts = [words.randbytes(MIB // 4), b"%d lines\n" % seed * (MIB // 32)]
    with tempfile.TemporaryDirectory() as folder:
        tree, packed = Path(folder, "tree"), Path(folder, "packed")
        tree.mkdir()
        (tree / "data").write_bytes(b"".join(part for _ in range(mib) for part in parts) + b"end %d" % seed)
        pack_tree(tree, packed, mtime_unix_s=seed)
        return packed.read_bytes()


def commit(images: ImageStore, name: str, *layers: bytes, **config: object) -> Template:
    with images.workspace() as workspace:
        new: list[NewLayer] = []
        for number, data in enumerate(layers):
            path = workspace / str(number)
            path.write_bytes(data)
            new.append(NewLayer(Layer(hashlib.sha256(data).hexdigest(), "erofs"), path))
        return images.commit(msgspec.convert({"name": name, **config}, TemplateConfig), tuple(new))


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def layers_of(images: ImageStore) -> set[str]:
    return {path.name for path in (images.root / "layers").iterdir()}


def leftovers(images: ImageStore) -> list[str]:
    """What builders have left, after the next one has swept."""
    with images.workspace() as mine:
        return [path.name for path in (images.root / "tmp").iterdir() if path != mine]


@pytest.fixture
def images(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def other(tmp_path: Path) -> ImageStore:
    """The image store of another machine."""
    return ImageStore(tmp_path / "other")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory of a blob store; not made yet."""
    return tmp_path / "blobs"


@pytest.fixture(params=["directory", pytest.param("http", marks=pytest.mark.requires("nginx"))])
def readable(request: pytest.FixtureRequest, root: Path, tmp_path: Path) -> Iterator[BlobStore]:
    """The same blobs as a reader sees them."""
    if request.param == "directory":
        yield BlobStore.open(root.as_uri())
        return
    with served(root, tmp_path / "nginx") as url:
        yield BlobStore.open(url)


async def lazily_read(images: ImageStore, layer: Layer) -> bytes:
    """A lazily kept layer's bytes, as a reader gets them."""
    lazy = read_lazy(images.layer_path(layer))
    store, index = BlobStore.open(lazy.url), lazy.index
    pieces = [await read_chunks(store, index, range(n, min(n + 3, index.count))) for n in range(0, index.count, 3)]
    return b"".join(chunk for piece in pieces for chunk in piece)


async def test_an_image_goes_there_and_comes_back(
    images: ImageStore, other: ImageStore, root: Path, readable: BlobStore
) -> None:
    """Sent, it is found under its name with all its settings; lazily its bytes can be read, pulled they are here."""
    upper, lower = content(1), content(2)
    made = commit(
        images, "team/tools:1", upper, lower, user="agent", workdir="/w", env={"B": "1", "A": "2"}, cmd=("sh",)
    )
    done = await push(images, made.name, BlobStore.open(os.fspath(root)), quiet)
    assert (done.layers_sent, done.layers_there) == (2, 0)
    assert done.bytes_sent < len(upper + lower) / 2

    lazy = await fetch(other, made.name, readable)
    assert lazy.digest == made.digest
    assert [layer.kind for layer in lazy.layers] == ["lazy", "lazy"]
    assert [await lazily_read(other, layer) for layer in lazy.layers] == [upper, lower]

    whole = await pull(other, made.name, readable, quiet)
    assert (whole.digest, whole.layers) == (made.digest, made.layers)
    assert (whole.user, whole.workdir, whole.env, whole.cmd) == ("agent", "/w", {"A": "2", "B": "1"}, ("sh",))
    assert [other.layer_path(layer).read_bytes() for layer in whole.layers] == [upper, lower]
    assert layers_of(other) == {f"{layer.digest}.erofs" for layer in made.layers}


async def test_pushing_again_sends_nothing(images: ImageStore, other: ImageStore, root: Path) -> None:
    """A second push changes no byte of the store; another image sends only the layers that the store lacks."""
    store = BlobStore.open(os.fspath(root))
    base = commit(images, "base", content(1))
    await push(images, "base", store, quiet)
    before = files(root)
    assert (await push(images, "base", store, quiet)).layers_sent == 0
    assert files(root) == before
    commit(images, "built", content(2), content(1), base_layers=1)
    again = await push(images, "built", store, quiet)
    assert (again.layers_sent, again.layers_there) == (1, 1)
    assert before.items() <= files(root).items()
    built = await fetch(other, "built", store)
    assert built.base_layers == 1
    assert built.layers[1].digest == base.layers[0].digest


async def test_an_image_is_found_by_its_whole_digest(images: ImageStore, other: ImageStore, root: Path) -> None:
    """Whoever knows only a template's digest gets it, under a name made of that."""
    made = commit(images, "one", content(1))
    store = BlobStore.open(os.fspath(root))
    await push(images, "one", store, quiet)
    found = await fetch(other, f"sha256:{made.digest}", store)
    assert (found.name, found.digest) == (f"sha256-{made.digest[:16]}", made.digest)
    assert other.resolve(made.digest) == found
    with pytest.raises(NotFound):
        await fetch(other, "0" * 64, store)


async def test_what_is_missing_and_what_is_dead_are_told_apart(tmp_path: Path, other: ImageStore, root: Path) -> None:
    """No such image: the caller's fault. No store, an empty directory, nobody listening: the platform's."""
    with pytest.raises(ConnectionLost, match="is not there"):
        await fetch(other, "one", BlobStore.open(os.fspath(root)))
    root.mkdir()
    with pytest.raises(ConnectionLost, match="holds no images at all"):
        await fetch(other, "one", BlobStore.open(os.fspath(root)))
    (root / "store.json").write_text('{"format":1}')
    with pytest.raises(NotFound, match="no image 'one'"):
        await fetch(other, "one", BlobStore.open(os.fspath(root)))
    nobody = BlobStore.open("http://127.0.0.1:1/blobs", timeout_s=5, retries=1)
    with pytest.raises(TransportError, match=r"images/one.json in http://127.0.0.1:1/blobs"):
        await fetch(other, "one", nobody)
    assert not (other.root / "templates").exists()


@pytest.mark.requires("nginx")
@pytest.mark.parametrize(
    ("directive", "error", "why"),
    [
        ("return 503;", ConnectionLost, "answers 503"),
        ("return 403;", Denied, "credentials"),
        ("return 302 http://127.0.0.1:1/;", ConnectionLost, "no connection"),
        ("max_ranges 0;", BackendError, "answer ranges"),
    ],
)
async def test_a_server_that_refuses_is_named_with_its_reason(
    root: Path, tmp_path: Path, directive: str, error: type[BarchanError], why: str
) -> None:
    """Broken, forbidding, misdirecting or without ranges: each is a fault of the platform that says what it is."""
    root.mkdir()
    (root / "key").write_bytes(b"0123456789")
    with served(root, tmp_path / "nginx", directive) as url, pytest.raises(error, match=why) as raised:
        await BlobStore.open(url, retries=1).get_range("key", 2, 5)
    assert f"key in {url}" in str(raised.value)


async def test_a_store_that_does_not_answer_is_given_up() -> None:
    """A server that accepts and says nothing costs no more than the time allowed."""
    answered = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ReadTimeout):
            await BlobStore.open(f"http://127.0.0.1:{port}", timeout_s=0.5, retries=0).get("key", 100)
        answered.set()


@pytest.mark.parametrize(
    "url", ["http://me:secret@host/x", "https://host/x?sig=secret", "ftp://host/x", "file://elsewhere/x", ""]
)
def test_addresses_that_are_none_are_refused(url: str) -> None:
    """A kind of store that does not exist, or credentials where they would be kept; the refusal quotes none."""
    with pytest.raises(InvalidSpec) as refused:
        BlobStore.open(url)
    assert "secret" not in str(refused.value)


async def test_a_store_over_http_takes_nothing(images: ImageStore) -> None:
    """It can only be read, and says so."""
    with pytest.raises(InvalidSpec, match="can only be read"):
        await BlobStore.open("http://127.0.0.1:1").put("key", b"")


def only(root: Path, pattern: str) -> Path:
    (found,) = root.glob(pattern)
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def replace_manifest(root: Path, **changes: object) -> None:
    """A manifest with other contents, under its right digest, as a hostile store would have it."""
    path = only(root, "manifests/*.json")
    form = msgspec.json.decode(path.read_bytes())
    for key, value in changes.items():
        form[key] = value
    data = msgspec.json.encode(form)
    digest = hashlib.sha256(data).hexdigest()
    (root / f"manifests/{digest}.json").write_bytes(data)
    (root / "images/one.json").write_bytes(msgspec.json.encode({"manifest": digest, "format": 1}))


def huge(root: Path) -> None:
    form = msgspec.json.decode(only(root, "manifests/*.json").read_bytes())
    replace_manifest(root, layers=[form["layers"][0] | {"raw_bytes": 1 << 50}])


def other_size(root: Path) -> None:
    form = msgspec.json.decode(only(root, "manifests/*.json").read_bytes())
    replace_manifest(root, layers=[form["layers"][0] | {"stored_bytes": 5}])


def twice(root: Path) -> None:
    form = msgspec.json.decode(only(root, "manifests/*.json").read_bytes())
    replace_manifest(root, layers=form["layers"] * 2)


DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    ("chunk [0-9]+ of layer", lambda root: flip(only(root, "layers/*/*.data"), 300_000)),
    ("ends at|shorter than", lambda root: os.truncate(only(root, "layers/*/*.data"), 300_000)),
    ("shorter than|ends at", lambda root: os.truncate(only(root, "layers/*/*.data"), 0)),
    ("sha256 is another", lambda root: flip(only(root, "layers/*/*.index"), 40)),
    ("lacks the index", lambda root: only(root, "layers/*/*.index").unlink()),
    ("sha256 is another", lambda root: flip(only(root, "manifests/*.json"), 40)),
    ("lacks manifests", lambda root: only(root, "manifests/*.json").unlink()),
    ("can't be read", lambda root: (root / "images/one.json").write_text("{")),
    ("can't be read", lambda root: (root / "images/one.json").write_text('{"manifest": "../../x", "format": 1}')),
    ("format 7", lambda root: (root / "images/one.json").write_text('{"manifest": "%s", "format": 7}' % ("0" * 64))),
    ("no such blob more than", lambda root: (root / "images/one.json").write_bytes(bytes(MIB))),
    ("describes the template", lambda root: replace_manifest(root, user="root")),
    ("not an absolute path", lambda root: replace_manifest(root, workdir="here")),
    ("layers are its base", lambda root: replace_manifest(root, base_layers=7)),
    ("has a layer twice|describes", twice),
    ("can't be read", lambda root: replace_manifest(root, layers=[])),
    ("can't be read", huge),
    ("other sizes", other_size),
]


@pytest.mark.parametrize(("why", "damage"), DAMAGE)
async def test_what_is_wrong_in_a_store_is_refused(
    images: ImageStore, other: ImageStore, root: Path, why: str, damage: Callable[[Path], object]
) -> None:
    """Corrupt, cut, missing, absurd: nothing of it becomes an image here, and nothing is left."""
    commit(images, "one", content(1))
    store = BlobStore.open(os.fspath(root))
    await push(images, "one", store, quiet)
    damage(root)
    with pytest.raises(BlobCorrupt, match=why):
        await pull(other, "one", store, quiet)
    assert other.templates() == []
    assert leftovers(other) == []
    assert layers_of(other) == set()


async def test_a_damaged_index_in_the_store_is_mended_by_the_next_push(
    images: ImageStore, other: ImageStore, root: Path
) -> None:
    """An index that is not what its name says counts as missing, as does one whose data is cut."""
    commit(images, "one", content(1))
    store = BlobStore.open(os.fspath(root))
    await push(images, "one", store, quiet)
    whole = files(root)
    flip(only(root, "layers/*/*.index"), 40)
    assert (await push(images, "one", store, quiet)).layers_sent == 1
    os.truncate(only(root, "layers/*/*.data"), 100)
    assert (await push(images, "one", store, quiet)).layers_sent == 1
    assert files(root) == whole


async def test_an_index_of_other_data_is_not_taken_for_that_of_the_layer(
    images: ImageStore, other: ImageStore, root: Path
) -> None:
    """Of the right name and the right sizes, from somebody who can write there: the layer is sent, and found whole."""
    commit(images, "one", content(1))
    store = BlobStore.open(os.fspath(root))
    await push(images, "one", store, quiet)
    path = only(root, "layers/*/*.index")
    form = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    form["hashes"] = bytes(32) + form["hashes"][32:]
    stored = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(form))
    digest = hashlib.sha256(stored).hexdigest()
    path.with_suffix(".data").rename(path.with_name(f"{digest}.data"))
    path.with_name(f"{digest}.index").write_bytes(stored)
    path.unlink()
    assert (await push(images, "one", store, quiet)).layers_sent == 1
    await pull(other, "one", store, quiet)
    assert (await push(other, "one", store, quiet)).layers_sent == 0


@pytest.mark.requires("root")
@pytest.mark.parametrize(
    ("pack", "why"),
    [(pack_hostile, "null is a device"), (pack_labelled, r"tool has an attribute .* security\.capability")],
)
async def test_a_layer_that_no_packer_made_is_not_pulled(
    images: ImageStore, other: ImageStore, root: Path, tmp_path: Path, pack: Callable[[Path, Path], str], why: str
) -> None:
    """Its digest is right, and it has a device of the host, or an attribute that would mean something to the kernel."""
    pack(tmp_path / "tree", tmp_path / "packed")
    commit(images, "one", (tmp_path / "packed").read_bytes())
    store = BlobStore.open(os.fspath(root))
    await push(images, "one", store, quiet)
    with pytest.raises(BlobCorrupt, match=why):
        await pull(other, "one", store, quiet)
    assert leftovers(other) == []


async def test_no_more_is_taken_than_was_asked_for() -> None:
    """From a server whose headers promise the range, and that sends on and on."""
    sent = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-65535/1000000\r\n"
            b"Last-Modified: Mon, 02 Nov 2026 10:00:00 GMT\r\nContent-Length: 314572800\r\n\r\n"
        )
        with suppress(ConnectionError):
            while sent < 300 * MIB:
                writer.write(bytes(MIB))
                await writer.drain()
                sent += MIB
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        store = BlobStore.open(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=10)
        with pytest.raises(BlobCorrupt, match="more than the 65536 bytes"):
            await store.get_range("key", 0, 65536)
    assert sent < 100 * MIB


async def test_a_record_of_first_reads_is_cut_to_its_bound() -> None:
    """Whoever wrote it: only of layers that are wanted, and no more than one may name."""
    one, other, third = "a" * 64, "b" * 64, "c" * 64
    record = ((one, tuple(range(10))), (third, (1,)), (other, tuple(range(10))), (one, (11,)))
    assert cut_hot(record, {one: HOT_BYTES_MAX // 16, other: HOT_BYTES_MAX // 8}) == (
        (one, tuple(range(10))),
        (other, (0, 1, 2)),
    )


async def test_a_damaged_layer_is_not_pushed(images: ImageStore, root: Path) -> None:
    """What is wrong here does not reach the store, nor does its name."""
    made = commit(images, "one", content(1))
    flip(images.layer_path(made.layers[0]), 1000)
    with pytest.raises(BlobCorrupt, match="damaged here"):
        await push(images, "one", BlobStore.open(os.fspath(root)), quiet)
    assert set(files(root)) == {"store.json"}
    assert leftovers(images) == []


async def test_a_lazily_kept_image_can_be_pushed_only_where_its_data_is(
    images: ImageStore, other: ImageStore, root: Path, tmp_path: Path
) -> None:
    """To its own store it goes under another name without a byte; for another one it must be pulled first."""
    commit(images, "one", content(1))
    store = BlobStore.open(os.fspath(root))
    await push(images, "one", store, quiet)
    await fetch(other, "one", store, local_name="two")
    assert (await push(other, "two", store, quiet)).layers_sent == 0
    with pytest.raises(InvalidSpec, match="barchan image pull"):
        await push(other, "two", BlobStore.open(os.fspath(tmp_path / "elsewhere")), quiet)
    assert (await fetch(images, "two", store)).digest == other.resolve("two").digest


KILLED = """
    import asyncio, sys
    from pathlib import Path
    from barchan.image.blobs import BlobStore
    from barchan.image.store import ImageStore
    from barchan.image.remote import pull, push

    what, images, root = sys.argv[1:]
    work = pull if what == "pull" else push
    asyncio.run(work(ImageStore(Path(images)), "one", BlobStore.open(root), lambda *at: print(*at, flush=True)))
"""


@pytest.mark.parametrize("after_lines", [1, 3, 4])
@pytest.mark.parametrize("what", ["push", "pull"])
async def test_a_killed_transfer_leaves_only_what_nobody_sees(
    images: ImageStore, other: ImageStore, root: Path, what: str, after_lines: int
) -> None:
    """Killed anywhere, a push has named nothing that is not whole, a pull nothing at all; the next one succeeds."""
    store = BlobStore.open(os.fspath(root))
    made = commit(images, "one", content(1, 100), content(2, 40))
    if what == "pull":
        await push(images, "one", store, quiet)
    place = images if what == "push" else other
    command = [sys.executable, "-c", textwrap.dedent(KILLED), what, os.fspath(place.root), os.fspath(root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(after_lines):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
    if what == "push":
        assert not (root / "images").exists()
        await push(images, "one", store, quiet)
    else:
        assert not any(other.templates())
    assert (await pull(other, "one", store, quiet)).layers == made.layers
    assert leftovers(place) == []


async def test_many_fetch_one_image_at_once(images: ImageStore, other: ImageStore, root: Path) -> None:
    """Whoever comes second finds the layers there, or makes the same ones."""
    commit(images, "one", content(1))
    store = BlobStore.open(os.fspath(root))
    await push(images, "one", store, quiet)
    found = await asyncio.gather(*(fetch(other, "one", store) for _ in range(8)), pull(other, "one", store, quiet))
    assert len({template.digest for template in found}) == 1
    assert leftovers(other) == []


async def test_the_record_of_first_reads_travels_with_the_store(root: Path) -> None:
    """Written, read, merged within its bound; none is an empty one, and garbage is told."""
    store = BlobStore.open(os.fspath(root))
    root.mkdir()
    template, one, other = "e" * 64, "a" * 64, "b" * 64
    assert await read_hot(store, template) == ()
    await write_hot(store, template, ((one, (0, 7)), (other, (1,))))
    assert await read_hot(store, template) == ((one, (0, 7)), (other, (1,)))
    for bad in (b"{", b'[["x", [1]]]', b'[["%s", [-1]]]' % one.encode()):
        (root / f"hot/{template}.json").write_bytes(bad)
        with pytest.raises(BlobCorrupt):
            await read_hot(store, template)
    first, second = ((one, (0, 7)), (other, (1,))), ((one, (7, 9)),)
    assert merge_hot(first, second, chunk_bytes=65536) == ((one, (0, 7, 9)), (other, (1,)))
    assert merge_hot(first, second, chunk_bytes=65536, bytes_max=2 * 65536) == ((one, (0, 7)),)
