"""Layers read without mounting them: the same tree that the kernel shows, whatever the layers say to each other."""

import hashlib
import random
import stat
import subprocess
from pathlib import Path

import pytest

from barchan.backends.container.backend import BINARIES
from barchan.image.erofs import Erofs
from barchan.image.stack import Stack
from tests.integration.layer_trees import Seen, make_tree, shown_by_kernel

pytestmark = [pytest.mark.requires("root"), pytest.mark.timeout(120)]

SEED = 4
STACKS = 40
LAYERS_MAX = 5


def pack(tree: Path, target: Path) -> Path:
    subprocess.run([BINARIES / "barchan-pack", tree, target, str(1 << 30)], check=True)
    return target


def shown(stack: Stack) -> tuple[Seen, list[list[bytes]]]:
    """The same as `shown_by_kernel` tells."""
    found: Seen = {}
    links: dict[tuple[int, int], list[bytes]] = {}
    for path, node in stack.walk():
        inode = node.inode
        is_file, is_link = stat.S_ISREG(inode.mode), stat.S_ISLNK(inode.mode)
        content = hashlib.sha256(b"".join(stack.stream(node))).hexdigest() if is_file else None
        found[path] = (
            *(inode.mode, inode.uid, inode.gid, inode.mtime_ns, stack.readlink(node) if is_link else None),
            *(None if inode.is_dir else inode.size, content, stack.xattrs(node)),
        )
        if inode.links > 1:
            links.setdefault((node.level, inode.number), []).append(path)
    return found, sorted(sorted(names) for names in links.values())


def make_stacks(folder: Path) -> list[list[Path]]:
    source, stacks = random.Random(SEED), []
    for number in range(STACKS):
        layers = []
        for level in range(source.randint(1, LAYERS_MAX)):
            make_tree(folder / f"{number}-{level}", source)
            layers.append(pack(folder / f"{number}-{level}", folder / f"{number}-{level}.erofs"))
        stacks.append(layers)
    return stacks


def test_a_stack_shows_what_an_overlay_shows(tmp_path: Path) -> None:
    """Kinds, modes, owners, times, targets, sizes, contents, attributes and hard links, of random layers."""
    stacks = make_stacks(tmp_path)
    for paths, (expected, links) in zip(stacks, shown_by_kernel(stacks, tmp_path / "work"), strict=True):
        layers = [Erofs.open(path) for path in paths]
        found, found_links = shown(Stack(layers))
        assert found == expected, paths
        assert found_links == links
        for layer in layers:
            layer.close()
