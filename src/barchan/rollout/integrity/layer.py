"""A grader's own files, before and after it ran: what changed there was not the task's author."""

import asyncio
import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from barchan.errors import BarchanError, QuotaExceeded
from barchan.model.verdict import Evidence
from barchan.rollout.integrity.signs import SOURCE
from barchan.rollout.ports import Files, Sandbox
from barchan.rollout.tars import contents
from barchan.rollout.tools.base import is_guests_doing
from barchan.sdk.recipe import Put

LAYER_BYTES_MAX = 64 << 20
FILES_MAX = 500
READS_AT_ONCE = 8
TOLD = 10


class Seal(NamedTuple):
    """One file as it was put in place."""

    user: str
    size: int
    digest: str


Layer = Mapping[str, Seal]  # by path


async def layer_of(sandbox: Sandbox, items: tuple[Put, ...]) -> Layer:
    """The grader's files as they are in its sandbox. A folder larger than a bound is left out."""
    found: dict[str, Seal] = {}
    for item in items:
        files = sandbox.files.as_user(item.user)
        if (await files.stat(item.path)).kind != "directory":
            data = await files.read(item.path, length=LAYER_BYTES_MAX)
            found[item.path] = Seal(item.user, len(data), hashlib.sha256(data).hexdigest())
            continue
        try:
            tar = await files.read_tar(item.path, max_bytes=LAYER_BYTES_MAX)
        except QuotaExceeded:
            continue
        for name, (size, digest) in (await asyncio.to_thread(contents, tar)).items():
            found[f"{item.path.rstrip('/')}/{name}"] = Seal(item.user, size, digest)
    return dict(list(found.items())[:FILES_MAX])


async def changed(sandbox: Sandbox, before: Layer) -> tuple[str, ...]:
    """Files that are no more what they were. New ones are no matter: runners leave caches behind."""
    turns = asyncio.Semaphore(READS_AT_ONCE)

    async def differs(path: str, seal: Seal) -> bool:
        async with turns:
            return not await _is_as(sandbox.files.as_user(seal.user), path, seal)

    differ = await asyncio.gather(*(differs(path, seal) for path, seal in before.items()))
    return tuple(path for path, is_changed in zip(before, differ, strict=True) if is_changed)


async def _is_as(files: Files, path: str, seal: Seal) -> bool:
    try:
        data = await files.read(path, length=seal.size + 1)
    except BarchanError as error:
        if not is_guests_doing(error):
            raise
        return False
    return hashlib.sha256(data).hexdigest() == seal.digest


def proof(paths: tuple[str, ...]) -> Evidence:
    """That the grader's files were changed while it ran."""
    value = ", ".join(paths[:TOLD])[:400]
    return Evidence(source=SOURCE, fact="proven: the grader's own files were changed", value=value)
