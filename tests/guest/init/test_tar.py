"""Trees out and in as tar streams; archives from hostile hands."""

import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.guest.init.driver import FOLLOWED, STDIN_OPEN, Connection, failure
from tests.guest.init.guest import Guest

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(120)]

EPERM, EBADMSG = 1, 74
USER = 65534


def archive(*members: tuple[str, str, bytes | str], **options: int) -> bytes:
    """A tar of (type, name, content or target); types: f d l h and any other letter as it is."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=options.pop("format", tarfile.PAX_FORMAT)) as tar:
        for kind, name, value in members:
            info = tarfile.TarInfo(name)
            info.mode = options.get("mode", 0o755 if kind == "d" else 0o644)
            info.mtime = options.get("mtime", 0)
            types = {"f": tarfile.REGTYPE, "d": tarfile.DIRTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE}
            info.type = types.get(kind, kind.encode())
            if isinstance(value, bytes):
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value))
            else:
                info.linkname = value
                tar.addfile(info)
    return raw.getvalue()


@pytest.fixture
def inbox(guest: Guest) -> Path:
    return guest.work / "inbox"


@pytest.fixture
def unpack(connection: Connection, inbox: Path) -> Callable[[bytes], int]:
    """Unpack into the inbox; 0 or the errno of the failure."""

    def run(data: bytes) -> int:
        output = connection.applet("tar-in", str(inbox), stdin=data)
        return 0 if output.code == 0 else failure(output)

    return run


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in root.rglob("*"):
        info = path.lstat()
        name = str(path.relative_to(root))
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[name] = (stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode), int(info.st_mtime), content)
        if path.is_symlink():
            found[name] = (stat.S_IFMT(info.st_mode), content)
    return found


def make_tree(root: Path) -> None:
    long = root / ("d" * 120) / ("e" * 120)
    long.mkdir(parents=True)
    (long / ("f" * 200)).write_text("deep")
    (root / "empty").mkdir()
    (root / "read-only").mkdir()
    (root / "read-only/file").write_bytes(os.urandom(70_001))
    (root / "zero").touch()
    (root / "exec").write_text("#!/bin/sh\n")
    (root / "exec").chmod(0o755)
    (root / "uml\u00e4ut \n").write_text("x")
    os.symlink("t" * 150, root / "long-link")
    os.symlink("../zero", root / "empty/up")
    for path in root.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (1_000_000_000, 1_000_000_000))
    (root / "read-only").chmod(0o555)


def test_tar_out_is_a_tar(connection: Connection, guest: Guest) -> None:
    """Python and GNU tar read the same tree from it as lies on disk: long names, links, modes, times."""
    tree = guest.work / "tree"
    make_tree(tree)
    os.mkfifo(tree / "fifo")
    data = connection.applet("tar-out", str(tree)).out
    (tree / "fifo").unlink()
    unpacked = guest.work / "python"
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(unpacked, filter="tar")
    gnu = guest.work / "gnu"
    gnu.mkdir()
    subprocess.run(["tar", "-x", "-C", gnu], input=data, check=True)
    os.utime(tree, (0, 0))
    assert snapshot(unpacked) == snapshot(gnu) == snapshot(tree)


def test_tar_out_of_one_file(connection: Connection, guest: Guest) -> None:
    """One file is an archive of one member, named by the last part of the path; a link to it is followed."""
    (guest.work / "file").write_text("hello")
    (guest.work / "link").symlink_to("file")
    for name in ("file", "link"):
        with tarfile.open(fileobj=io.BytesIO(connection.applet("tar-out", name, cwd=str(guest.work)).out)) as tar:
            assert [(m.name, m.size) for m in tar] == [(name, 5)]
    assert connection.applet("tar-out", "/dev/null").code == 1
    assert connection.applet("tar-out", str(guest.work / "none")).code == 1


def test_round_trip(connection: Connection, guest: Guest) -> None:
    """What one operation packs the other unpacks."""
    tree, copy = guest.work / "tree", guest.work / "a/copy"
    make_tree(tree)
    data = connection.applet("tar-out", str(tree)).out
    handle, _, _ = connection.start("in", ["tar-in", str(copy)], kind=1, flags=FOLLOWED | STDIN_OPEN)
    for at in range(0, len(data), 100_000):
        connection.stdin(handle, at, data[at : at + 100_000], eof=at + 100_000 >= len(data))
    output = connection.wait_exit(handle)
    assert (output.code, output.err) == (0, b"")
    assert snapshot(copy) == snapshot(tree)
    assert all(path.lstat().st_uid == USER for path in copy.rglob("*"))


@pytest.mark.parametrize("form", ["pax", "gnu", "ustar", "v7"])
def test_formats_of_gnu_tar(connection: Connection, guest: Guest, inbox: Path, form: str) -> None:
    """Archives of the common writers unpack, hard links included."""
    tree = guest.work / "tree"
    (tree / ("d" * 60)).mkdir(parents=True)
    name = "n" * (20 if form == "v7" else 90)
    (tree / ("d" * 60) / name).write_text("x")
    (tree / "file").write_text("y")
    os.link(tree / "file", tree / "hard")
    (tree / "link").symlink_to("hard")
    data = subprocess.run(["tar", f"--format={form}", "-c", "-C", tree, "."], capture_output=True, check=True).stdout
    output = connection.applet("tar-in", str(inbox), stdin=data)
    assert (output.code, output.err) == (0, b"")
    assert sorted(path.name for path in inbox.rglob("*")) == sorted(["d" * 60, name, "file", "hard", "link"])
    assert (inbox / "hard").stat().st_nlink == 2 and (inbox / "link").read_text() == "y"


def test_python_formats(unpack: Callable[[bytes], int], inbox: Path) -> None:
    """GNU long names and base 256 numbers, and pax ones."""
    name = "/".join(["dir" * 20] * 5) + "/file"
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        assert unpack(archive(("f", name, b"x"), ("l", "link", "a" * 200), format=form, mtime=1 << 33)) == 0
        assert (inbox / name).read_bytes() == b"x" and os.readlink(inbox / "link") == "a" * 200
        assert int((inbox / name).stat().st_mtime) == 1 << 33


def test_existing_entries_are_replaced(unpack: Callable[[bytes], int], inbox: Path, guest: Guest) -> None:
    """A file or link in the way of a file is replaced, never written through; a directory stays."""
    victim = guest.work / "victim"
    victim.write_text("untouched")
    victim.chmod(0o666)
    inbox.mkdir()
    inbox.chmod(0o777)
    (inbox / "file").symlink_to(victim)
    os.link(victim, inbox / "hard")
    (inbox / "dir").mkdir()
    for path in ("file", "hard", "dir"):
        os.chown(inbox / path, USER, USER, follow_symlinks=False)
    assert unpack(archive(("f", "file", b"1"), ("f", "hard", b"2"), ("d", "dir", ""), ("f", "dir/in", b"3"))) == 0
    assert victim.read_text() == "untouched"
    assert [(inbox / name).read_bytes() for name in ("file", "hard", "dir/in")] == [b"1", b"2", b"3"]
    assert unpack(archive(("f", "dir", b"x"))) == 21


def test_set_id_bits_are_dropped(unpack: Callable[[bytes], int], inbox: Path) -> None:
    """No file becomes set-user-ID by an archive."""
    assert unpack(archive(("f", "file", b"x"), ("d", "dir", ""), mode=0o7777)) == 0
    assert stat.S_IMODE((inbox / "file").stat().st_mode) == 0o777
    assert stat.S_IMODE((inbox / "dir").stat().st_mode) == 0o1777


OUTSIDE = [
    [("f", "../escaped", b"x")],
    [("f", "a/../../escaped", b"x")],
    [("f", "a/..", b"x")],
    [("d", "..", "")],
    [("f", "{work}/escaped", b"x")],
    [("d", "/escaped", "")],
    [("l", "link", "/etc")],
    [("l", "link", "..")],
    [("l", "a/link", "../../x")],
    [("l", "link", "a/../../x")],
    [("d", "a", ""), ("l", "a/top", ".."), ("l", "a/top/link", "../..")],
    [("h", "hard", "/etc/passwd")],
    [("h", "hard", "../victim")],
]


@pytest.mark.parametrize("members", OUTSIDE, ids=lambda members: f"{members[-1][0]} {members[-1][1]} {members[-1][2]}")
def test_nothing_leaves_the_directory(
    unpack: Callable[[bytes], int], guest: Guest, inbox: Path, members: list[tuple[str, str, bytes | str]]
) -> None:
    """Names and links that lead out are refused, in every way of writing them."""
    (guest.work / "victim").write_text("untouched")
    filled = [(kind, name.format(work=guest.work), value) for kind, name, value in members]
    assert unpack(archive(*filled)) in {EPERM, 40, 18}
    assert not (guest.work / "escaped").exists() and not Path("/escaped").exists()
    for path in inbox.rglob("*"):
        assert path.resolve().is_relative_to(inbox)
        assert path.is_dir() or path.lstat().st_nlink == 1


def test_planted_links_are_not_followed_out(unpack: Callable[[bytes], int], guest: Guest, inbox: Path) -> None:
    """A link that lay there already and leads out is no way out, for files, directories and hard links."""
    outside = guest.work / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    (outside / "victim").write_text("untouched")
    inbox.mkdir()
    inbox.chmod(0o777)
    (inbox / "out").symlink_to("../outside")
    (inbox / "absolute").symlink_to(outside)
    (inbox / "inside").symlink_to("real")
    for member in (
        ("f", "out/x", b"x"),
        ("f", "absolute/x", b"x"),
        ("d", "out/x", ""),
        ("d", "out", ""),
        ("l", "out/x", "y"),
        ("h", "hard", "out/victim"),
        ("f", "out/deep/x", b"x"),
    ):
        assert unpack(archive(member)) == 18, member
    assert os.listdir(outside) == ["victim"]
    assert unpack(archive(("d", "real", ""), ("f", "inside/x", b"x"))) == 0
    assert (inbox / "real/x").read_bytes() == b"x"


@pytest.mark.parametrize("kind", ["3", "4", "6", "S", "V", "D", "M", "9"])
def test_other_types_are_refused(unpack: Callable[[bytes], int], inbox: Path, kind: str) -> None:
    """Devices, pipes, sparse files and what else there is are refused."""
    assert unpack(archive((kind, "member", ""))) == EPERM
    assert os.listdir(inbox) == []


def test_truncated_archives(unpack: Callable[[bytes], int], inbox: Path) -> None:
    """An archive cut anywhere is an error, and the file that was cut does not stay."""
    whole = archive(("f", "one", b"1" * 1000), ("f", "two", b"2" * 5000))
    ends = whole.index(b"2" * 5000) + 5120
    for cut in (0, 1, 511, 512, 700, 1500, 2048, ends - 1, ends, ends + 511):
        assert unpack(whole[:cut]) == EBADMSG, cut
        assert not (inbox / "two").exists() or cut >= ends - 120
    assert unpack(whole[: ends + 512]) == 0


def header(**fields: bytes) -> bytes:
    block = bytearray(archive(("f", "file", b""))[:512])
    places = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "mtime": (136, 12), "type": (156, 1)}
    for field, value in fields.items():
        at, size = places[field]
        block[at : at + size] = value.ljust(size, b"\0")[:size]
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    ("data", "errno"),
    [
        (header(size=b"77777777777"), EBADMSG),
        (header(size=b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7), EBADMSG),
        (header(size=b"\x80" + b"\0" * 3 + b"\xff" * 8), EBADMSG),
        (header(size=b"\xff" * 12), EBADMSG),
        (header(size=b"12x"), EBADMSG),
        (header(mode=b"9999999"), EBADMSG),
        (header(name=b""), EBADMSG),
        (header(name=b"./."), EBADMSG),
        (header(type=b"2", size=b"10"), EBADMSG),
        (header(type=b"5", size=b"10"), EBADMSG),
        (header(type=b"x", size=b"77777777777"), 90),
        (header(type=b"x", size=b"2000000"), 90),
        (header(type=b"L", size=b"77777777"), 90),
        (header(type=b"x", size=b"10") + b"99 path=a".ljust(512, b"\0"), EBADMSG),
        (header(type=b"x", size=b"13") + b"11 path=a/b\n".ljust(512, b"\0"), EBADMSG),
        (header(type=b"x", size=b"14") + b"12 path=a\0b\n".ljust(512, b"\0"), EBADMSG),
        (header(type=b"x", size=b"4") + b"4 a\n".ljust(512, b"\0"), EBADMSG),
        (header(type=b"x", size=b"14") + b"12 size=-50\n".ljust(512, b"\0"), EBADMSG),
        (header(type=b"x", size=b"4") + b"0 =\n".ljust(512, b"\0"), EBADMSG),
        (b"garbage" * 100, EBADMSG),
        (os.urandom(4096), EBADMSG),
        (b"", EBADMSG),
    ],
)
def test_malformed_headers(unpack: Callable[[bytes], int], inbox: Path, data: bytes, errno: int) -> None:
    """Sizes, modes, names and pax records that make no sense end the operation with nothing made."""
    assert unpack(data + bytes(1024) if data else data) == errno
    assert os.listdir(inbox) == []


def test_names_too_long(unpack: Callable[[bytes], int]) -> None:
    """Names beyond what a path or a component can be are errors, not overflows."""
    assert unpack(archive(("f", "a/" * 3000 + "b", b"x"))) == 36
    assert unpack(archive(("f", "n" * 300, b"x"))) == 36
    assert unpack(archive(("f", "n" * 300 + "/x", b"x"))) == 36
    assert unpack(archive(("l", "link", "t" * 5000))) == 36


def test_many_directories(unpack: Callable[[bytes], int], inbox: Path) -> None:
    """Modes of many directories are set at the end; a read-only one still takes its files."""
    members: list[tuple[str, str, bytes | str]] = [("d", "ro", ""), ("f", "ro/x", b"")]
    members += [("d", f"d{i}", "") for i in range(3000)]
    assert unpack(archive(*members, mode=0o555)) == 0
    assert stat.S_IMODE((inbox / "ro").stat().st_mode) == 0o555 and len(os.listdir(inbox)) == 3001


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_archives(unpack: Callable[[bytes], int], guest: Guest, inbox: Path, data: st.DataObject) -> None:
    """Whatever bytes of an archive are changed, nothing crashes and nothing appears outside the directory."""
    raw = bytearray(
        archive(("d", "a", ""), ("f", "a/" + "n" * 120, b"x" * 700), ("l", "a/l", "../b"), ("h", "h", "a/" + "n" * 120))
    )
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):  # keep the checksums right, so that the change is looked at
        for at in range(0, len(raw) - 511, 512):
            block = raw[at : at + 512]
            if block[257:262] == b"ustar":
                block[148:156] = b" " * 8
                raw[at + 148 : at + 156] = b"%06o\0 " % sum(block)
    errno = unpack(bytes(raw))
    assert 0 <= errno < 134
    assert os.listdir(guest.work) == ["inbox"]
    subprocess.run(["rm", "-rf", inbox], check=True)
