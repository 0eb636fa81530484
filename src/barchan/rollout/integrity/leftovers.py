"""What still runs in a sandbox when it should have ended."""

import posixpath

from barchan.rollout.ports import Sandbox


async def outlived(sandbox: Sandbox, before: frozenset[str]) -> int:
    """How many that were not there before are there still. Whoever lists them is one himself, each time another: only
    what is seen twice counts.
    """
    return len((await programs(sandbox) & await programs(sandbox)) - before)


async def programs(sandbox: Sandbox) -> frozenset[str]:
    """Ids of all processes there, by the kernel's list."""
    entries = await sandbox.files.as_user("root").list("/proc")
    return frozenset(name for entry in entries if (name := posixpath.basename(entry.path)).isdigit())
