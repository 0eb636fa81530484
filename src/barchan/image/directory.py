"""A directory of this host as a template."""

import os
import stat
from pathlib import Path

from barchan.errors import InvalidSpec, NotFound
from barchan.image.pack import DEFAULT_LIMITS, Limits, make_layer
from barchan.image.store import ImageStore
from barchan.image.template import LayerKind, Template, TemplateConfig
from barchan.image.tools import Progress

ID_MAX = 65_535  # a sandbox has this many user ids
REFUSED = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}


def import_directory(
    store: ImageStore,
    path: Path,
    config: TemplateConfig,
    kind: LayerKind,
    progress: Progress,
    limits: Limits = DEFAULT_LIMITS,
) -> Template:
    """Make a template with one layer of the directory's content.

    Raises:
        NotFound: There is no such directory.
        InvalidSpec: It holds something that a layer can't, or more than the limits allow; the message names the entry.
    """
    config.check()
    if not path.is_dir():
        raise NotFound(f"{path} is not a directory")
    progress("looking at the directory")
    check_tree(path)
    with store.workspace() as workspace:
        progress("packing the layer")
        layer = make_layer(path, workspace, kind, limits)
        progress("storing the layer")
        return store.commit(config, (layer,))


def check_tree(root: Path) -> None:
    """Raise `InvalidSpec` at the first entry that is no file, directory or symbolic link, or has an id out of range."""
    try:
        _check_tree(os.fspath(root))
    except OSError as error:
        raise InvalidSpec(f"{error.filename} can't be read: {error.strerror} (try: as another user)") from error


def _check_tree(root: str) -> None:
    pending = [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                found = entry.stat(follow_symlinks=False)
                refused = REFUSED.get(stat.S_IFMT(found.st_mode))
                if refused is not None:
                    raise InvalidSpec(f"{entry.path} is {refused}, which a layer can't hold", path=entry.path)
                if found.st_uid > ID_MAX or found.st_gid > ID_MAX:
                    raise InvalidSpec(
                        f"{entry.path} belongs to {found.st_uid}:{found.st_gid}; ids in a layer are at most {ID_MAX}",
                        path=entry.path,
                    )
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def default_user(root: Path, wanted: str) -> str:
    """`wanted` where the tree's own user list has it, else the guest's root."""
    try:
        lines = (root / "etc/passwd").read_text("utf-8", "replace").splitlines()
    except OSError:
        return "root"
    return wanted if any(line.split(":", 1)[0] == wanted for line in lines) else "root"
