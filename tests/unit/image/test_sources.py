"""Images in files: what is made of them, what hostile and damaged ones come to, and what goes back out."""

import asyncio
import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from barchan.errors import BlobCorrupt, Denied, InvalidSpec, NotFound
from barchan.image import export, intake, sources
from barchan.image.archives import Archive
from barchan.image.erofs import Erofs
from barchan.image.export import push
from barchan.image.pack import Limits, pack_tree
from barchan.image.store import ImageStore
from barchan.image.template import LAYERS_MAX, Template
from tests.layouts import Layout, member, sha256, tar_of

ONE = tar_of(("a/one", b"1"), ("a/two", b"2"))
TWO = tar_of(("a/.wh.two", b""), ("b", b"3"))


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


async def pull(store: ImageStore, source: str, **wishes: Any) -> Template:
    limits = wishes.pop("limits", Limits(bytes_max=1 << 30))
    made = sources.Wishes(**wishes)
    return await sources.pull(store, source, kind="erofs", progress=lambda stage: None, wishes=made, limits=limits)


def files_of(store: ImageStore, template: Template) -> list[dict[str, bytes | None]]:
    """Path and content (None: no regular file) of what each layer holds, topmost first."""
    found = []
    for layer in template.layers:
        with Erofs.open(store.layer_path(layer)) as opened:
            found.append(
                {
                    os.fsdecode(path): opened.read(inode, 0, 100) if inode.mode & 0o170000 == 0o100000 else None
                    for path, inode in opened.walk()
                    if path
                }
            )
    return found


def left(store: ImageStore) -> list[str]:
    """What is in the store beside its fixed files and hints."""
    folders = ("tmp", "layers", "templates", "doubtful")
    return [path.name for folder in folders for path in (store.root / folder).glob("*")]


async def test_a_layout_becomes_a_template(tmp_path: Path, store: ImageStore) -> None:
    """Layers in order, whiteouts in them, and what the config says; wishes come over it."""
    layout = Layout(tmp_path / "layout", ONE, TWO, Env=["A=1"], User="7", WorkingDir="/a", Cmd=["x"])
    made = await pull(store, f"oci:{layout.path}", name="mine", env={"B": "2"})
    assert files_of(store, made) == [{"a": None, "a/two": None, "b": b"3"}, {"a": None, "a/one": b"1", "a/two": b"2"}]
    assert (made.name, made.user, made.workdir, made.cmd, made.env["A"], made.env["B"]) == (
        "mine",
        "7",
        "/a",
        ("x",),
        "1",
        "2",
    )
    assert made.source == f"oci:{layout.path}"
    again = await pull(store, f"oci:{layout.path}", user="root", workdir="/")
    assert (again.name, again.user, again.workdir) == ("layout", "root", "/")
    assert again.layers == made.layers


async def test_known_layers_are_not_read_again(tmp_path: Path, store: ImageStore) -> None:
    """A layer that is here needs no bytes of its blob; one that was removed does, whatever the hint says."""
    layout = Layout(tmp_path / "layout", ONE, TWO)
    made = await pull(store, f"oci:{layout.path}", name="mine")
    kept = layout.blob(layout.layers[0]["digest"]).read_bytes()
    layout.blob(layout.layers[0]["digest"]).unlink()
    assert (await pull(store, f"oci:{layout.path}", name="other")).layers == made.layers
    store.remove("mine")
    store.remove("other")
    with pytest.raises(NotFound):
        await pull(store, f"oci:{layout.path}")
    layout.blob(layout.layers[0]["digest"]).write_bytes(kept)
    assert (await pull(store, f"oci:{layout.path}")).layers == made.layers


async def test_a_known_layer_that_is_damaged_is_read_again(tmp_path: Path, store: ImageStore) -> None:
    """A pull mends it, whatever other images stand on it."""
    layout = Layout(tmp_path / "layout", ONE, TWO)
    made = await pull(store, f"oci:{layout.path}", name="mine")
    path = store.layer_path(made.layers[0])
    right = path.read_bytes()
    path.write_bytes(right[:-1])
    assert (await pull(store, f"oci:{layout.path}", name="other")).layers == made.layers
    assert path.read_bytes() == right


async def test_layers_packed_in_any_way_are_read(tmp_path: Path, store: ImageStore) -> None:
    """gzip in several members, zstd in several frames, plain: by what the bytes are, not by what they are called."""
    zstandard = pytest.importorskip("zstandard")
    half = len(ONE) // 2
    members = gzip.compress(ONE[:half]) + gzip.compress(ONE[half:])
    frames = zstandard.compress(ONE[:half]) + zstandard.compress(ONE[half:])
    for number, blob in enumerate((ONE, members, frames)):
        layout = Layout(tmp_path / f"layout{number}", ONE)
        layout.layers = [{"mediaType": "application/vnd.oci.image.layer.v1.tar", **layout.put(blob)}]
        layout.write()
        own = ImageStore(tmp_path / f"images{number}")
        assert files_of(own, await pull(own, f"oci:{layout.path}")) == [{"a": None, "a/one": b"1", "a/two": b"2"}]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


def other_bytes(path: Path) -> None:
    path.write_bytes(gzip.compress(tar_of(("evil", b"x")), mtime=0))


@pytest.mark.parametrize("damage", [truncate, flip, other_bytes])
@pytest.mark.parametrize("what", ["layer", "config", "manifest"])
async def test_wrong_bytes_are_never_kept(tmp_path: Path, store: ImageStore, what: str, damage: Any) -> None:
    """A blob, config or manifest that has not its digest ends the pull, and nothing of it is left."""
    layout = Layout(tmp_path / "layout", ONE, TWO)
    manifest = json.loads(layout.blob(layout.manifest["digest"]).read_bytes())
    digest = {"layer": layout.layers[1]["digest"], "config": manifest["config"]["digest"]}.get(
        what, layout.manifest["digest"]
    )
    damage(layout.blob(digest))
    with pytest.raises(BlobCorrupt, match="sha256:"):
        await pull(store, f"oci:{layout.path}")
    assert left(store) == []


async def test_a_wrong_diff_id_is_never_kept(tmp_path: Path, store: ImageStore) -> None:
    """The blob may be what the manifest says: the config has its own word."""
    layout = Layout(tmp_path / "layout", ONE, TWO)
    layout.config["rootfs"]["diff_ids"][1] = "sha256:" + "0" * 64
    layout.write()
    with pytest.raises(BlobCorrupt, match="not to its diff_id"):
        await pull(store, f"oci:{layout.path}")
    assert left(store) == []


HOSTILE = {
    "traversal": tar_of(("a/../../evil", b"x")),
    "absolute": tar_of(("/evil", b"x")),
    "device": tar_of(member("evil", tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "below a link": tar_of(member("link", tarfile.SYMTYPE, "/"), ("link/evil", b"x")),
    "link to nothing": tar_of(member("evil", tarfile.LNKTYPE, "../../etc/passwd")),
    "no archive": b"evil" * 1000,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_layers_are_refused(tmp_path: Path, store: ImageStore, name: str) -> None:
    """What would reach out of its tree, or be more than files, is named; nothing is left, here or elsewhere."""
    layout = Layout(tmp_path / "layout", ONE, HOSTILE[name])
    with pytest.raises(InvalidSpec, match="can't be a layer"):
        await pull(store, f"oci:{layout.path}")
    assert left(store) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "layout"]


async def test_bombs_are_refused(tmp_path: Path, store: ImageStore) -> None:
    """Too many bytes in one layer, in several together, after an archive's end, or too many names."""
    zeros = tar_of(("zeros", bytes(8 << 20)))
    limits = Limits(bytes_max=6 << 20, entries_max=100)
    for number, layers in enumerate(
        (
            (zeros,),
            tuple(tar_of((f"zeros{n}", bytes(1 << 20))) for n in range(8)),
            (ONE + bytes(8 << 20),),
            (tar_of(*((f"f{n}", b"") for n in range(101))),),
        )
    ):
        layout = Layout(tmp_path / f"layout{number}", *layers)
        with pytest.raises(InvalidSpec, match=r"more than|at most|limit|entries"):
            await pull(store, f"oci:{layout.path}", limits=limits)
        assert left(store) == []


async def test_trees_are_bounded_too(tmp_path: Path, store: ImageStore) -> None:
    """Folders of this machine have the limits that archives have."""
    (tmp_path / "tree").mkdir()
    for number in range(5):
        (tmp_path / "tree" / str(number)).touch()
    with pytest.raises(InvalidSpec, match="more than 4 entries"):
        await pull(store, f"dir:{tmp_path / 'tree'}", limits=Limits(entries_max=4))
    assert left(store) == []


async def test_a_layer_larger_than_it_says_is_not_read_on(tmp_path: Path, store: ImageStore) -> None:
    """The manifest's size is a bound, not a guess."""
    layout = Layout(tmp_path / "layout", ONE)
    layout.layers[0]["size"] -= 1
    layout.write()
    with pytest.raises((BlobCorrupt, InvalidSpec)):
        await pull(store, f"oci:{layout.path}")
    assert left(store) == []


async def test_long_stacks_are_merged(tmp_path: Path, store: ImageStore) -> None:
    """More layers than a sandbox can have become as many as it can, and show the same."""
    layers = [tar_of((f"f{n}", str(n).encode()), *([(f".wh.f{n - 1}", b"")] if n % 2 else [])) for n in range(70)]
    layout = Layout(tmp_path / "layout", *layers)
    made = await pull(store, f"oci:{layout.path}")
    assert len(made.layers) == LAYERS_MAX
    assert files_of(store, made)[0] == {"f69": b"69", "f68": None}
    assert files_of(store, made)[-1] == {f"f{n}": str(n).encode() for n in (1, 3, 5, 6)}


async def test_indexes_lead_to_this_machine_s_image(tmp_path: Path, store: ImageStore) -> None:
    """By platform, by tag, through an index in an index; what is not there is said with what is."""
    layout = Layout(tmp_path / "layout", ONE)
    ours = {**layout.manifest, "platform": {"os": "linux", "architecture": layout.config["architecture"]}}
    arm = {**layout.manifest, "digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "sparc"}}
    inner = json.dumps({"schemaVersion": 2, "manifests": [arm, ours]}).encode()
    media_type = "application/vnd.oci.image.index.v1+json"
    tag = {"org.opencontainers.image.ref.name": "v1"}
    other = {**layout.manifest, "annotations": {"org.opencontainers.image.ref.name": "v2"}}
    layout.index({"mediaType": media_type, **layout.put(inner), "annotations": tag}, other)
    assert (await pull(store, f"oci:{layout.path}:v1")).name == "layout:v1"
    with pytest.raises(NotFound, match="several images: v1, v2"):
        await pull(store, f"oci:{layout.path}")
    with pytest.raises(NotFound, match="no image 'v3'; it has: v1, v2"):
        await pull(store, f"oci:{layout.path}:v3")
    layout.index(arm)
    with pytest.raises(NotFound, match="it has: linux/sparc"):
        await pull(store, f"oci:{layout.path}")


def saved(layout: Layout, target: Path, *, links: bool = False, **changes: Any) -> Path:
    """The image of a layout as older releases of `docker save` write it."""
    manifest = json.loads(layout.blob(layout.manifest["digest"]).read_bytes())
    config = layout.blob(manifest["config"]["digest"]).read_bytes()
    name = sha256(config).removeprefix("sha256:") + ".json"
    layers = [gzip.decompress(layout.blob(layer["digest"]).read_bytes()) for layer in layout.layers]
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    entries: list[tuple[str, bytes] | tarfile.TarInfo] = list(zip(names, layers, strict=True))
    if links:
        entries = [(f"blob{number}", data) for number, data in enumerate(layers)]
        entries += [member(name, tarfile.SYMTYPE, f"../blob{number}") for number, name in enumerate(names)]
    listed = [{"Config": name, "RepoTags": ["h.x/team/app:1"], "Layers": names, **changes}]
    target.write_bytes(tar_of(*entries, (name, config), ("manifest.json", json.dumps(listed).encode())))
    return target


@pytest.mark.parametrize("links", [False, True])
async def test_a_docker_save_archive_becomes_a_template(tmp_path: Path, store: ImageStore, links: bool) -> None:
    """Its layers are where its list says, or where links in it lead; its own name is the image's."""
    layout = Layout(tmp_path / "layout", ONE, TWO)
    made = await pull(store, f"docker-archive:{saved(layout, tmp_path / 'saved.tar', links=links)}")
    assert made.name == "team/app:1"
    assert made.layers == (await pull(store, f"oci:{layout.path}")).layers
    hub = saved(layout, tmp_path / "hub.tar", links=links, RepoTags=["docker.io/library/app:1"])
    assert (await pull(store, f"docker-archive:{hub}:app:1")).name == "library/app:1"
    with pytest.raises(NotFound, match=r"\(try: docker-archive:.*/hub.tar:docker.io/library/app:1\)"):
        await pull(store, f"docker-archive:{hub}:other")


async def test_docker_save_archives_that_lie_are_refused(tmp_path: Path, store: ImageStore) -> None:
    """Missing members, links in circles, configs that have not the name of their bytes, archives cut or compressed."""
    layout = Layout(tmp_path / "layout", ONE)
    with pytest.raises(NotFound, match="no member 'gone'"):
        await pull(store, f"docker-archive:{saved(layout, tmp_path / 'a.tar', Layers=['gone'])}")
    with pytest.raises(NotFound, match="no member"):
        await pull(store, f"docker-archive:{saved(layout, tmp_path / 'b.tar', Layers=['../../etc/passwd'])}")
    with pytest.raises(NotFound, match=r"h\.x/team/app:1"):
        await pull(store, f"docker-archive:{saved(layout, tmp_path / 'c.tar')}:other")
    (tmp_path / "loop.tar").write_bytes(tar_of(member("manifest.json", tarfile.SYMTYPE, "manifest.json")))
    with pytest.raises(InvalidSpec, match="a link to itself"):
        await pull(store, f"docker-archive:{tmp_path / 'loop.tar'}")
    data = saved(layout, tmp_path / "d.tar").read_bytes()
    (tmp_path / "whole.tar.gz").write_bytes(gzip.compress(data))
    with pytest.raises(InvalidSpec, match="gunzip"):
        await pull(store, f"docker-archive:{tmp_path / 'whole.tar.gz'}")
    (tmp_path / "cut.tar").write_bytes(data[:700])
    with pytest.raises((BlobCorrupt, NotFound)):
        await pull(store, f"docker-archive:{tmp_path / 'cut.tar'}")
    with pytest.raises(NotFound, match="there is no file"):
        await pull(store, f"oci-archive:{tmp_path / 'none.tar'}")
    assert left(store) == []


def test_an_archive_s_own_headers_are_bounded(tmp_path: Path) -> None:
    """A header that says it has gigabytes is not read."""
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 64 << 20
    with (tmp_path / "bomb.tar").open("wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT))
        file.truncate(128 << 20)
    with pytest.raises(BlobCorrupt, match="a header of"):
        Archive(tmp_path / "bomb.tar")


async def test_layouts_with_other_things_in_them_are_refused(tmp_path: Path, store: ImageStore) -> None:
    """A pipe where a blob should be does not stop the pull; a missing index is said."""
    layout = Layout(tmp_path / "layout", ONE)
    blob = layout.blob(layout.layers[0]["digest"])
    blob.unlink()
    os.mkfifo(blob)
    with pytest.raises(InvalidSpec, match="is no file"):
        await pull(store, f"oci:{layout.path}")
    (layout.path / "index.json").unlink()
    with pytest.raises(NotFound, match=r"has no index\.json"):
        await pull(store, f"oci:{layout.path}")
    with pytest.raises(NotFound, match="is not a directory"):
        await pull(store, f"oci:{tmp_path / 'none'}")


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
async def test_what_goes_out_comes_back_the_same(tmp_path: Path, store: ImageStore, compression: Any) -> None:
    """Layout and archive, twice: the same digest, nothing brought the second time, the same layers when pulled."""
    layout = Layout(
        tmp_path / "in", ONE, TWO, Env=["A=1"], User="7:8", WorkingDir="/a", Entrypoint=["/e"], Cmd=["c", "d"]
    )
    made = await pull(store, f"oci:{layout.path}", name="mine")

    async def pushed(to: str) -> tuple[str, int]:
        done = await push(store, "mine", to, progress=lambda stage: None, compression=compression)
        return done.digest, done.blobs_bytes

    digest, sent = await pushed(f"oci:{tmp_path / 'out'}:v1")
    assert sent > 0
    assert await pushed(f"oci:{tmp_path / 'out'}:v1") == (digest, 0)
    assert await pushed(f"oci:{tmp_path / 'out'}:v2") == (digest, 0)
    assert len(json.loads((tmp_path / "out/index.json").read_bytes())["manifests"]) == 2
    shutil.rmtree(store.root / "known")
    assert await pushed(f"oci-archive:{tmp_path / 'one.tar'}:v1") == (digest, sent)
    first = (tmp_path / "one.tar").read_bytes()
    assert (await pushed(f"oci-archive:{tmp_path / 'one.tar'}:v1"))[0] == digest
    assert (tmp_path / "one.tar").read_bytes() == first
    for number, source in enumerate((f"oci:{tmp_path / 'out'}:v1", f"oci-archive:{tmp_path / 'one.tar'}")):
        other = ImageStore(tmp_path / f"other{number}")
        back = await pull(other, source, name="mine")
        assert back.digest == made.digest
        assert [layer.digest for layer in back.layers] == [layer.digest for layer in made.layers]
    assert sorted(left(store)) == sorted([*(f"{layer.digest}.erofs" for layer in made.layers), "mine.json"])


@pytest.mark.requires("root")
async def test_a_layer_kept_as_a_directory_is_packed_once(
    tmp_path: Path, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many layers lie above it; what goes out is the same."""
    layout = Layout(tmp_path / "in", ONE, TWO, tar_of(("c", b"4")))
    await pull(store, f"oci:{layout.path}", name="whole")
    await sources.pull(
        ImageStore(tmp_path / "other"),
        f"oci:{layout.path}",
        kind="dir",
        progress=lambda stage: None,
        wishes=sources.Wishes(name="whole"),
    )
    packed = []

    def packs(tree: Path, target: Path) -> str:
        packed.append(tree)
        return pack_tree(tree, target)

    monkeypatch.setattr(export, "pack_tree", packs)
    expected = await push(store, "whole", f"oci:{tmp_path / 'one'}", progress=lambda stage: None)
    again = await push(ImageStore(tmp_path / "other"), "whole", f"oci:{tmp_path / 'two'}", progress=lambda stage: None)
    assert again.digest == expected.digest
    assert len(packed) == len(set(packed)) == 3


@pytest.mark.parametrize(
    "destination", ["dir:/x", "docker-archive:/x", "git:/x@y", "docker://h.x/a@sha256:" + "0" * 64]
)
async def test_some_destinations_are_none(tmp_path: Path, store: ImageStore, destination: str) -> None:
    """What can't be written to is said before anything is made."""
    await pull(store, f"oci:{Layout(tmp_path / 'in', ONE).path}", name="mine")
    with pytest.raises(InvalidSpec, match=r"can't be pushed to|give a tag"):
        await push(store, "mine", destination, progress=lambda stage: None)


@pytest.mark.parametrize(
    "destination", ["oci:{}/file/below", "oci-archive:{}/file/out.tar", "oci-archive:/proc/no.tar"]
)
async def test_a_place_that_can_t_be_written_is_named(tmp_path: Path, store: ImageStore, destination: str) -> None:
    """Whose doing that is, and what to do, is said; nothing half written stays."""
    (tmp_path / "file").write_text("no folder")
    await pull(store, f"oci:{Layout(tmp_path / 'in', ONE).path}", name="mine")
    with pytest.raises(Denied, match=r"can't be written: .* \(try: another path"):
        await push(store, "mine", destination.format(tmp_path), progress=lambda stage: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "images", "in"]


async def test_given_up_work_has_stopped() -> None:
    """A cancelled pull waits for its threads, which see it soon."""

    started, stopped = threading.Event(), threading.Event()

    def work(stop: threading.Event) -> None:
        started.set()
        while not stop.is_set():
            time.sleep(0.01)
        stopped.set()
        raise intake.Stopped

    task = asyncio.ensure_future(intake.in_thread(work))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped.is_set()


def test_a_budget_is_shared() -> None:
    """What several take together is bounded, in the words that were given."""
    budget = intake.Budget(10, "too much")
    budget.take(6)
    with pytest.raises(InvalidSpec, match="too much"):
        budget.take(5)


def test_digests_are_of_what_is_read() -> None:
    """The sum is of all bytes, in whatever pieces they were read."""
    counted = intake._Counted(io.BytesIO(ONE), intake.Budget(1 << 20, ""), threading.Event())
    assert counted.read(3) == ONE[:3]
    counted.drain()
    assert (counted.digest, counted.count) == (f"sha256:{hashlib.sha256(ONE).hexdigest()}", len(ONE))
