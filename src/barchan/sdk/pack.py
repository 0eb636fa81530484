"""A local directory as a tar for a sandbox."""

import os
import tarfile
from pathlib import Path
from typing import IO

from barchan.errors import InvalidSpec


def pack(source: Path, archive: IO[bytes]) -> None:
    """Write the content of a directory, members relative to it: files, directories and links; owners are not carried.

    Raises:
        InvalidSpec: An entry can't be read, or is of a kind that does not travel, or a link that may lead out of the
            directory, which the sandbox refuses.
    """

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise InvalidSpec(f"{source / member.name} is neither file, directory nor link")
        if member.issym():
            check_link(source / member.name, member.name, member.linkname)
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    try:
        with tarfile.open(fileobj=archive, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for name in sorted(os.listdir(source)):
                tar.add(source / name, arcname=name, filter=plain)
    except OSError as error:
        raise InvalidSpec(f"can't read {error.filename or source}: {error.strerror or error}") from error


def check_link(path: Path, name: str, target: str) -> None:
    """Refuse a symbolic link that a sandbox would refuse; `name` is its path in the directory that is uploaded.

    Raises:
        InvalidSpec: It leads, or may lead, out of that directory.
    """
    if why := _why_refused(name, target):
        raise InvalidSpec(f"{path} links to {target!r}, {why}: nothing was sent")


def _why_refused(name: str, target: str) -> str:
    """Why a sandbox would not make this symbolic link, "" if it would; its rules are those of `untar`."""
    steps = [step for step in target.split("/") if step not in ("", ".")]
    climbs = next((index for index, step in enumerate(steps) if step != ".."), len(steps))
    if target.startswith("/"):
        return "an absolute path; only relative links inside the directory can be uploaded"
    if ".." in steps[climbs:]:
        return "which goes up behind a name; `..` may only stand first in a link that is uploaded"
    if climbs > name.count("/"):
        return "which leads out of the directory that is uploaded"
    return ""
