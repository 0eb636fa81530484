"""By what gVisor runs a guest's instructions on this host: found out by running a guest, once per runsc and kernel."""

import os
import platform
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from barchan.backends.gvisor.programs import FOLDER
from barchan.backends.gvisor.spec import PLATFORMS
from barchan.errors import BarchanError, RequirementMissing

CHOICE = "platform.json"


class _Choice(msgspec.Struct, frozen=True):
    programs: str
    kernel: str
    platform: str


async def choose(state_dir: Path, programs: str, attempt: Callable[[str], Awaitable[None]]) -> str:
    """The fastest that runs a guest here.

    Args:
        programs: Names the programs that were tried.
        attempt: Runs a guest by that platform, and fails if that does not answer.

    Raises:
        RequirementMissing: None does; the message says why, of each.
    """
    kept = state_dir / FOLDER / CHOICE
    kernel = platform.uname().release
    before = _read(kept)
    if before is not None and (before.programs, before.kernel) == (programs, kernel) and before.platform in PLATFORMS:
        return before.platform
    failures = []
    for name in PLATFORMS:
        try:
            await attempt(name)
        except (BarchanError, OSError, TimeoutError) as error:
            failures.append(f"{name}: {error}")
            continue
        _write(kept, _Choice(programs, kernel, name))
        return name
    raise RequirementMissing(
        f"gVisor runs no guest on this host: {'; '.join(failures)} (use another backend, or another runsc: remove "
        "the directory tools/runsc and run `sudo barchan tools install runsc`)"
    )


def _read(path: Path) -> _Choice | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Choice)
    except (FileNotFoundError, msgspec.MsgspecError):  # nobody chose yet, or another release did
        return None


def _write(path: Path, choice: _Choice) -> None:
    fd, part = tempfile.mkstemp(prefix="part-", dir=path.parent)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(choice))
    os.replace(part, path)
