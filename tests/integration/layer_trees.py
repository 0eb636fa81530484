"""Random layers, as trees and as EROFS files, and what the kernel shows of them: for tests of those who read layers."""

import os
import pickle
import random
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

NAMES = [b"a", b"b", b"c", b"\xff\n d", b"e" * 120]
LISTING = r"""
import hashlib, os, pickle, stat, subprocess, sys
work, stacks = sys.argv[1], pickle.load(sys.stdin.buffer)
def seen(root):
    found, links = {}, {}
    for top, dirs, files in os.walk(os.fsencode(root)):
        for path in [top] * (top == os.fsencode(root)) + [os.path.join(top, name) for name in dirs + files]:
            try:
                status, name = os.lstat(path), os.path.relpath(path, os.fsencode(root))
            except FileNotFoundError:  # a whiteout in a directory of one layer only: listed, but gone
                continue
            is_file, is_link = stat.S_ISREG(status.st_mode), stat.S_ISLNK(status.st_mode)
            named = {os.fsencode(key): os.getxattr(path, key, follow_symlinks=False)
                     for key in os.listxattr(path, follow_symlinks=False)}
            content = hashlib.sha256(open(path, "rb").read()).hexdigest() if is_file else None
            found[b"" if name == b"." else name] = (
                status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns,
                os.readlink(path) if is_link else None,
                None if stat.S_ISDIR(status.st_mode) else status.st_size, content, named)
            if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
                links.setdefault((status.st_dev, status.st_ino), []).append(name)
    return found, sorted(sorted(names) for names in links.values())
os.mkdir(f"{work}/none")
made, answers = {}, []
for stack in stacks:
    for path in stack:
        if path not in made:
            made[path] = f"{work}/{len(made)}"
            os.mkdir(made[path])
            subprocess.run(["mount", "-t", "erofs", "-o", "ro", path, made[path]], check=True)
    os.makedirs(f"{work}/union", exist_ok=True)
    os.chdir(work)
    lower = ":".join([os.path.basename(made[path]) for path in stack] + ["none"])
    options = f"lowerdir={lower},redirect_dir=follow,metacopy=off"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", f"{work}/union"], check=True)
    answers.append(seen(f"{work}/union"))
    subprocess.run(["umount", f"{work}/union"], check=True)
pickle.dump(answers, sys.stdout.buffer)
"""

Seen = dict[bytes, tuple[object, ...]]


def shown_by_kernel(stacks: Sequence[Sequence[Path]], work: Path) -> list[tuple[Seen, list[list[bytes]]]]:
    """What overlays of EROFS files, topmost first, show: each path with what can be asked of it, and hard links.

    The mounts are in a namespace that ends with the program that looks.
    """
    work.mkdir()
    argv = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", LISTING, str(work)]
    asked = pickle.dumps([[str(path) for path in stack] for stack in stacks])
    done = subprocess.run(argv, input=asked, capture_output=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    answers: list[tuple[Seen, list[list[bytes]]]] = pickle.loads(done.stdout)
    return answers


def make_tree(root: Path, source: random.Random, *, is_bottom: bool = False) -> None:
    """A layer as its upper directory: files, directories, links, whiteouts, opaque and renamed directories."""
    root.mkdir()
    names: list[bytes] = []
    _fill(os.fsencode(root), source, 0, names, is_bottom)
    os.chmod(root, source.choice([0o755, 0o1777]))
    os.utime(root, ns=(0, source.randrange(10**18)))


def _fill(top: bytes, source: random.Random, depth: int, files: list[bytes], is_bottom: bool) -> None:
    for name in source.sample(NAMES, source.randint(1, 4)):
        path = os.path.join(top, name)
        kind = source.choices(
            ["dir", "file", "link", "whiteout", "pipe", "hard", "sparse"], [8 if depth < 3 else 0, 4, 1, 2, 1, 2, 1]
        )[0]
        if kind == "dir":
            os.mkdir(path, 0o700)
            _fill(path, source, depth + 1, files, is_bottom)
            mark = source.random()
            if not is_bottom and mark < 0.15:
                os.setxattr(path, b"trusted.overlay.opaque", b"y")
            elif not is_bottom and mark < 0.45:
                absolute = b"/" + b"/".join(source.choices(NAMES[:3], k=source.randint(1, 3)))
                os.setxattr(path, b"trusted.overlay.redirect", source.choice([absolute, source.choice(NAMES)]))
        elif kind == "hard" and files:
            os.link(source.choice(files), path, follow_symlinks=False)
            continue
        elif kind == "whiteout" and not is_bottom:
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
