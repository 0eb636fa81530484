"""`barchan cp`."""

import os
import posixpath
import re
from typing import NamedTuple

import barchan
from barchan.cli.common import DEFAULTS, OK, Common, print_json
from barchan.errors import InvalidSpec, NotFound
from barchan.sdk.sandbox import Sandbox


class Remote(NamedTuple):
    """A path in a sandbox."""

    sandbox_id: str
    path: str


def cp(source: str, target: str, /, *, user: str | None = None, common: Common = DEFAULTS) -> int:
    """Copy a file, or the content of a directory, into or out of a sandbox.

    A file copied to a directory goes below it; the content of a directory goes
    below the target, which is made if missing.

    For example:

        barchan cp notes.txt sb_x1:/tmp/
        barchan cp sb_x1:out ./out

    Args:
        source: A local path, or SANDBOX:PATH.
        target: SANDBOX:PATH, or a local path.
        user: User of the sandbox to read or write as. [default: the sandbox's]
    """
    origin, destination = parse(source), parse(target)
    if isinstance(origin, Remote) == isinstance(destination, Remote):
        raise InvalidSpec("one of source and target is SANDBOX:PATH, the other a local path (try: ./NAME:WITH:COLONS)")
    with barchan.connect(**common.connection) as client:
        if isinstance(origin, Remote) and isinstance(destination, str):
            client.attach(origin.sandbox_id).files.as_user(user).download(origin.path, destination)
        elif isinstance(destination, Remote) and isinstance(origin, str):
            _upload(client.attach(destination.sandbox_id), origin, destination.path, user)
    if common.json:
        print_json({"source": source, "target": target})
    return OK


def parse(operand: str) -> Remote | str:
    """`SANDBOX:PATH`, or a local path: whatever has no colon, or a slash before the first."""
    match = re.fullmatch(r"([^/:]+):(.*)", operand, re.DOTALL)
    if match is None:
        return operand
    if not match[2]:
        raise InvalidSpec(f"{operand} names no path (try: {operand}.)")
    return Remote(match[1], match[2])


def _upload(sandbox: Sandbox, local: str, path: str, user: str | None) -> None:
    files = sandbox.files.as_user(user)
    if not os.path.isdir(local):
        try:
            is_directory = path.endswith("/") or files.stat(posixpath.join(path, ".")).kind == "directory"
        except (NotFound, InvalidSpec):  # nothing there, or a file
            is_directory = False
        if is_directory:
            path = posixpath.join(path, os.path.basename(local))
    files.upload(local, path)
