"""A local directory as a tar for a sandbox."""

import os
import tarfile
from pathlib import Path
from typing import IO

from barchan.errors import InvalidSpec


def pack(source: Path, archive: IO[bytes]) -> None:
    """Write the content of a directory, members relative to it: files, directories and links; owners are not carried.

    Raises:
        InvalidSpec: An entry can't be read, or is of a kind that does not travel.
    """

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            raise InvalidSpec(f"{source / member.name} is neither file, directory nor link")
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    try:
        with tarfile.open(fileobj=archive, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for name in sorted(os.listdir(source)):
                tar.add(source / name, arcname=name, filter=plain)
    except OSError as error:
        raise InvalidSpec(f"can't read {error.filename or source}: {error.strerror or error}") from error
