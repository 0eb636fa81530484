"""Layers read without mounting them: the same tree that the kernel shows, whatever the layers say to each other."""

import hashlib
import random
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from barchan.image.diff_tar import merge
from barchan.image.erofs import Erofs
from barchan.image.pack import pack_tree
from barchan.image.stack import Stack
from tests.integration.layer_trees import Seen, make_tree, shown_by_kernel

pytestmark = [pytest.mark.requires("root"), pytest.mark.timeout(120)]

SEED = 4
STACKS = 30
LAYERS_MAX = 5


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
            layers.append(folder / f"{number}-{level}.erofs")
            pack_tree(folder / f"{number}-{level}", layers[-1])
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


def merged(layers: list[Path], source: random.Random) -> list[Path]:
    """The same stack with a run of its layers as one."""
    start, stop = sorted(source.sample(range(len(layers) + 1), 2))
    target = layers[start].with_suffix(".merged")
    with ExitStack() as exits:
        opened = [exits.enter_context(Erofs.open(path)) for path in layers]
        is_bottom = stop == len(layers) and source.random() < 0.5
        merge(opened[start:stop], target, below=opened[stop:], is_bottom=is_bottom)
    return [*layers[:start], target, *layers[stop:]]


def test_a_merged_run_of_layers_shows_the_same(tmp_path: Path) -> None:
    """Between the layers above and below it, whatever these say to each other: renamed directories, whiteouts, all."""
    source = random.Random(SEED)
    stacks = make_stacks(tmp_path)
    seen = shown_by_kernel([*stacks, *(merged(layers, source) for layers in stacks)], tmp_path / "work")
    for paths, (expected, _), (found, _) in zip(stacks, seen[: len(stacks)], seen[len(stacks) :], strict=True):
        assert found == expected, paths
