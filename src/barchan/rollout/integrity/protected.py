"""What a grader's sandbox starts programs from: that what the agent has left there is not what graders run by.

Names, sizes and times are compared, not contents, so that a look costs milliseconds. An agent may well install
programs, so a change is a sign and no proof.
"""

import asyncio
import posixpath
import sys
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from barchan.errors import BarchanError
from barchan.model.verdict import Evidence
from barchan.rollout.graders.base import Grading
from barchan.rollout.integrity.hooks import SHADOWED
from barchan.rollout.integrity.signs import SOURCE
from barchan.rollout.ports import Files, Sandbox
from barchan.rollout.tools.base import is_guests_doing

PROGRAMS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/root/.local/bin")
LIBRARIES = ("/usr/lib", "/usr/local/lib")  # of which those named python3* are looked into
PACKAGES = ("dist-packages", "site-packages")
STARTED = (
    "/etc/ld.so.preload",
    "/etc/profile",
    "/etc/bash.bashrc",
    "/etc/environment",
    "/root/.bashrc",
    "/root/.profile",
    "/root/.bash_profile",
)
MODULES = frozenset({"sitecustomize", "usercustomize"}) | SHADOWED | sys.stdlib_module_names
LISTINGS_MAX = 64
TOLD = 10


class Entry(NamedTuple):
    kind: str
    size: int
    mode: int
    mtime_unix_s: float
    target: str


Listing = Mapping[str, Entry]  # by path; no folders
_bases: dict[tuple[str, ...], Listing] = {}


async def listing_of(sandbox: Sandbox) -> Listing:
    """What is where programs, Python's modules and start-up files are looked for."""
    files = sandbox.files.as_user("root")
    found: dict[str, Entry] = {}
    libraries = await asyncio.gather(*(_list(files, folder) for folder in LIBRARIES))
    pythons = [
        path
        for entries in libraries
        for path, entry in entries.items()
        if posixpath.basename(path).startswith("python3") and entry.kind == "directory"
    ]
    folders = [*PROGRAMS, *pythons, *(posixpath.join(path, name) for path in pythons for name in PACKAGES)]
    for entries in await asyncio.gather(*(_list(files, folder) for folder in folders)):
        found |= {path: entry for path, entry in entries.items() if entry.kind != "directory"}
    for path in STARTED:
        try:
            info = await files.stat(path)
        except BarchanError as error:
            if not is_guests_doing(error):
                raise
            continue
        found[path] = Entry(info.kind, info.size, info.mode, info.mtime_unix_s, info.target)
    return found


async def _list(files: Files, folder: str) -> dict[str, Entry]:
    try:
        entries = await files.list(folder)
    except BarchanError as error:
        if not is_guests_doing(error):
            raise
        return {}
    return {
        posixpath.join(folder, posixpath.basename(entry.path)): Entry(
            entry.kind, entry.size, entry.mode, entry.mtime_unix_s, entry.target
        )
        for entry in entries
    }


async def base_listing(grading: Grading, layers: tuple[str, ...]) -> Listing:
    """That of the task's environment, where no agent was; kept for the images that it was made from."""
    environment = replace(grading.task.environment, network="none", allow_hosts=(), services=())
    template = await grading.sandboxes.template(environment)
    key = (template, *layers)
    if key not in _bases:
        async with grading.sandboxes.opened("control", environment, template=template, layers=layers) as sandbox:
            found = await listing_of(sandbox)
        while len(_bases) >= LISTINGS_MAX:
            _bases.pop(next(iter(_bases)))
        _bases[key] = found
    return _bases[key]


def suspects(base: Listing, now: Listing) -> tuple[str, ...]:
    """What was there and is another thing or gone, and what is new under a name that puts it before something."""
    programs = {posixpath.basename(path) for path in base if posixpath.dirname(path) in PROGRAMS}
    found = [path for path, entry in base.items() if now.get(path) != entry]
    for path in now.keys() - base.keys():
        name = posixpath.basename(path)
        if posixpath.dirname(path) in PROGRAMS:
            is_before = name in programs
        else:
            is_before = path in STARTED or name.endswith(".pth") or name.partition(".")[0] in MODULES
        found += [path] if is_before else []
    return tuple(sorted(found))


def sign(when: str, paths: tuple[str, ...]) -> tuple[Evidence, ...]:
    """What was found, as evidence; nothing where nothing was."""
    if not paths:
        return ()
    more = f" and {len(paths) - TOLD} more" if len(paths) > TOLD else ""
    return (
        Evidence(
            source=SOURCE,
            fact=f"sign: programs or start-up files changed {when}",
            value=f"{', '.join(paths[:TOLD])}{more}"[:400],
        ),
    )
