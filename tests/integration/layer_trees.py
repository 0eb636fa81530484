"""Random layers, as trees and as EROFS files, and what the kernel shows of them: for tests of those who read layers."""

import hashlib
import os
import pickle
import random
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = [b"a", b"b", b"c", b"\xff\n d", b"e" * 120]
Seen = dict[bytes, tuple[object, ...]]
Shown = tuple[Seen, list[list[bytes]]]


def shown_by_kernel(stacks: Sequence[Sequence[Path]], work: Path) -> list[Shown]:
    """What overlays of EROFS files, topmost first, show: each path with what can be asked of it, and hard links.

    The mounts are in a namespace that ends with the program that looks.
    """
    work.mkdir()
    argv = ["unshare", "--mount", "--propagation", "private", sys.executable, __file__, str(work)]
    asked = pickle.dumps([[str(path) for path in stack] for stack in stacks])
    done = subprocess.run(argv, input=asked, capture_output=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    answers: list[Shown] = pickle.loads(done.stdout)
    return answers


def shown_of_tree(root: Path) -> Shown:
    """The same of a directory."""
    found: Seen = {}
    links: dict[tuple[int, int], list[bytes]] = {}
    base = os.fsencode(root)
    for top, dirs, files in os.walk(base):
        for path in [top] * (top == base) + [os.path.join(top, name) for name in dirs + files]:
            try:
                status, name = os.lstat(path), os.path.relpath(path, base)
            except FileNotFoundError:  # a whiteout in a directory of one layer only: listed, but gone
                continue
            kind = stat.S_IFMT(status.st_mode)
            keys = os.listxattr(path, follow_symlinks=False)
            found[b"" if name == b"." else name] = (
                *(status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns),
                os.readlink(path) if kind == stat.S_IFLNK else None,
                None if kind == stat.S_IFDIR else status.st_size,
                hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).hexdigest() if kind == stat.S_IFREG else None,
                {os.fsencode(key): os.getxattr(path, key, follow_symlinks=False) for key in keys},
            )
            if status.st_nlink > 1 and kind != stat.S_IFDIR:
                links.setdefault((status.st_dev, status.st_ino), []).append(name)
    return found, sorted(sorted(names) for names in links.values())


def main(work: Path) -> None:
    """Mount and look at the stacks that stdin names."""
    os.chdir(work)
    for name in ("none", "union"):
        Path(name).mkdir()
    mounts: dict[str, str] = {}
    answers = []
    for stack in pickle.load(sys.stdin.buffer):
        for path in stack:
            if path not in mounts:
                mounts[path] = str(len(mounts))
                Path(mounts[path]).mkdir()
                subprocess.run(["mount", "-t", "erofs", "-o", "ro", path, mounts[path]], check=True)
        lower = ":".join([*(mounts[path] for path in stack), "none"])  # an overlay has at least two
        options = f"lowerdir={lower},redirect_dir=follow,metacopy=off"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", "union"], check=True)
        answers.append(shown_of_tree(work / "union"))
        subprocess.run(["umount", "union"], check=True)
    pickle.dump(answers, sys.stdout.buffer)


def make_tree(root: Path, source: random.Random) -> None:
    """A layer as its upper directory: files, directories, links, whiteouts, opaque and renamed directories."""
    root.mkdir()
    names: list[bytes] = []
    _fill(os.fsencode(root), source, 0, names)
    os.chmod(root, source.choice([0o755, 0o1777]))
    os.utime(root, ns=(0, source.randrange(10**18)))


def _fill(top: bytes, source: random.Random, depth: int, files: list[bytes]) -> None:
    for name in source.sample(NAMES, source.randint(1, 4)):
        path = os.path.join(top, name)
        kind = source.choices(
            ["dir", "file", "link", "whiteout", "pipe", "hard", "sparse"], [8 if depth < 3 else 0, 4, 1, 2, 1, 2, 1]
        )[0]
        if kind == "dir":
            os.mkdir(path, 0o700)
            _fill(path, source, depth + 1, files)
            mark = source.random()
            if mark < 0.15:
                os.setxattr(path, b"trusted.overlay.opaque", b"y")
            elif mark < 0.45:
                absolute = b"/" + b"/".join(source.choices(NAMES[:3], k=source.randint(1, 3)))
                os.setxattr(path, b"trusted.overlay.redirect", source.choice([absolute, source.choice(NAMES)]))
        elif kind == "hard" and files:
            os.link(source.choice(files), path, follow_symlinks=False)
            continue
        elif kind == "whiteout":
            os.mknod(path, stat.S_IFCHR, 0)
            continue
        elif kind == "link":
            os.symlink(source.choice([b"a", b"../b/" * 40, b"/" + name]), path)
            os.utime(path, ns=(0, source.randrange(-(10**17), 10**18)), follow_symlinks=False)
            continue
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            with open(path, "wb") as file:
                file.write(source.randbytes(source.choice([0, 1, 100, 4000, 4096, 9000])))
                if kind == "sparse":
                    file.seek(source.randrange(200_000), os.SEEK_CUR)
                    file.write(b"island")
            files.append(path)
        if kind in ("dir", "file") and source.random() < 0.3:
            os.setxattr(path, b"user.note", source.randbytes(source.choice([0, 7, 300])))
        os.chown(path, source.randrange(1 << 16), source.choice([0, 1000]))
        os.chmod(path, source.choice([0o755, 0o640, 0o4711, 0o2700, 0o1777]))
        os.utime(path, ns=(0, source.choice([0, 10**18, source.randrange(-(10**17), 4 * 10**18)])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
