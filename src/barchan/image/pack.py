"""Layers as EROFS files that are the same, byte for byte, for the same tree."""

import hashlib
import shutil
from pathlib import Path

from barchan.image.store import NewLayer
from barchan.image.template import Layer, LayerKind
from barchan.image.tools import require, run

PACKAGE = "erofs-utils"
# Every file of a layer bears this time (2000-01-01): a digest must not depend on when a tree was unpacked, and
# zip files can't say anything before 1980.
MTIME_UNIX_S = 946_684_800
UUID = "00000000-0000-0000-0000-000000000000"
COMPRESSION = "lz4hc"  # smaller and colder-started than plain: docs/decisions/0003-erofs-layers.md


def make_layer(tree: Path, workspace: Path, kind: LayerKind) -> NewLayer:
    """Pack a directory as a layer in `workspace`; owners and modes are kept, times and extended attributes are not.

    Whatever `kind`, the digest is that of the EROFS file, so that it names the same content on every machine.

    Raises:
        RequirementMissing: erofs-utils is not installed.
    """
    packed = workspace / "layer.erofs"
    mkfs = require("mkfs.erofs", PACKAGE, needed_for="packing a layer")
    # -x-1: without attributes an imported tree can't bring overlayfs redirects or file capabilities of its own.
    run([mkfs, "--quiet", "-d1", f"-T{MTIME_UNIX_S}", "-U", UUID, "-x-1", f"-z{COMPRESSION}", packed, tree])
    with packed.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if kind == "erofs":
        return NewLayer(Layer(digest, "erofs"), packed)
    unpacked = workspace / "layer.dir"
    fsck = require("fsck.erofs", PACKAGE, needed_for="unpacking a layer")
    run([fsck, "-d1", f"--extract={unpacked}", "--preserve", packed])
    shutil.copymode(tree, unpacked)
    packed.unlink()
    return NewLayer(Layer(digest, "dir"), unpacked)
