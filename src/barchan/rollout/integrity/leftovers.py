"""What still runs in a sandbox when it should have ended."""

import asyncio
import posixpath
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from barchan.errors import BarchanError
from barchan.model.verdict import Evidence
from barchan.rollout.integrity.signs import SOURCE
from barchan.rollout.ports import Sandbox
from barchan.rollout.tools.base import is_guests_doing

LOOK_EVERY_S = 0.15
LOOKS = 5
CONTENT_BYTES_MAX = 64 << 10  # a reward is no longer


async def outlived(sandbox: Sandbox, before: frozenset[str]) -> int:
    """How many that were not there before are there still. Whoever lists them is one himself, each time another: only
    what is seen twice counts.
    """
    return len((await programs(sandbox) & await programs(sandbox)) - before)


async def programs(sandbox: Sandbox) -> frozenset[str]:
    """Ids of all processes there, by the kernel's list."""
    entries = await sandbox.files.as_user("root").list("/proc")
    return frozenset(name for entry in entries if (name := posixpath.basename(entry.path)).isdigit())


async def rewritten(sandbox: Sandbox, paths: Sequence[str]) -> tuple[Evidence, ...]:
    """Proof that a reward is written while nobody grades any more: each of its files is looked at again and again. For
    when programs have outlived the grader's command. Once is none: a grader's own last word may come late.
    """
    seen = [[await _state(sandbox, path) for path in paths]]
    for _ in range(LOOKS - 1):
        await asyncio.sleep(LOOK_EVERY_S)
        seen.append([await _state(sandbox, path) for path in paths])
    found = [path for number, path in enumerate(paths) if _is_rewritten([states[number] for states in seen])]
    if not found:
        return ()
    fact = "proven: a reward was written after the grader's command had ended"
    return (Evidence(source=SOURCE, fact=fact, value=", ".join(found)[:400]),)


class _State(NamedTuple):
    """A file at one moment: when it was last written, as the guest says, and its content, where it has any."""

    kind: str
    mtime_unix_s: float
    content: bytes


def _is_rewritten(seen: Sequence[_State]) -> bool:
    """More than once, by the times or, since whoever writes may put these back, by what is in it."""
    contents = [state.content for state in seen if state.content]  # whoever writes it may just have emptied it
    changes = sum(one != other for one, other in pairwise(contents))
    return len({state[:2] for state in seen}) > 2 or changes > 1


async def _state(sandbox: Sandbox, path: str) -> _State:
    files = sandbox.files.as_user("root")
    try:
        info = await files.stat(path)
        content = await files.read(path, length=CONTENT_BYTES_MAX) if info.kind == "file" else b""
    except BarchanError as error:
        if not is_guests_doing(error):
            raise
        return _State("missing", 0.0, b"")
    return _State(info.kind, info.mtime_unix_s, content)
