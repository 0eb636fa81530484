"""`barchan image disk`: images that are the disk of a machine."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from barchan.cli.common import DEFAULTS, Common, key_values
from barchan.cli.image_build import Words, layer_kind, made, own_store
from barchan.cli.progress import progress
from barchan.errors import InvalidSpec
from barchan.image.template import TemplateConfig

app = App(name="disk", help_format="plaintext", help="Images that are the disk of a whole machine, for --backend vm.")


@app.command
def add(
    name: str,
    disk: Path,
    /,
    *,
    user: str = "root",
    workdir: str = "/",
    env: Words = (),
    kernel: Path | None = None,
    initrd: Path | None = None,
    append: str = "",
    user_data: Path | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Make an image of the disk of a machine, raw or qcow2.

    Its sandboxes are machines that start from it, each writing to a disk of
    its own above. It starts as a BIOS starts it, or with --kernel. For
    commands and files the guest needs our agent: one with cloud-init or
    qemu-guest-agent is given it at its first start (docs/vm.md).

    For example:

        barchan image disk add cloud debian-12-genericcloud-amd64.qcow2
        barchan image disk add mine disk.qcow2 --user-data cloud.yaml --user tester
        barchan image disk add mine disk.raw --kernel vmlinuz --initrd initrd.img --append "root=/dev/vda rw"

    Args:
        name: Name of the image; an older image of that name is replaced.
        disk: The file, which is copied.
        user: Default user of commands; one that the guest has.
        workdir: Where commands start.
        env: KEY=VALUE of commands; may be repeated.
        kernel: A Linux kernel to start directly.
        initrd: Its initrd.
        append: Its command line.
        user_data: A file for cloud-init in the guest: users, keys, packages.
            It is kept in the image, for everybody who has that to read.
    """
    from barchan.image.disks import Boot, add_disk

    if (kernel is None) != (initrd is None) or (kernel is None and append):
        raise InvalidSpec("--kernel and --initrd go together, and --append with them")
    boot = None if kernel is None or initrd is None else Boot(kernel=kernel, initrd=initrd, append=append)
    config = TemplateConfig(
        name=name, user=user, workdir=workdir, env=key_values(env, "--env"), source=f"disk:{disk.absolute()}"
    )
    config.check()
    told = "" if user_data is None else _text(user_data)
    with progress(f"adding {name}") as say:
        template = add_disk(own_store(common), config, disk, layer_kind(), say, boot=boot, user_data=told)
        return made(template, common)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"{path} can't be read as text: {error}") from error


@app.command
def debian(
    *,
    name: str = "debian-disk",
    suite: str = "bookworm",
    include: Words = (),
    desktop: bool = False,
    force: Annotated[bool, Parameter(show_default=False)] = False,
    common: Common = DEFAULTS,
) -> int:
    """Build a small Debian machine from packages: systemd, Python, and our
    agent; on its screen somebody is logged in.

    Needs root, and the packages mmdebstrap and e2fsprogs; takes a minute or
    two.

    For example:

        sudo barchan image disk debian
        sudo barchan image disk debian --name desktop --desktop

    Args:
        name: Name of the image.
        suite: Debian release.
        include: More packages, separated by commas.
        desktop: An X server with a terminal in place of the text console.
        force: Build again, and replace an image of that name.
    """
    from barchan.image.debian_disk import DiskSpec, build_disk

    packages = tuple(sorted({word for words in include for word in words.split(",") if word}))
    spec = DiskSpec(name=name, suite=suite, include=packages, desktop=desktop)
    with progress(f"building {name}") as say:
        return made(build_disk(own_store(common), spec, layer_kind(), say, force=force), common)
