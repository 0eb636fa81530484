"""The packer: the kernel mounts what it makes, and finds the same tree; what can't be packed is told by exit codes."""

import hashlib
import os
import random
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.pack.conftest import Mount, Pack, mounted

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(120)]

TREE, ROOM, USAGE = 3, 4, 2
BLOCK = 4096
INODE = 64
SIZES = (0, 1, BLOCK - INODE, BLOCK - INODE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 1 << 20)


def seen(root: Path) -> dict[bytes, object]:
    """Everything that a program could see of each entry. Sizes of directories are the file system's own affair."""
    found: dict[bytes, object] = {}
    links: dict[int, list[bytes]] = {}
    for top, dirs, files in os.walk(os.fsencode(root)):
        for path in (top, *(os.path.join(top, name) for name in dirs + files)):
            status = os.lstat(path)
            is_file, is_dir = stat.S_ISREG(status.st_mode), stat.S_ISDIR(status.st_mode)
            name = os.path.relpath(path, os.fsencode(root))
            if not is_dir and status.st_nlink > 1:
                links.setdefault(status.st_ino, []).append(name)
            found[name] = (
                *(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_rdev),
                None if is_dir else (status.st_size, status.st_nlink),
                {key: os.getxattr(path, key) for key in sorted(os.listxattr(path))} if is_file or is_dir else {},
                hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).hexdigest() if is_file else None,
                os.readlink(path) if stat.S_ISLNK(status.st_mode) else None,
            )
    found[b"*links"] = sorted(sorted(set(group)) for group in links.values())
    return found


def fill(root: Path) -> None:
    """A tree with one of everything that a guest can make, with sizes and names at the edges of blocks."""
    source = random.Random(7)
    for size in SIZES:
        (root / f"file-{size}").write_bytes(source.randbytes(size))
        os.setxattr(root / f"file-{size}", "user.size", str(size).encode() * 40)
    for length in (1, BLOCK - INODE - 1, BLOCK - INODE, BLOCK - INODE + 1, BLOCK - 1):
        os.symlink("t" * length, root / f"link-{length}")
    wide = root / "wide"
    wide.mkdir(mode=0o1777)
    for number in range(700):
        (wide / f"{number:x}-{'n' * (number % 240)}").touch()
    os.mkfifo(root / "pipe", 0o620)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
    for name in (b"\xff\xfe not text", b"n" * 255, b" ", b"\n"):
        Path(os.fsdecode(os.path.join(os.fsencode(root), name))).write_bytes(name)
    (root / "set-id").touch()
    os.chown(root / "set-id", 1000, 65_535)
    os.chmod(root / "set-id", 0o6711)
    (root / "many").write_text("names")
    for number in range(3):
        os.link(root / "many", wide / f"hard-{number}")
    os.link(root / "link-1", root / "link-again", follow_symlinks=False)
    (root / "empty").mkdir(mode=0o700)
    os.utime(root / "empty", ns=(0, -1_234_567_890_123_456_789))
    os.utime(root / "link-1", ns=(0, 4_000_000_000_987_654_321), follow_symlinks=False)


def test_the_mounted_image_shows_the_same_tree(tmp_path: Path, pack: Pack, mount: Mount) -> None:
    """Content, kinds, owners, modes, times with nanoseconds, attributes, links and names, whatever they are."""
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o751)
    fill(tree)
    done = pack(tree, tmp_path / "image")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    expected, found = seen(tree), seen(mount(tmp_path / "image"))
    assert found == expected
    assert len(found) > 700


def test_links_of_several_file_systems_are_told_apart(tmp_path: Path, pack: Pack, mount: Mount) -> None:
    """Their inode numbers are equal, as those of new file systems are."""
    (tmp_path / "tree").mkdir()
    with (
        mounted("tmpfs", "tmpfs", tmp_path / "tree" / "a", "size=64k") as one,
        mounted("tmpfs", "tmpfs", tmp_path / "tree" / "b", "size=64k") as other,
    ):
        for top in (one, other):
            (top / "x").write_text(top.name)
            (top / "y").hardlink_to(top / "x")
        assert (one / "x").stat().st_ino == (other / "x").stat().st_ino
        assert pack(tmp_path / "tree", tmp_path / "image").returncode == 0
    root = mount(tmp_path / "image")
    assert [(root / name).read_text() for name in ("a/x", "a/y", "b/x", "b/y")] == ["a", "a", "b", "b"]
    assert [(root / name / "x").stat().st_nlink for name in "ab"] == [2, 2]


def test_an_empty_tree_is_an_image(tmp_path: Path, pack: Pack, mount: Mount) -> None:
    """Of two blocks: the superblock's, and one of metadata."""
    (tmp_path / "tree").mkdir()
    assert pack(tmp_path / "tree", tmp_path / "image").returncode == 0
    assert (tmp_path / "image").stat().st_size == 2 * BLOCK
    assert seen(mount(tmp_path / "image")) == seen(tmp_path / "tree")


def test_the_same_tree_gives_the_same_image(tmp_path: Path, pack: Pack) -> None:
    """Byte for byte, whether what is zero in it is a hole or was written; another time is another image."""
    tree = tmp_path / "tree"
    tree.mkdir()
    fill(tree)
    (tree / "islands").write_bytes(bytes(1 << 20) + b"x" + bytes(1 << 20) + b"x" * (1 << 16) + bytes(9))
    for name, how in (("one", "always"), ("two", "never")):
        subprocess.run(["cp", "-a", f"--sparse={how}", tree, tmp_path / f"{name}-tree"], check=True)
        assert pack(tmp_path / f"{name}-tree", tmp_path / name).returncode == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    (tmp_path / "two-tree" / "many").touch()
    assert pack(tmp_path / "two-tree", tmp_path / "three").returncode == 0
    identities = [(tmp_path / name).read_bytes()[1072:1088] for name in ("one", "three")]
    assert identities[0] != identities[1]


def test_one_time_for_all_and_content_only(tmp_path: Path, pack: Pack, mount: Mount) -> None:
    """With a time for all a tree counts for its content alone: its times and attributes are not in the image."""
    tree = tmp_path / "tree"
    tree.mkdir()
    fill(tree)
    assert pack(tree, tmp_path / "image", options=("--mtime", "946684800")).returncode == 0
    root = mount(tmp_path / "image")
    assert {path.lstat().st_mtime_ns for path in (root, *root.rglob("*"))} == {946684800 * 10**9}
    assert {name for path in root.rglob("*") for name in os.listxattr(path, follow_symlinks=False)} == set()


def test_all_metadata_lies_in_one_piece_at_the_end(tmp_path: Path, pack: Pack) -> None:
    """Behind the data of files, none of which lies in it: whoever has that piece can look at everything but content."""
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    for number in range(300):
        (tree / "below" / f"{number:0200}").write_bytes(b"content" * (number + 1))
    assert pack(tree, tmp_path / "image").returncode == 0
    image = (tmp_path / "image").read_bytes()
    start = int.from_bytes(image[1064:1068], "little") * BLOCK
    assert image.rfind(b"content") < start < image.find(b"below")
    assert image.find(f"{0:0200}".encode()) > start
    assert int.from_bytes(image[1060:1064], "little") * BLOCK == len(image)


def test_each_bound_is_told_with_the_entry(tmp_path: Path, pack: Pack) -> None:
    """Entries, depth, attributes, and ids that no sandbox has."""
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file\n").touch()
    os.setxattr(tree / "a" / "file\n", "user.x", bytes(1000))
    for options, reason in (
        (("--entries-max", "2"), "a: more than 2 entries"),
        (("--depth-max", "2"), "a/b: directories more than 2 deep"),
        (("--xattr-bytes-max", "999"), "a/file\\x0a: more than 999 bytes of attributes in all"),
    ):
        done = pack(tree, tmp_path / "image", options=options)
        assert (done.returncode, done.stderr) == (TREE, f"{reason}\n")
        (tmp_path / "image").unlink()
    os.chown(tree / "a" / "b", 0, 65_536)
    done = pack(tree, tmp_path / "image")
    assert (done.returncode, done.stderr) == (TREE, "a/b: it belongs to 0:65536; ids in a layer are at most 65535\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["image", "tree"]


def test_what_an_overlay_says_to_the_layers_below_is_kept_and_nothing_else(
    tmp_path: Path, pack: Pack, mount: Mount
) -> None:
    """Whiteouts, `opaque` and `redirect` travel; other notes of the overlay and capabilities of files do not."""
    tree = tmp_path / "tree"
    (tree / "dir").mkdir(parents=True)
    (tree / "file").touch()
    os.mknod(tree / "gone", stat.S_IFCHR, 0)
    os.link(tree / "gone", tree / "gone-too")
    for name in ("opaque", "redirect", "origin", "impure", "metacopy"):
        os.setxattr(tree / "dir", f"trusted.overlay.{name}", name.encode())
    os.setxattr(tree / "dir", "user.overlay.opaque", b"y")
    os.setxattr(tree / "file", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    assert pack(tree, tmp_path / "image").returncode == 0
    root = mount(tmp_path / "image")
    assert {key: os.getxattr(root / "dir", key) for key in os.listxattr(root / "dir")} == {
        "trusted.overlay.opaque": b"opaque",
        "trusted.overlay.redirect": b"redirect",
        "user.overlay.opaque": b"y",
    }
    assert os.listxattr(root / "file") == []
    for name in ("gone", "gone-too"):
        status = os.lstat(root / name)
        assert (stat.S_ISCHR(status.st_mode), status.st_rdev, status.st_nlink) == (True, 0, 1)


def test_a_sparse_file_takes_the_room_of_its_data(tmp_path: Path, pack: Pack, mount: Mount) -> None:
    """A file of 1 TiB with three islands is packed in the room of its pieces, and reads the same there and between."""
    tree = tmp_path / "tree"
    tree.mkdir()
    islands = {0: b"first", (1 << 40) // 3: b"middle" * 3000, (1 << 40) - 4: b"last"}
    with open(tree / "sparse", "wb") as file:
        for offset, data in islands.items():
            file.seek(offset)
            file.write(data)
    (tree / "hole").touch()
    os.truncate(tree / "hole", 5 << 30)
    done = pack(tree, tmp_path / "image")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "image").stat().st_blocks * 512 < 1 << 20
    root = mount(tmp_path / "image")
    assert {entry.name: entry.stat().st_size for entry in root.iterdir()} == {"sparse": 1 << 40, "hole": 5 << 30}
    with open(root / "sparse", "rb") as file:
        for offset, data in islands.items():
            file.seek(offset)
            assert file.read(len(data)) == data
            file.seek(offset + (1 << 30))
            assert file.read(4) in (b"", bytes(4))
    with open(root / "hole", "rb") as file:
        file.seek((5 << 30) - 3)
        assert file.read() == bytes(3)


def test_the_largest_file_there_can_be_is_packed_or_refused(tmp_path: Path, pack: Pack, mount: Mount) -> None:
    """Of exabytes: its table has a size that can be when there is nothing in it; with anything in it, too much."""
    with mounted("tmpfs", "tmpfs", tmp_path / "tree", "size=1m") as tree:
        with open(tree / "file", "wb") as file:
            file.truncate(2**63 - 1 - BLOCK)
        assert pack(tree, tmp_path / "image").stderr == ""
        assert (mount(tmp_path / "image") / "file").stat().st_size == 2**63 - 1 - BLOCK
        with open(tree / "file", "r+b") as file:
            file.seek(2**62)
            file.write(b"x")
        done = pack(tree, tmp_path / "other")
        assert (done.returncode, done.stderr.split(" with")[0]) == (TREE, f"file: more than {1 << 30} bytes,")


def test_a_file_without_measure_is_the_trees_fault(tmp_path: Path, pack: Pack) -> None:
    """Data all over a huge file would fill any disk: it is refused, with the bound."""
    tree = tmp_path / "tree"
    tree.mkdir()
    with open(tree / "sparse", "wb") as file:
        for piece in range(64):
            file.seek(piece << 37)
            file.write(b"x")
    done = pack(tree, tmp_path / "image", 1 << 30)
    assert done.returncode == TREE
    assert f"more than {1 << 30} bytes" in done.stderr


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A directory for trees too deep for what else removes what tests leave."""
    tree = tmp_path / "deep"
    tree.mkdir()
    yield tree
    subprocess.run(["rm", "-r", tree], check=True)


def test_depth_is_bounded(tmp_path: Path, pack: Pack, deep: Path) -> None:
    """As deep as a path can name is fine; deeper is the tree's fault. The way there is longer than any path."""
    here = os.open(deep, os.O_RDONLY)
    for depth in range(2, 2050):
        if depth == 2049:
            assert pack(deep, tmp_path / "deepest").returncode == 0
        os.mkdir("deep", dir_fd=here)
        below = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    done = pack(deep, tmp_path / "image")
    assert (done.returncode, done.stderr) == (TREE, f"{('deep/' * 60)[:300]}...: directories more than 2048 deep\n")


def test_a_device_is_the_trees_fault(tmp_path: Path, pack: Pack) -> None:
    """No guest can make one; if one is there, no layer brings it anywhere."""
    (tmp_path / "tree").mkdir()
    os.mknod(tmp_path / "tree" / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    done = pack(tmp_path / "tree", tmp_path / "image")
    assert (done.returncode, done.stderr) == (TREE, "zero: a device 1:5\n")


def test_a_full_disk_is_told_from_other_failures(tmp_path: Path, pack: Pack, small_disk: Path) -> None:
    """By an exit code of its own."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "big").write_bytes(bytes(range(256)) * 4096)
    done = pack(tmp_path / "tree", small_disk / "image")
    assert (done.returncode, done.stderr) == (ROOM, "writing the image: No space left on device\n")


def test_what_is_there_is_not_overwritten(tmp_path: Path, pack: Pack) -> None:
    """An image gets a name of its own; and a bound that is none is a mistake of the caller."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "image").write_text("mine")
    assert pack(tmp_path / "tree", tmp_path / "image").returncode == 1
    assert (tmp_path / "image").read_text() == "mine"
    assert pack(tmp_path / "tree", tmp_path / "other", 0).returncode == USAGE
    assert pack(tmp_path / "missing", tmp_path / "other").returncode == 1
