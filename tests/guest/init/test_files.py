"""File operations as the asking user."""

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.guest.init.driver import FOLLOWED, STDIN_OPEN, Connection, Entry, changes, entries, failure
from tests.guest.init.guest import Guest

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(60)]

ENOENT, EACCES, EEXIST, ENOTDIR, EISDIR, EINVAL, ENAMETOOLONG, ENOSYS, ENOTEMPTY = 2, 13, 17, 20, 21, 22, 36, 38, 39
USER = 65534


@pytest.fixture
def work(guest: Guest) -> Path:
    return guest.work


@pytest.fixture
def locked(work: Path) -> Path:
    """A directory of root's that nobody else can look into, with a file."""
    directory = work / "locked"
    directory.mkdir(mode=0o700)
    (directory / "file").write_text("secret")
    return directory


def test_stat(connection: Connection, work: Path) -> None:
    """Kind, mode, owner, size, time in nanoseconds, and the target of a link that is not followed."""
    file = work / "file"
    file.write_text("hello")
    file.chmod(0o4751)
    os.utime(file, ns=(1, 1_234_567_890_123_456_789))
    (work / "link").symlink_to("file")
    os.mkfifo(work / "fifo")
    assert entries(connection.applet("stat", str(file)).out) == [
        Entry("f", 0o4751, 0, 0, 5, 1_234_567_890_123_456_789, str(file), "")
    ]
    link = entries(connection.applet("stat", "link", cwd=str(work)).out)[0]
    assert (link.kind, link.name, link.target) == ("l", "link", "file")
    kinds = [
        entries(connection.applet("stat", path).out)[0].kind for path in (str(work), "/dev/null", str(work / "fifo"))
    ]
    assert kinds == ["d", "c", "p"]
    assert failure(connection.applet("stat", str(work / "none"))) == ENOENT


def test_list(connection: Connection, work: Path) -> None:
    """Every entry but . and .., hidden ones too; a large directory is complete."""
    many = work / "many"
    many.mkdir()
    for i in range(3000):
        (many / f"name-{i}").touch()
    (many / ".hidden").symlink_to("/nowhere")
    found = {entry.name: entry for entry in entries(connection.applet("list", str(many)).out)}
    assert set(found) == {".hidden", *(f"name-{i}" for i in range(3000))}
    assert (found[".hidden"].kind, found[".hidden"].target) == ("l", "/nowhere")
    assert failure(connection.applet("list", "/etc/passwd")) == ENOTDIR


def test_read(connection: Connection, work: Path) -> None:
    """Ranges, the whole, beyond the end, and through a link."""
    data = os.urandom(200_000)
    (work / "file").write_bytes(data)
    (work / "link").symlink_to("file")

    def read(offset: int, length: int, name: str = "file") -> bytes:
        return connection.applet("read", str(work / name), str(offset), str(length)).out

    assert read(0, -1) == data and read(0, -1, "link") == data
    assert read(1000, 70_000) == data[1000:71_000]
    assert read(199_999, 5) == data[-1:] and read(500_000, -1) == b"" and read(5, 0) == b""


def test_read_takes_regular_files_only(connection: Connection, work: Path) -> None:
    """A directory, a device and a pipe are refused at once."""
    os.mkfifo(work / "fifo")
    assert failure(connection.applet("read", str(work), "0", "-1")) == EISDIR
    for path in ("/dev/zero", str(work / "fifo")):
        assert failure(connection.applet("read", path, "0", "10")) == EINVAL


def test_write(connection: Connection, work: Path) -> None:
    """The file appears whole, with its mode and owner; nothing else is left beside it."""
    data = os.urandom(1_000_000)
    output = connection.applet("write", str(work / "file"), "640", "0", stdin=data)
    assert (output.code, output.err) == (0, b"")
    info = (work / "file").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, (work / "file").read_bytes()) == (0o640, USER, data)
    assert connection.applet("write", "file", "4755", "0", cwd=str(work)).code == 0
    assert (work / "file").read_bytes() == b"" and stat.S_IMODE((work / "file").stat().st_mode) == 0o4755
    assert os.listdir(work) == ["file"]


def test_write_is_atomic(connection: Connection, work: Path) -> None:
    """Until stdin ends the old content stands; a link is replaced, not followed; a hard link keeps the old content."""
    (work / "old").write_text("old")
    (work / "target").write_text("target")
    (work / "link").symlink_to("target")
    os.link(work / "old", work / "other")
    handle, _, _ = connection.start("w", ["write", str(work / "old"), "644", "0"], kind=1, flags=FOLLOWED | STDIN_OPEN)
    connection.stdin(handle, 0, b"new")
    time.sleep(0.1)
    assert (work / "old").read_text() == "old"
    connection.stdin(handle, 3, b"", eof=True)
    assert connection.wait_exit(handle).code == 0
    assert ((work / "old").read_text(), (work / "other").read_text()) == ("new", "old")
    assert connection.applet("write", str(work / "link"), "644", "0", stdin=b"x").code == 0
    assert (work / "target").read_text() == "target" and not (work / "link").is_symlink()


def test_write_failures_leave_nothing(connection: Connection, work: Path) -> None:
    """A directory in the way, a missing or closed parent, a name too long: an errno, and no temporary file."""
    (work / "dir").mkdir()
    closed = work / "closed"
    closed.mkdir(mode=0o755)
    cases = {
        str(work / "dir"): EISDIR,
        str(work / "none/file"): ENOENT,
        str(closed / "file"): EACCES,
        str(work / ("n" * 256)): ENAMETOOLONG,
        "/etc/passwd": EACCES,
        "": ENOENT,
    }
    for path, errno in cases.items():
        assert failure(connection.applet("write", path, "644", "0", stdin=b"x")) == errno, path
    assert sorted(os.listdir(work)) == ["closed", "dir"] and os.listdir(work / "dir") == os.listdir(closed) == []


def test_write_makes_parents(connection: Connection, work: Path) -> None:
    """With parents every missing directory is made; the longest name there is works."""
    path = work / "a/b/c" / ("n" * 255)
    assert connection.applet("write", str(path), "600", "1", stdin=b"x").code == 0
    assert path.read_text() == "x" and stat.S_IMODE((work / "a/b").stat().st_mode) == 0o755


def test_mkdir(connection: Connection, work: Path) -> None:
    """The mode is exact whatever the umask; an existing directory is an error unless parents are asked for."""
    assert connection.applet("mkdir", str(work / "d"), "1777", "0").code == 0
    assert stat.S_IMODE((work / "d").stat().st_mode) == 0o1777
    assert failure(connection.applet("mkdir", str(work / "d"), "755", "0")) == EEXIST
    assert connection.applet("mkdir", str(work / "d"), "700", "1").code == 0
    assert stat.S_IMODE((work / "d").stat().st_mode) == 0o1777
    assert failure(connection.applet("mkdir", str(work / "x/y"), "755", "0")) == ENOENT
    assert connection.applet("mkdir", str(work / "x/y/"), "750", "1").code == 0
    assert stat.S_IMODE((work / "x/y").stat().st_mode) == 0o750
    assert connection.applet("mkdir", "/", "755", "1").code == 0
    assert failure(connection.applet("mkdir", "/", "755", "0")) == EEXIST


def test_move(connection: Connection, work: Path) -> None:
    """A rename, over an existing file too."""
    (work / "a").write_text("a")
    (work / "b").write_text("b")
    os.chown(work / "a", USER, USER)
    assert connection.applet("move", str(work / "a"), str(work / "b")).code == 0
    assert os.listdir(work) == ["b"] and (work / "b").read_text() == "a"
    assert failure(connection.applet("move", str(work / "none"), str(work / "c"))) == ENOENT


def test_move_between_file_systems(connection: Connection, work: Path) -> None:
    """Where rename can't, the tree is copied with modes, times and links, and removed at its old place."""
    source = Path(f"/dev/shm/{work.parent.name}")
    (source / "sub").mkdir(parents=True)
    (source / "sub/file").write_bytes(b"x" * 100_000)
    (source / "sub/file").chmod(0o751)
    os.utime(source / "sub/file", ns=(5, 1_000_000_007))
    (source / "link").symlink_to("../x")
    os.mkfifo(source / "fifo")
    (source / "sub").chmod(0o711)
    for path in (source, *source.rglob("*")):
        os.chown(path, USER, USER, follow_symlinks=False)
    try:
        output = connection.applet("move", str(source), str(work / "moved"))
        assert (output.code, output.err) == (0, b"")
        assert not source.exists()
    finally:
        subprocess.run(["rm", "-rf", source], check=True)
    info = (work / "moved/sub/file").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns, info.st_size) == (0o751, 1_000_000_007, 100_000)
    assert os.readlink(work / "moved/link") == "../x" and (work / "moved/fifo").is_fifo()
    assert stat.S_IMODE((work / "moved/sub").stat().st_mode) == 0o711
    assert os.listdir(work) == ["moved"]


def test_remove(connection: Connection, work: Path) -> None:
    """Files, links and empty directories; trees only when asked, without following links out of them."""
    (work / "keep").mkdir()
    (work / "keep/file").touch()
    tree = work / "tree"
    for i in range(50):
        (tree / f"d{i}/e").mkdir(parents=True)
        (tree / f"d{i}/file").touch()
    (tree / "link").symlink_to(work / "keep")
    subprocess.run(["chown", "-hR", f"{USER}:{USER}", tree], check=True)
    assert failure(connection.applet("remove", str(tree), "0")) == ENOTEMPTY
    assert connection.applet("remove", str(tree), "1").code == 0
    assert os.listdir(work) == ["keep"] and os.listdir(work / "keep") == ["file"]
    (work / "empty").mkdir()
    assert connection.applet("remove", str(work / "empty"), "0").code == 0
    assert failure(connection.applet("remove", str(work / "none"), "1")) == ENOENT


def test_deep_trees(connection: Connection, work: Path) -> None:
    """900 levels are removed; a deeper tree, which a guest can build to trouble us, ends with an error."""
    build = "import os, sys\nfor i in range(int(sys.argv[1])): os.mkdir('d'); os.chdir('d')"
    for depth, code in ((900, 0), (1500, 1)):
        (work / "deep").mkdir()
        (work / "deep").chmod(0o777)
        assert connection.run(["/usr/bin/python3", "-SIc", build, str(depth)], cwd=str(work / "deep")).code == 0
        os.chown(work / "deep", USER, USER)
        output = connection.applet("remove", str(work / "deep"), "1")
        assert output.code == code
    assert output.err.startswith(b"40 ")
    subprocess.run(["rm", "-rf", work / "deep"], check=True)


@pytest.mark.parametrize(
    "argv",
    [
        ("stat", "{locked}/file"),
        ("list", "{locked}"),
        ("read", "{locked}/file", "0", "-1"),
        ("write", "{locked}/file", "644", "0"),
        ("mkdir", "{locked}/d", "755", "0"),
        ("move", "{locked}/file", "{work}/stolen"),
        ("remove", "{locked}/file", "0"),
        ("tar-out", "{locked}"),
        ("tar-in", "{locked}/d"),
        ("watch", "{locked}", "1"),
    ],
    ids=lambda argv: argv[0],
)
def test_permission_is_the_users(connection: Connection, work: Path, locked: Path, argv: tuple[str, ...]) -> None:
    """Each operation fails with EACCES where the user may not, and changes nothing."""
    output = connection.applet(*(part.format(locked=locked, work=work) for part in argv))
    assert failure(output) == EACCES
    assert os.listdir(locked) == ["file"] and os.listdir(work) == ["locked"]


def test_guest_root_is_no_host_root(connection: Connection, work: Path) -> None:
    """An operation as guest root has no capability: a directory of another user's stays closed to it."""
    other = work / "other"
    other.mkdir(mode=0o700)
    os.chown(other, 1234, 1234)
    assert failure(connection.applet("list", str(other), user="")) == EACCES


def test_bad_operations(connection: Connection) -> None:
    """Unknown names, wrong counts and wrong numbers are errors, as is a missing working directory."""
    assert failure(connection.applet("format-disk")) == ENOSYS
    assert failure(connection.applet("stat")) == EINVAL
    for numbers in (("x", "1"), ("-1", "1"), ("0", "99999999999999999999"), ("", "")):
        assert failure(connection.applet("read", "/etc/passwd", *numbers)) == EINVAL
    assert failure(connection.applet("write", "/tmp/x", "9", "0")) == EINVAL
    assert failure(connection.applet("stat", ".", cwd="/no/such/place")) == ENOENT
    assert connection.applet("stat", "/", user="no-such-user").code == 126


def start_watch(connection: Connection, path: Path, recursive: int = 1) -> int:
    handle, _, _ = connection.start(f"watch-{time.monotonic_ns()}", ["watch", str(path), str(recursive)], kind=1)
    while not connection.outputs.get(handle) or ("r", "") not in changes(connection.outputs[handle].out):
        connection.pump()
    return handle


def collect(connection: Connection, handle: int, last: tuple[str, str]) -> list[tuple[str, str]]:
    deadline = time.monotonic() + 10
    while last not in changes(connection.outputs[handle].out):
        assert time.monotonic() < deadline, changes(connection.outputs[handle].out)
        connection.pump()
    return changes(connection.outputs[handle].out)[1:]


def test_watch(connection: Connection, work: Path) -> None:
    """Creation, change, renaming and removal are told in order, below new directories too."""
    (work / "sub").mkdir()
    handle = start_watch(connection, work)
    (work / "sub/file").write_text("x")
    (work / "new").mkdir()
    time.sleep(0.1)
    (work / "new/deep").mkdir()
    time.sleep(0.1)
    (work / "new/deep/file").touch()
    os.rename(work / "sub/file", work / "moved")
    os.rename(work / "new", work / "renamed")
    time.sleep(0.1)
    (work / "renamed/deep/late").touch()
    (work / "moved").unlink()
    assert collect(connection, handle, ("d", "moved")) == [
        ("c", "sub/file"),
        ("m", "sub/file"),
        ("c", "new"),
        ("c", "new/deep"),
        ("c", "new/deep/file"),
        ("v", "sub/file"),
        ("v", "moved"),
        ("v", "new"),
        ("v", "renamed"),
        ("c", "renamed/deep/late"),
        ("d", "moved"),
    ]
    assert connection.signal(handle, 9, 2) == 1


def test_watch_misses_nothing_in_new_directories(connection: Connection, work: Path) -> None:
    """Files made right after their directory are told, at least once each."""
    handle = start_watch(connection, work)
    for i in range(50):
        (work / f"d{i}/e").mkdir(parents=True)
        (work / f"d{i}/e/file").touch()
    (work / "end").touch()
    seen = set(collect(connection, handle, ("c", "end")))
    assert {("c", f"d{i}/e/file") for i in range(50)} <= seen


def test_watch_without_recursion(connection: Connection, work: Path) -> None:
    """Only the directory itself is watched; that it was removed is told with an empty path."""
    directory = work / "dir"
    (directory / "sub").mkdir(parents=True)
    handle = start_watch(connection, directory, recursive=0)
    (directory / "sub/file").touch()
    (directory / "end").touch()
    assert collect(connection, handle, ("c", "end")) == [("c", "end")]
    subprocess.run(["rm", "-r", directory], check=True)
    assert ("d", "") in collect(connection, handle, ("d", ""))


def test_watch_overflow(connection: Connection, work: Path) -> None:
    """Events that the kernel had to drop are told."""
    handle = start_watch(connection, work)
    connection.signal(handle, 19, 1)
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    for i in range(limit):
        (work / f"n{i % 10}").touch()
        (work / f"n{i % 10}").unlink()
    connection.signal(handle, 18, 1)
    collect(connection, handle, ("o", ""))
