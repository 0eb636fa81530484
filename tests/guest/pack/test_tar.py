"""Archives of layers: what is mounted is what unpacking would have given; what unpacking would fall for is refused."""

import gzip
import io
import json
import os
import random
import stat
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from barchan.image.erofs import Erofs
from barchan.image.implied import restore
from barchan.image.pack import Limits
from tests.guest.pack.conftest import Mount, mounted
from tests.guest.pack.test_pack import fill, seen

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(120)]

INPUT, ROOM = 3, 4
BLOCK = 512
PLAIN = 0o644
FUZZ_S = 3.0

PackTar = Callable[..., "subprocess.CompletedProcess[bytes]"]
Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


@pytest.fixture
def pack_tar(program: Path) -> PackTar:
    """Packs an archive into an image; what the program says and how it ends is the caller's to look at."""

    def run(
        archive: bytes, image: Path, bytes_max: int = 1 << 30, options: tuple[str, ...] = ()
    ) -> "subprocess.CompletedProcess[bytes]":
        argv = [program, "--tar", *options, image, str(bytes_max)]
        return subprocess.run(argv, input=archive, capture_output=True, timeout=60, check=False)

    return run


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, *, mode: int = PLAIN, link: str = "", **fields: object
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname = kind, mode, link
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def file(name: str, content: bytes = b"", **fields: object) -> Entry:
    return entry(name, size=len(content), **fields), content  # type: ignore[arg-type]


def directory(name: str, mode: int = 0o755) -> tarfile.TarInfo:
    return entry(name, tarfile.DIRTYPE, mode=mode)


def symlink(name: str, target: str) -> tarfile.TarInfo:
    return entry(name, tarfile.SYMTYPE, link=target)


def hard_link(name: str, target: str) -> tarfile.TarInfo:
    return entry(name, tarfile.LNKTYPE, link=target)


def archive(*entries: Entry, format: int = tarfile.PAX_FORMAT) -> bytes:
    """Written member by member as given, whatever a tool would refuse to write."""
    made = io.BytesIO()
    for item in entries:
        info, content = item if isinstance(item, tuple) else (item, b"")
        made.write(info.tobuf(format, "utf-8", "surrogateescape"))
        made.write(content + bytes(-len(content) % BLOCK))
    return made.getvalue() + bytes(2 * BLOCK)


@pytest.mark.parametrize("how", ["pax", "gnu"])
def test_what_is_mounted_is_what_unpacking_gives(tmp_path: Path, pack_tar: PackTar, mount: Mount, how: str) -> None:
    """The same names, modes, owners, times, links, attributes and content, of a tree with real ones in it."""
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o751)
    fill(tree)
    (tree / "socket").unlink()  # which tar leaves out
    for real in (os.path.dirname(os.__file__) + "/asyncio", "/etc", "/usr/share/zoneinfo/Europe"):
        subprocess.run(["cp", "-a", real, tree], check=True)
    xattrs = ["--xattrs", "--xattrs-include=user.*"] if how == "pax" else []
    made = subprocess.run(["tar", f"--format={how}", *xattrs, "-C", tree, "-c", "."], check=True, capture_output=True)
    (tmp_path / "unpacked").mkdir()
    subprocess.run(["tar", *xattrs, "-xp", "-C", tmp_path / "unpacked"], input=made.stdout, check=True)
    done = pack_tar(made.stdout, tmp_path / "image")
    assert (done.returncode, done.stderr) == (0, b"")
    found = seen(mount(tmp_path / "image"))
    assert found == seen(tmp_path / "unpacked")
    assert len(found) > 800


def test_the_same_archive_gives_the_same_image(tmp_path: Path, pack_tar: PackTar) -> None:
    """Byte for byte, however its pieces come."""
    made = archive(directory("a"), file("a/b", b"x" * 100_000), hard_link("c", "a/b"), file("zero", bytes(1 << 20)))
    for name in ("one", "two"):
        assert pack_tar(made, tmp_path / name).returncode == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert (tmp_path / "one").stat().st_size < 200_000  # zeros take no room


@pytest.fixture
def over(tmp_path: Path, mount: Mount) -> Iterator[Callable[[Path, Path], Path]]:
    """Mounts an image over a directory."""
    merged = tmp_path / "merged"
    made: list[Path] = []

    def run(image: Path, lower: Path) -> Path:
        merged.mkdir()
        options = f"lowerdir={mount(image)}:{lower}"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "none", merged], check=True)
        made.append(merged)
        return merged

    yield run
    for path in made:
        subprocess.run(["umount", path], check=True)


def names(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_whiteouts_hide_what_lies_below_and_nothing_of_their_own_layer(
    tmp_path: Path, pack_tar: PackTar, over: Callable[[Path, Path], Path]
) -> None:
    """A whiteout hides its name, an opaque one all of a directory, wherever in the archive they stand."""
    lower = tmp_path / "lower"
    for name in (
        "gone/x",
        "opaque/below",
        "before/below",
        "after/below",
        "merged/below",
        "replaced/below",
        "stays/below",
    ):
        (lower / name).parent.mkdir(parents=True)
        (lower / name).touch()
    (lower / "kept").write_text("old")
    made = archive(
        file(".wh.gone"),
        directory("opaque"),
        file("opaque/new"),
        file("opaque/.wh..wh..opq"),
        file(".wh.before"),
        file("before/new"),  # with no directory of its own, over a whiteout
        directory("after"),
        file("after/new"),
        file(".wh.after"),
        file("merged/new"),
        file("kept", b"new"),
        file(".wh.kept"),
        file(".wh.not-there"),
        file("replaced"),
        directory("replaced"),
        entry("device", tarfile.CHRTYPE, mode=0),
        directory(".wh..wh.plnk"),  # of a file system that is no more
        file(".wh..wh.plnk/1.2"),
    )
    assert pack_tar(made, tmp_path / "image").stderr == b""
    merged = over(tmp_path / "image", lower)
    assert names(merged) == {
        *("opaque", "opaque/new", "before", "before/new", "after", "after/new", "kept", "replaced"),
        *("merged", "merged/below", "merged/new", "stays", "stays/below"),
    }
    assert (merged / "kept").read_text() == "new"


def test_a_later_entry_replaces_an_earlier_one(tmp_path: Path, pack_tar: PackTar, mount: Mount) -> None:
    """Of any kind, with what was below it; a directory over a directory only changes what is said about it."""
    made = archive(
        file("file", b"first"),
        hard_link("other-name", "file"),
        file("file", b"second"),
        directory("dir", 0o700),
        file("dir/in", b"in"),
        hard_link("in-too", "dir/in"),
        directory("dir", 0o711),
        directory("was-dir"),
        file("was-dir/in"),
        hard_link("lost", "was-dir/in"),
        symlink("was-dir", "anywhere/../../at/all"),
        symlink("was-link", "/etc"),
        directory("was-link"),
        file("was-link/passwd", b"ours"),
        hard_link("file", "./file"),
        file("./a//b/./c/"),
        directory("./", 0o700),
    )
    assert pack_tar(made, tmp_path / "image").stderr == b""
    root = mount(tmp_path / "image")
    assert (root / "file").read_text() == "second"
    assert (root / "other-name").read_text() == "first"
    links = {name: (root / name).lstat().st_nlink for name in ("file", "other-name", "dir/in", "lost")}
    assert links == {"file": 1, "other-name": 1, "dir/in": 2, "lost": 1}
    assert stat.S_IMODE((root / "dir").stat().st_mode) == 0o711
    assert (root / "was-dir").readlink() == Path("anywhere/../../at/all")
    assert (root / "was-link" / "passwd").read_text() == "ours"
    assert (root / "a" / "b" / "c").is_dir()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    made_up = (root / "a").stat()
    assert (stat.S_IMODE(made_up.st_mode), made_up.st_uid, made_up.st_gid, made_up.st_mtime_ns) == (0o755, 0, 0, 1)


def test_what_an_archive_says_about_itself(tmp_path: Path, pack_tar: PackTar, mount: Mount) -> None:
    """Times with nanoseconds, ids and attributes come from pax records; capabilities and an overlay's words do not."""
    attributes = {
        "SCHILY.xattr.user.note": "value=1\n2",
        "SCHILY.xattr.security.capability": "anything",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
        "SCHILY.xattr.trusted.overlay.redirect": "/etc",
        "mtime": "1234567890.123456789",
        "uid": "65535",
    }
    info = entry("set-id", mode=0o6755, gid=7, pax_headers=attributes)
    before = entry("before", pax_headers={"mtime": "-5.5"})
    assert pack_tar(archive(info, before, entry("pipe", tarfile.FIFOTYPE)), tmp_path / "image").stderr == b""
    root = mount(tmp_path / "image")
    found = (root / "set-id").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o6755, 65_535, 7)
    assert found.st_mtime_ns == 1_234_567_890_123_456_789
    assert {key: os.getxattr(root / "set-id", key) for key in os.listxattr(root / "set-id")} == {
        "user.note": b"value=1\n2"
    }
    assert (root / "before").stat().st_mtime == -5.5
    assert (root / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([file("a"), file("../b")], "../b: a name with .. is refused"),
        ([file("a/../../b")], "a/../../b: a name with .. is refused"),
        ([file("/etc/passwd")], "/etc/passwd: absolute names are refused"),
        ([hard_link("./", "a")], "./: only a directory can be the root"),
        ([symlink(".", "x")], ".: only a directory can be the root"),
        ([symlink("link", "/etc"), file("link/passwd")], "link/passwd: it lies below link, which is no directory"),
        ([file("file"), file("file/x")], "file/x: it lies below file, which is no directory"),
        ([hard_link("a", "none")], "a: a hard link to what is not there"),
        ([file("b"), hard_link("a", "/b")], "a: a hard link: absolute names are refused"),
        ([file("b"), hard_link("a", "../b")], "a: a hard link: a name with .. is refused"),
        ([directory("b"), hard_link("a", "b")], "a: a hard link to a directory"),
        ([directory("b"), hard_link("b", ".")], "b: a hard link to a directory"),
        ([file(".wh.b"), hard_link("a", "b")], "a: a hard link to what is not there"),
        ([symlink("s", "d"), file("d/x"), hard_link("a", "s/x")], "a: a hard link to what is not there"),
        ([entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3)], "null: a device"),
        ([entry("disk", tarfile.BLKTYPE, devmajor=8)], "disk: a device"),
        ([entry("zero-disk", tarfile.BLKTYPE)], "zero-disk: a device"),
        ([entry("odd", b"V")], "odd: an entry of type 86"),
        ([entry("odd", b"\n")], "odd: an entry of type 10"),
        ([file(".wh..")], ".wh..: a whiteout of nothing"),
        ([file(".wh...")], ".wh...: a whiteout of nothing"),
        ([file(".wh.")], ".wh.: a whiteout of nothing"),
        ([file(".wh.a/b")], ".wh.a/b: it lies below a whiteout"),
        ([file(".wh.a", b"x")], ".wh.a: a whiteout with content"),
        ([file(".wh..wh..opq")], ".wh..wh..opq: it hides all of the layers below"),
        ([symlink("s", "")], "s: a symbolic link to nothing"),
        ([entry("s", tarfile.SYMTYPE, link="x", size=5)], "s: only files have content"),
        ([file("n" * 256)], f"{'n' * 256}: a name of more than 255 bytes"),
        ([file("f", uid=65_536)], "f: it belongs to 65536:0; ids in a layer are at most 65535"),
        ([directory("x\ny\x7f\\"), file("x\ny\x7f\\/../z")], r"x\x0ay\x7f\x5c/../z: a name with .. is refused"),
        ([file("x\ny"), file("x\ny/z")], r"x\x0ay/z: it lies below x\x0ay, which is no directory"),
        ([file("a"), entry("b", size=1 << 40)], f"b: it has {1 << 40} bytes, of at most {1 << 30}"),
        (
            [entry("s", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})],
            "sparse members are refused",
        ),
        (
            [file("a"), entry("s", pax_headers={"SCHILY.xattr.user." + "x" * 251: ""})],
            "s: an attribute's name has none or more than 255 bytes",
        ),
    ],
)
def test_what_a_layer_cannot_be_is_refused_by_name(
    tmp_path: Path, pack_tar: PackTar, entries: list[Entry], reason: str
) -> None:
    """In one line, which names the entry and says what is wrong with it."""
    done = pack_tar(archive(*entries, format=tarfile.PAX_FORMAT), tmp_path / "image")
    assert (done.returncode, done.stderr.decode()) == (INPUT, f"{reason}\n")


TEXT = "bytes of names and targets of symbolic links"
ATTRIBUTE = entry("x", pax_headers={"SCHILY.xattr.user.x": "y" * 100})


@pytest.mark.parametrize(
    ("content", "options", "bytes_max", "reason"),
    [
        ([file("a/b/c"), file("a/b/d")], ("--entries-max", "3"), 1 << 20, "a/b/d: more than 3 entries"),
        ([file("a/b/c/d")], ("--depth-max", "3"), 1 << 20, "a/b/c/d: directories more than 3 deep"),
        ([ATTRIBUTE], ("--xattr-bytes-max", "99"), 1 << 20, "x: more than 99 bytes of attributes in all"),
        ([symlink("x", "y" * 50)], ("--text-bytes-max", "52"), 1 << 20, f"x: more than 52 {TEXT}"),
        ([file("a"), file("d/b")], ("--text-bytes-max", "5"), 1 << 20, f"d/b: more than 5 {TEXT}"),
        ([entry("big", size=10_000)], (), 8192, "big: it has 10000 bytes, of at most 8192"),
        ([file("a", b"x" * 20_000)] * 2, (), 30_000, "a: the archive has more than 30000 bytes"),
        ([file("a")] * 50, (), 16_384, "a: in what comes next, the archive has more than 16384 bytes"),
        ([file("a", b"x"), file("b", b"y")], (), 8192, "a: more than 8192 bytes, with the empty parts of sparse files"),
    ],
)
def test_each_bound_of_an_archive_is_told_with_the_entry(
    tmp_path: Path,
    pack_tar: PackTar,
    content: list[Entry],
    options: tuple[str, ...],
    bytes_max: int,
    reason: str,
) -> None:
    """Entries, with the directories that are made for them, depth, attributes and bytes."""
    done = pack_tar(archive(*content), tmp_path / "image", bytes_max, options)
    assert (done.returncode, done.stderr.decode()) == (INPUT, f"{reason}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["image"]


def test_a_full_disk_is_told_from_other_failures(tmp_path: Path, pack_tar: PackTar, small_disk: Path) -> None:
    """By an exit code of its own."""
    done = pack_tar(archive(file("big", bytes(range(256)) * 4096)), small_disk / "image")
    assert (done.returncode, done.stderr) == (ROOM, b"writing the image: No space left on device\n")


def test_many_entries_cost_little_memory(tmp_path: Path, program: Path, mount: Mount) -> None:
    """20,000 names in one directory, and a file larger than all the memory there is: 64 MiB are enough."""
    made = archive(*(file(f"wide/{number:05}", b"x") for number in range(20_000)))
    with open(tmp_path / "archive", "w+b") as source:
        source.write(entry("big", size=256 << 20).tobuf(tarfile.GNU_FORMAT))
        source.seek(256 << 20, os.SEEK_CUR)
        source.write(made)
        source.seek(0)
        bounded = [] if "asan" in program.parts else ["prlimit", f"--as={64 << 20}"]  # a sanitizer takes all there is
        subprocess.run([*bounded, program, "--tar", tmp_path / "image", str(1 << 30)], stdin=source, check=True)
    root = mount(tmp_path / "image")
    assert sum(1 for _ in (root / "wide").iterdir()) == 20_000
    assert (root / "wide" / "19999").read_bytes() == b"x"
    assert (root / "big").stat().st_size == 256 << 20


def test_damaged_archives_are_refused_and_never_crash(tmp_path: Path, pack_tar: PackTar) -> None:
    """Cut off anywhere and with bytes changed: either an image comes out or the archive is refused, in one line."""
    random_bytes = random.Random(5)
    whole = archive(
        directory("a"),
        file("a/b", b"content" * 700),
        hard_link("c", "a/b"),
        symlink("d", "e" * 150),
        file("f" * 200, b"x"),
        entry("g", pax_headers={"SCHILY.xattr.user.x": "y", "mtime": "1.5", "uid": "7"}),
        file(".wh.h"),
        file("a/.wh..wh..opq"),
    )
    end = time.monotonic() + FUZZ_S
    ended: dict[int, int] = {}
    while time.monotonic() < end:
        damaged = bytearray(whole)
        for _ in range(random_bytes.randrange(4)):
            damaged[random_bytes.randrange(len(whole))] = random_bytes.randrange(256)
        if random_bytes.random() < 0.8:  # keep the checksums right, so that the change is looked at
            for at in range(0, len(damaged), BLOCK):
                header = damaged[at : at + BLOCK]
                if header[257:262] == b"ustar":
                    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
                    damaged[at + 148 : at + 156] = b"%06o\0 " % total
        if random_bytes.random() < 0.3:
            del damaged[random_bytes.randrange(len(whole)) :]
        done = pack_tar(bytes(damaged), tmp_path / "image", 1 << 20)
        assert done.returncode in (0, INPUT), (done.returncode, done.stderr, bytes(damaged))
        assert done.stderr.count(b"\n") == (done.returncode != 0)
        ended[done.returncode] = ended.get(done.returncode, 0) + 1
        (tmp_path / "image").unlink()
    assert set(ended) == {0, INPUT}


@pytest.mark.parametrize("cut", [0, 100, BLOCK, 3 * BLOCK + 10, -2 * BLOCK])
def test_an_archive_without_its_end_is_refused(tmp_path: Path, pack_tar: PackTar, cut: int) -> None:
    """Nothing tells it from one that was cut off."""
    done = pack_tar(archive(file("a", b"x" * 5000))[:cut], tmp_path / "image")
    assert done.returncode == INPUT
    assert done.stderr.endswith(b"the archive is truncated\n")


def layers_of(layout: Path) -> list[Path]:
    """The blobs of a layout's one image, the lowest first."""

    def blob(descriptor: dict[str, str]) -> Path:
        return layout / "blobs" / descriptor["digest"].replace(":", "/")

    index = json.loads((layout / "index.json").read_bytes())
    manifest = json.loads(blob(index["manifests"][0]).read_bytes())
    return [blob(layer) for layer in manifest["layers"]]


@pytest.mark.requires("umoci")
def test_layers_of_a_real_tool_stack_as_it_unpacks_them(tmp_path: Path, pack_tar: PackTar, mount: Mount) -> None:
    """Two layers by umoci, of files removed, replaced and changed in kind: the overlay is what it unpacks."""
    layout, bundle = f"{tmp_path}/layout", tmp_path / "bundle"

    def umoci(*argv: str | Path) -> None:
        subprocess.run(["umoci", *argv], check=True, capture_output=True)

    umoci("init", "--layout", layout)
    umoci("new", "--image", f"{layout}:x")
    umoci("unpack", "--image", f"{layout}:x", bundle)
    rootfs = bundle / "rootfs"
    fill(rootfs)
    (rootfs / "socket").unlink()
    for name in ("gone", "kept", "replaced"):
        (rootfs / name / "deep").mkdir(parents=True)
        (rootfs / name / "deep" / "file").write_text(name)
    umoci("repack", "--image", f"{layout}:x", bundle)
    umoci("unpack", "--image", f"{layout}:x", tmp_path / "second")
    rootfs = tmp_path / "second" / "rootfs"
    subprocess.run(
        ["rm", "-r", rootfs / "gone", rootfs / "replaced", rootfs / "kept/deep/file", rootfs / "many"], check=True
    )
    (rootfs / "replaced").write_text("a file now")
    (rootfs / "kept" / "new").write_text("new")
    (rootfs / "pipe").unlink()
    (rootfs / "pipe").mkdir()
    (rootfs / "wide" / "0-").write_text("changed, in a directory that did not change itself")
    umoci("repack", "--image", f"{layout}:x", tmp_path / "second")
    umoci("unpack", "--image", f"{layout}:x", tmp_path / "third")
    images = []
    for number, layer in enumerate(layers_of(Path(layout))):
        assert pack_tar(gzip.decompress(layer.read_bytes()), tmp_path / f"image-{number}").returncode == 0
        images.insert(0, tmp_path / f"image-{number}")
    assert len(images) == 2
    with ExitStack() as opened:
        layers = [opened.enter_context(Erofs.open(image)) for image in images]
        assert restore(layers, tmp_path / "restored", limits=Limits()) is not None
        layers.insert(0, opened.enter_context(Erofs.open(tmp_path / "restored")))
        assert restore(layers, tmp_path / "again", limits=Limits()) is None
    lower = ":".join(str(mount(image)) for image in (tmp_path / "restored", *images))
    with mounted("none", "overlay", tmp_path / "merged", f"lowerdir={lower}") as merged:
        assert seen(merged) == seen(tmp_path / "third" / "rootfs")
