"""`barchan image`: the commands that look, check and remove; the others are in modules of their own."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

import barchan
from barchan.cli.common import (
    DEFAULTS,
    FAILED,
    OK,
    Common,
    bytes_of,
    human_age,
    human_bytes,
    one_line,
    print_error,
    print_json,
    print_table,
    seconds_of,
)
from barchan.cli.image_build import build_app
from barchan.cli.image_disk import app as disk_app
from barchan.cli.image_rebase import rebase
from barchan.cli.image_transfer import pull, push
from barchan.cli.progress import progress
from barchan.errors import InvalidSpec
from barchan.image.local import layer_info
from barchan.image.store import DIGEST_PREFIX_MIN, ImageStore, image_info
from barchan.image.tree import LayerNode, forest
from barchan.image.verify import Damage, verify
from barchan.model.gc import GcReport, GcRequest
from barchan.model.image import ASLEEP_PREFIX
from barchan.model.node import LayerInfo
from barchan.sdk.embedded import listens

app = App(name="image", help_format="plaintext")
# A command that lives in a module of its own needs its import and a line here; what is slow to import, it imports in
# its function.
app.command(build_app)
app.command(disk_app)
app.command(pull)
app.command(push)
app.command(rebase)


def _store(common: Common) -> ImageStore:
    if common.node_url is not None:
        raise InvalidSpec(
            "this looks into this machine's own images: give no --url (try: barchan image list --url URL)"
        )
    return ImageStore(common.local_state_dir / "images")


def _has_node(common: Common) -> bool:
    """Whether there is a node to ask: it knows what its sandboxes need."""
    return common.node_url is not None or listens(str(common.local_state_dir))


@app.command(name="list")
def list_(
    *, tree: bool = False, all_: Annotated[bool, Parameter(name="--all")] = False, common: Common = DEFAULTS
) -> int:
    """List the images of this machine, or of the node of --url.

    Those that hold what hibernated sandboxes have written go with them, and
    are left out without --all.

    SHARED is what of an image's size other images have, too. With --tree:
    the layers, the lowest first, under each those that lie on it, with the
    names of the images that end there.

    For example:

        barchan image list --json
        barchan image list --tree

    Args:
        tree: Show the layers as a tree, with all images.
        all_: Show those of hibernated sandboxes, too.
    """
    if tree:
        return _print_tree(_store(common), common)
    sources: dict[str, str] = {}
    if common.node_url is not None:
        with barchan.connect(**common.connection) as client:
            images = client.images()
    else:
        images = _store(common).list()
        sources = {template.name: template.source for template in _store(common).templates()}
    images = [image for image in images if all_ or not image.name.startswith(ASLEEP_PREFIX)]
    if common.json:
        print_json(images)
        return OK
    now = time.time()
    rows = [
        [
            image.name,
            image.digest[:DIGEST_PREFIX_MIN],
            human_bytes(image.size_bytes),
            human_bytes(image.shared_bytes),
            human_age(now - image.created_unix_s),
            human_age(now - image.used_unix_s),
            image.user,
            sources.get(image.name, ""),
        ]
        for image in images
    ]
    columns = ("NAME", "DIGEST", "SIZE", "SHARED", "AGE", "USED", "USER", "SOURCE")
    print_table(columns, rows, empty="no images (try: sudo barchan image build debian)")
    return OK


def _print_tree(store: ImageStore, common: Common) -> int:
    templates = store.templates()
    sizes = {layer: store.layer_bytes(layer) for template in templates for layer in template.layers}
    roots = forest(templates, sizes)
    if common.json:
        print_json(roots)
        return OK
    rows = [row for root in roots for row in _tree_rows(root, "", "")]
    print_table(("LAYER", "SIZE", "KIND", "IMAGES"), rows, empty="no images (try: sudo barchan image build debian)")
    if rows:
        unshared = sum(sizes[layer] for template in templates for layer in template.layers)
        sys.stdout.write(
            f"{len(templates)} images, {len(sizes)} layers, {human_bytes(sum(sizes.values()))} on disk; "
            f"{human_bytes(unshared)} if nothing were shared\n"
        )
    return OK


def _tree_rows(node: LayerNode, branch: str, below: str) -> Iterator[list[str]]:
    """`branch` leads to this layer's own line, `below` to those of the layers on it."""
    yield [
        branch + node.digest[:DIGEST_PREFIX_MIN],
        human_bytes(node.size_bytes),
        node.kind,
        ", ".join(node.images),
    ]
    for child in node.children:
        is_last = child is node.children[-1]
        yield from _tree_rows(child, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  "))


@app.command
def show(image: str, /, *, common: Common = DEFAULTS) -> int:
    """Show one image: what its sandboxes start with, and its layers, the
    topmost first.

    For example:

        barchan image show debian

    Args:
        image: Its name or digest.
    """
    store = _store(common)
    template = store.resolve(image)
    layers = [layer_info(store, layer) for layer in template.layers]
    if common.json:
        print_json({**msgspec.to_builtins(template), "layers": layers})
        return OK
    own = len(layers) - template.base_layers
    fields = [
        ("name", template.name),
        ("digest", template.digest),
        ("size", f"{human_bytes(template.size_bytes)} ({template.size_bytes} bytes)"),
        ("created", _utc(template.created_unix_s)),
        ("used", _utc(store.used_unix_s([template])[template.name])),
        ("source", template.source),
        ("user", template.user),
        ("workdir", template.workdir),
        *(("env", f"{key}={value}") for key, value in template.env.items()),
        *(
            (key, msgspec.json.encode(words).decode())
            for key, words in (("entrypoint", template.entrypoint), ("cmd", template.cmd))
            if words
        ),
        *(("layer", _layer_line(layer, is_own=at < own)) for at, layer in enumerate(layers)),
    ]
    for key, value in fields:
        sys.stdout.write(f"{key:10} {one_line(value)}\n")
    return OK


def _utc(unix_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_s))


def _layer_line(layer: LayerInfo, *, is_own: bool) -> str:
    size = human_bytes(layer.size_bytes)
    if layer.kind == "lazy":
        size = f"{human_bytes(layer.local_bytes)} of {size} here"
    return f"{layer.digest} {layer.kind}, {size}, {'own' if is_own else 'base'}"


@app.command
def remove(*images: str, common: Common = DEFAULTS) -> int:
    """Remove images. Sandboxes that run keep their files.

    For example:

        barchan image remove tools

    Args:
        images: Names or digests.
    """
    if not images:
        raise InvalidSpec("say which image (try: barchan image list)")
    if _has_node(common):
        with barchan.connect(**common.connection) as client:
            removed = [client.remove_image(image) for image in images]
    else:
        store = _store(common)
        removed = [image_info(store.remove(image)) for image in images]
    if common.json:
        print_json(removed)
    else:
        for image in removed:
            sys.stdout.write(f"removed {image.name}\n")
    return OK


@app.command
def gc(
    *, unused_for: str | None = None, keep_bytes: str | None = None, dry_run: bool = False, common: Common = DEFAULTS
) -> int:
    """Make room: remove layers that no image names, and the images asked for.

    Nothing goes that a live sandbox was made of, that an image which stays
    was built on, or that was made or used within the last two minutes.
    Images that builds keep for themselves (prep-..., merged-...) go first,
    then those used longest ago.

    For example:

        barchan image gc
        barchan image gc --unused-for 7d --dry-run
        barchan image gc --keep-bytes 50GiB
        barchan image gc --unused-for 1d --keep-bytes 50GiB

    Args:
        unused_for: Images from which no sandbox started for this long: 12h, 7d, 4w.
        keep_bytes: Images until the layers of the others take at most this: 500MiB, 20GiB.
        dry_run: Say what would go, and remove nothing.
    """
    asked = GcRequest(
        unused_for_s=None if unused_for is None else seconds_of(unused_for, "--unused-for"),
        keep_bytes=None if keep_bytes is None else bytes_of(keep_bytes, "--keep-bytes"),
        dry_run=dry_run,
    )
    from barchan.node.kept_machines import MACHINES  # with the node's code, which no other command here wants

    # What is kept of machines that were made of images is a node's: where there is some, one is started for it.
    if _has_node(common) or any((common.local_state_dir / name).is_dir() for name in MACHINES):
        with barchan.connect(**common.connection) as client:
            report = client.collect_images(
                unused_for_s=asked.unused_for_s, keep_bytes=asked.keep_bytes, dry_run=asked.dry_run
            )
    else:
        report = _store(common).collect(asked)
    if common.json:
        print_json(report)
    else:
        _print_report(report)
    return OK


def _print_report(report: GcReport) -> None:
    now = time.time()
    rows = [
        [
            image.name,
            image.digest[:DIGEST_PREFIX_MIN],
            human_age(now - image.used_unix_s),
            human_bytes(image.freed_bytes),
        ]
        for image in report.images
    ]
    rows += [
        ["(no image)", layer.digest[:DIGEST_PREFIX_MIN], "", human_bytes(layer.size_bytes)]
        for layer in report.left_overs
    ]
    print_table(("IMAGE", "DIGEST", "USED", "FREED"), rows, empty="nothing to remove")
    verb = "would free" if report.dry_run else "freed"
    sys.stdout.write(f"{verb} {human_bytes(report.freed_bytes)}; {human_bytes(report.kept_bytes)} in images stay\n")


@app.command(name="verify")
def verify_(*images: str, common: Common = DEFAULTS) -> int:
    """Read images back and compare them with their digests. Exit code 1 if
    something is damaged.

    Layers are compared whole, and their structure is checked; of layers read
    on demand, what is here of them. It takes as long as reading them does.

    For example:

        barchan image verify
        barchan image verify debian tools

    Args:
        images: Names or digests; all without any.
    """
    with progress("verifying") as say:
        report = verify(_store(common), images, say)
    if common.json:
        print_json(report)
    else:
        _print_damages(report.damages)
        counts = f"{report.images} images, {report.layers} layers, {human_bytes(report.bytes_read)} read"
        sys.stdout.write(f"{counts}: {len(report.damages) or 'nothing'} damaged\n")
    return FAILED if report.damages else OK


def _print_damages(damages: Sequence[Damage]) -> None:
    for damage in damages:
        print_error(f"{damage.what}: {damage.cause}; needed by {', '.join(damage.images)}")
