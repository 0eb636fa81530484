"""Trees to and from a sandbox: what an honest tar keeps, and what a hostile one can't do."""

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from barchan.errors import BarchanError, Conflict, InvalidSpec, QuotaExceeded, RemoteProtocolError
from barchan.sdk.pack import pack
from barchan.sdk.untar import unpack


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b"", mode: int = 0o644
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, link, len(data), mode
    return info, data


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    out.seek(0)
    return out


def listing(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        found[name] = f"-> {os.readlink(path)}" if path.is_symlink() else "dir" if path.is_dir() else path.read_text()
    return found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A directory with a file beside it that nothing may touch."""
    (tmp_path / "outside").write_text("untouched")
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def test_a_tree_comes_back_as_it_went(tmp_path: Path, target: Path) -> None:
    """Files with their modes, directories, links of both kinds, odd names."""
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "deep/er/grün ☃").write_text("text")
    (source / "run").write_text("#!")
    (source / "run").chmod(0o755)
    (source / "deep/up").symlink_to("../run")
    (source / "empty").mkdir()
    os.link(source / "run", source / "same")
    (source / ("n" * 200)).write_text("long")
    packed = io.BytesIO()
    pack(source, packed)
    packed.seek(0)
    unpack(packed, target, 1 << 20)
    assert listing(target) == listing(source)
    assert stat.S_IMODE((target / "run").stat().st_mode) == 0o755
    assert (target / "run").stat().st_ino == (target / "same").stat().st_ino


def test_special_files_do_not_travel(tmp_path: Path) -> None:
    """A fifo in an uploaded tree is refused by name; so is a directory that is none."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidSpec, match="pipe"):
        pack(tmp_path, io.BytesIO())
    with pytest.raises(InvalidSpec):
        pack(tmp_path / "missing", io.BytesIO())


S, H, D = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
ATTACKS = {
    "absolute name": [member("/abs", data=b"x")],
    "climbing name": [member("../outside", data=b"x")],
    "climbing inside": [member("a/../../outside", data=b"x")],
    "absolute link": [member("l", S, "/etc/passwd")],
    "climbing link": [member("l", S, "../outside")],
    "climbing link deeper": [member("d/l", S, "../../outside")],
    "late climb": [member("d", D), member("l", S, "d/../../outside")],
    "climb through a link": [member("a/b/s", S, "../.."), member("t", S, "a/b/s/../outside")],
    "write through a link": [member("l", S, ".."), member("l/outside", data=b"x")],
    "write through a link, link last": [member("l/outside", data=b"x"), member("l", S, "..")],
    "link below a link": [member("l", S, "d"), member("d", D), member("l/m", S, "x")],
    "hard link outside": [member("h", H, "../outside")],
    "hard link absolute": [member("h", H, "/etc/passwd")],
    "hard link to a link": [member("l", S, "x"), member("h", H, "l")],
    "hard link to nothing": [member("h", H, "none")],
    "device": [member("dev", tarfile.CHRTYPE)],
    "fifo": [member("fifo", tarfile.FIFOTYPE)],
    "no name": [member(".", data=b"x")],
    "file as directory": [member("f", data=b"x"), member("f/g", data=b"x")],
    "directory as file": [member("d/e", data=b"x"), member("d", data=b"x")],
}  # fmt: skip


@pytest.mark.parametrize("members", ATTACKS.values(), ids=ATTACKS.keys())
def test_a_hostile_tree_reaches_nothing_outside(target: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    """Each attack is refused with a typed error; outside nothing was written, inside no link leads out."""
    with pytest.raises((RemoteProtocolError, Conflict)):
        unpack(archive_of(*members), target, 1 << 20)
    assert sorted(path.name for path in target.parent.iterdir()) == ["outside", "target"]
    assert (target.parent / "outside").read_text() == "untouched"
    for path in target.rglob("*"):
        assert path.resolve().is_relative_to(target.resolve())


def test_local_links_are_not_followed(target: Path) -> None:
    """A link that lies in the target already is not written through; in a file's place it is replaced."""
    (target / "out").symlink_to("..")
    (target / "file").symlink_to("../outside")
    with pytest.raises(Conflict):
        unpack(archive_of(member("out/outside", data=b"x")), target, 1 << 20)
    unpack(archive_of(member("file", data=b"new")), target, 1 << 20)
    assert (target.parent / "outside").read_text() == "untouched"
    assert not (target / "file").is_symlink() and (target / "file").read_text() == "new"


def test_set_id_bits_are_dropped(target: Path) -> None:
    """No program of a sandbox becomes set-uid here, or writable by others."""
    unpack(archive_of(member("f", data=b"x", mode=0o6777)), target, 1 << 20)
    assert stat.S_IMODE((target / "f").stat().st_mode) == 0o755


def pax_bomb() -> io.BytesIO:
    info = tarfile.TarInfo("x")
    info.pax_headers = {"comment": "y" * (2 << 20)}
    return archive_of((info, b""))


def many_headers() -> io.BytesIO:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 0
    return io.BytesIO(header.tobuf() * 5000)


def sparse() -> io.BytesIO:
    info = tarfile.TarInfo("x")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "x",
        "GNU.sparse.realsize": str(1 << 40),
    }
    data = b"1\n0\n0\n".ljust(512, b"\0")
    info.size = len(data)
    return archive_of((info, data))


@pytest.mark.parametrize("bomb", [pax_bomb, many_headers, sparse])
def test_headers_can_not_fill_memory_or_disk(target: Path, bomb: Callable[[], io.BytesIO]) -> None:
    """Long headers, endless headers and files that are larger than the archive are refused."""
    with pytest.raises((RemoteProtocolError, QuotaExceeded)):
        unpack(bomb(), target, 1 << 20)
    assert listing(target) == {}


def test_the_size_is_bounded(target: Path) -> None:
    """More bytes than allowed are refused before they are written."""
    with pytest.raises(QuotaExceeded):
        unpack(archive_of(member("a", data=bytes(600)), member("b", data=bytes(600))), target, 1000)
    assert list(listing(target)) == ["a"]


@pytest.mark.parametrize("junk", [b"", b"junk" * 1000, bytes(512) + b"junk" * 200])
def test_what_is_no_tar_is_told(target: Path, junk: bytes) -> None:
    """Bytes that are no archive are the sandbox's mistake, or an empty archive; never a crash."""
    try:
        unpack(io.BytesIO(junk), target, 1000)
    except BarchanError as error:
        assert isinstance(error, RemoteProtocolError)
    assert listing(target) == {}


def test_every_cut_of_an_archive_is_told(target: Path) -> None:
    """An archive that breaks off inside a member is an error at every place, not a shorter file."""
    whole = archive_of(member("a", data=b"x" * 700)).getvalue()
    for length in range(1, 512 + 700, 97):
        with pytest.raises(RemoteProtocolError):
            unpack(io.BytesIO(whole[:length]), target, 1 << 20)


@pytest.mark.parametrize("link", ["/etc/hosts", "../../out", "a/../../b", ".."])
def test_links_that_a_sandbox_refuses_are_refused_before_anything_is_sent(tmp_path: Path, link: str) -> None:
    """The error names the link and where it leads."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/link").symlink_to(link if link != ".." else "../..")
    with pytest.raises(InvalidSpec, match=r"deep/link links to .*nothing was sent"):
        pack(tmp_path, io.BytesIO())
