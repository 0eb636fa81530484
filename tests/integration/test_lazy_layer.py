"""Lazily kept layers looked into without their data: what is in them, and what clashes, from the store's metadata."""

import asyncio
import random
from pathlib import Path

import pytest

from barchan.errors import BlobUnavailable, Conflict
from barchan.image.blobs import BlobStore
from barchan.image.erofs import Erofs
from barchan.image.lazy_layer import open_lazy
from barchan.image.pack import pack_tree
from barchan.image.remote import fetch, push
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.model.sandbox import SandboxSpec
from barchan.node.images import NodeImages
from tests.integration.layer_trees import make_tree
from tests.stores_http import served

pytestmark = [pytest.mark.requires("root"), pytest.mark.timeout(120)]


def commit(images: ImageStore, name: str, tree: Path) -> Template:
    with images.workspace() as workspace:
        path = workspace / "layer.erofs"
        digest = pack_tree(tree, path)
        return images.commit(TemplateConfig(name=name), (NewLayer(Layer(digest, "erofs"), path),))


def send(images: ImageStore, root: Path, *names: str) -> None:
    store = BlobStore.open(str(root))
    for name in names:
        asyncio.run(push(images, name, store, lambda what, done, total: None))


@pytest.mark.requires("nginx")
def test_looking_in_fetches_metadata_only(tmp_path: Path) -> None:
    """Every name and attribute is the same as in the layer that is here; of the data, nothing was asked for."""
    images, other, root = ImageStore(tmp_path / "images"), ImageStore(tmp_path / "other"), tmp_path / "blobs"
    make_tree(tmp_path / "tree", random.Random(7))
    (tmp_path / "tree/big").write_bytes(random.Random(8).randbytes(4 << 20))
    made = commit(images, "one", tmp_path / "tree")
    send(images, root, "one")
    with served(root, tmp_path / "nginx", "sendfile off;") as url:
        (layer,) = asyncio.run(fetch(other, "one", BlobStore.open(url))).layers
        with Erofs.open(images.layer_path(made.layers[0])) as here:
            there = open_lazy(other.layer_path(layer))
            assert there is not None
            with there:
                expected = [(path, inode, here.xattrs(inode)) for path, inode in here.walk()]
                assert [(path, inode, there.xattrs(inode)) for path, inode in there.walk()] == expected
                sent = [line.split()[9] for line in (tmp_path / "nginx/access.log").read_text().splitlines()]
                assert sum(map(int, sent)) < 1 << 20
                big = there.lookup("big")
                assert big is not None
                assert there.read(big, 100_000, 200_000) == (tmp_path / "tree/big").read_bytes()[100_000:300_000]


def test_what_clashes_is_seen_before_a_byte_of_data_is_here(tmp_path: Path) -> None:
    """A file over a directory of a lazily kept image is refused at create; without the store nobody can tell."""
    machine, root = ImageStore(tmp_path / "machine"), tmp_path / "blobs"
    for name, where in (("base", "etc/x"), ("good", "opt/tool"), ("bad", "etc")):
        (tmp_path / name / where).parent.mkdir(parents=True)
        (tmp_path / name / where).write_text(name)
        commit(machine, name, tmp_path / name)
    send(machine, root, "base", "good", "bad")
    images = NodeImages(ImageStore(tmp_path / "node"), str(root))

    def spec(*layers: str) -> SandboxSpec:
        return SandboxSpec(template="base", layers=layers, detach=True, ttl_s=60)

    template = asyncio.run(images.template_for(spec("good")))
    assert [layer.kind for layer in template.layers] == ["lazy", "lazy"]
    with pytest.raises(Conflict, match="etc"):
        asyncio.run(images.template_for(spec("good", "bad")))
    unasked = NodeImages(images.store, str(root))
    root.rename(tmp_path / "away")
    with pytest.raises(BlobUnavailable):
        asyncio.run(unasked.template_for(spec("good")))
    assert asyncio.run(images.template_for(spec("good"))) == template
