"""Images put together: what is true of directories that only some of them say something about."""

import io
import stat
import tarfile
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from msgspec.structs import replace

from barchan.image.erofs import Erofs
from barchan.image.pack import pack_tar
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import Layer, Template, TemplateConfig
from barchan.model.image import MERGED_PREFIX
from barchan.model.sandbox import SandboxSpec
from barchan.node.images import NodeImages
from tests.layouts import member, tar_of

BASE = tar_of(
    member("tmp", tarfile.DIRTYPE, mode=0o1777, mtime=100),
    member("opt", tarfile.DIRTYPE, mode=0o750, uid=3, mtime=100),
    member("opt/deep", tarfile.DIRTYPE, mode=0o711, mtime=100),
    ("opt/deep/base", b""),
)
TOOL = tar_of(("tmp/tool", b""), ("opt/deep/tool", b""), ("own/tool", b""))  # with no entries for directories
WHOLE = tar_of(member("opt", tarfile.DIRTYPE, mode=0o700, uid=9, mtime=200), ("opt/whole", b""))


@pytest.fixture
def images(tmp_path: Path) -> NodeImages:
    store = ImageStore(tmp_path / "images")
    for name, data in (("base", BASE), ("tool", TOOL), ("whole", WHOLE)):
        with store.workspace() as workspace:
            digest = pack_tar(cast(BinaryIO, io.BytesIO(data)), workspace / "layer")
            store.commit(TemplateConfig(name=name), (NewLayer(Layer(digest, "erofs"), workspace / "layer"),))
    return NodeImages(store)


async def composed(images: NodeImages, *above: str) -> Template:
    return await images.template_for(SandboxSpec(template="base", layers=above))


async def test_the_base_s_directories_stay_its_own(images: NodeImages) -> None:
    """Owner, mode and time of what the image above only has entries in; made once, and told by those names alone."""
    made = await composed(images, "tool")
    tool, base = images.store.resolve("tool"), images.store.resolve("base")
    assert made.layers[1:] == (*tool.layers, *base.layers)
    assert made.base_layers == 1
    with Erofs.open(images.store.layer_path(made.layers[0])) as layer:
        found = {path.decode(): inode for path, inode in layer.walk() if path}
    assert {path: (stat.S_IMODE(inode.mode), inode.uid, inode.mtime_ns) for path, inode in found.items()} == {
        "tmp": (0o1777, 0, 100 * 10**9),
        "opt": (0o750, 3, 100 * 10**9),
        "opt/deep": (0o711, 0, 100 * 10**9),
    }
    assert (await composed(images, "tool")).digest == made.digest
    again = NodeImages(images.store)
    assert (await composed(again, "tool")).layers == made.layers
    assert len([name for name in (t.name for t in images.store.templates()) if name.startswith(MERGED_PREFIX)]) == 1


async def test_what_an_image_says_of_a_directory_counts(images: NodeImages) -> None:
    """Entries of its own replace the base's, also for an image above that has none."""
    whole, base = images.store.resolve("whole"), images.store.resolve("base")
    assert (await composed(images, "whole")).layers == (*whole.layers, *base.layers)
    made = await composed(images, "whole", "tool")
    with Erofs.open(images.store.layer_path(made.layers[0])) as layer:
        opt = layer.lookup("opt")
    assert opt is not None and (stat.S_IMODE(opt.mode), opt.uid) == (0o700, 9)


async def test_a_layer_that_is_elsewhere_changes_nothing(images: NodeImages) -> None:
    """Nobody can tell without its data, and a create doesn't wait for it."""
    store = images.store
    with store.workspace() as workspace:
        (workspace / "layer").write_bytes(b"no layer is looked into")
        store.commit(TemplateConfig(name="far"), (NewLayer(Layer("0" * 64, "lazy"), workspace / "layer"),))
    far, tool = store.resolve("far"), store.resolve("tool")
    layers = await images._with_directories(far, [far.layers])
    assert layers == far.layers
    both = replace(tool, layers=(*tool.layers, *far.layers))
    assert await images._with_directories(both, [tool.layers]) == both.layers
