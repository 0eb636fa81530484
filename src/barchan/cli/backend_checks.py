"""What `barchan doctor` finds out: requirements of every backend, and whether a sandbox of it really starts."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

import barchan
from barchan import backends
from barchan.backends.base import Backend
from barchan.backends.container.lazy import ReaderSettings
from barchan.backends.container.probe import CONTAINER, requirements
from barchan.errors import BarchanError, RequirementMissing
from barchan.image.store import ImageStore
from barchan.model.image import MADE_PREFIXES
from barchan.model.node import ImageInfo, Requirement

ROOT_IMAGE, DISK_IMAGE = "debian", "debian-disk"
MAKE_IMAGE = {"root": "sudo barchan image build debian", "disk": "sudo barchan image disk debian"}
LOOK_AT_LOG = "look into node.log in the state directory"
BOOT_S_MAX = 300.0  # a whole machine on a processor that is not there takes half a minute
TTL_S = 900.0


class BackendCheck(Struct, frozen=True, kw_only=True):
    """One backend on this host.

    Attributes:
        ok: It has run a program; asked to be quick: nothing is missing.
        first_ms: Of the first sandbox, until it was ready; `again_ms` of one more; `exec_ms` of `true` in that.
        why: It is not ok; `remedy`: what would change that, a command where there is one.
    """

    name: str
    isolation: str
    ok: bool
    kinds: tuple[str, ...] = ()
    first_ms: float | None = None
    again_ms: float | None = None
    exec_ms: float | None = None
    why: str = ""
    remedy: str = ""


class Report(Struct, frozen=True, kw_only=True):
    """Everything: what the host has of what is needed, and what each backend came to."""

    requirements: list[Requirement]
    backends: list[BackendCheck]


class _Asked:
    """A host for backends that are only asked what they need. See `backends.base.Host`."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.images = ImageStore(state_dir / "images")
        self.weaken: tuple[str, ...] = ()
        self.reader = ReaderSettings()

    async def backend(self, name: str) -> Backend:
        raise RequirementMissing(f"backend {name} is asked, not started")


def examine(state_dir: Path) -> Report:
    """Try what containers need, and ask every other backend; a second at most, nothing is left behind."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return asyncio.run(_examine(requirements(state_dir), _Asked(state_dir)))


async def _examine(found: list[Requirement], host: _Asked) -> Report:
    """On an event loop, which a backend may want to see when it is made."""
    checks = []
    for name in backends.names():
        try:
            backend = backends.load(name, host)
            own = [] if name == CONTAINER else [item for item in backend.probe() if item.needed_for != CONTAINER]
        except Exception as error:  # it may be a stranger's, whose package is broken
            remedy = "reinstall the package that brings it"
            checks.append(
                BackendCheck(name=name, isolation="", ok=False, why=f"can't be loaded: {error!r}", remedy=remedy)
            )
            continue
        found += own
        unmet = [item for item in found if not item.ok and item.needed_for in (name, CONTAINER)]
        checks.append(
            BackendCheck(
                name=name,
                isolation=backend.capabilities.isolation,
                kinds=tuple(sorted(backend.capabilities.kinds)),
                ok=not unmet,
                why="; ".join(dict.fromkeys(f"{item.name}: {item.found}" for item in unmet)),
                remedy="; ".join(dict.fromkeys(item.remedy for item in unmet if item.remedy)),
            )
        )
    return Report(requirements=found, backends=checks)


def with_boots(report: Report, state_dir: Path, say: Callable[[str], None]) -> Report:
    """Start sandboxes of those that have all they need, by this user's node."""
    checks = asyncio.run(_boot_all(report.backends, state_dir, say))
    return replace(report, backends=checks)


async def _boot_all(checks: list[BackendCheck], state_dir: Path, say: Callable[[str], None]) -> list[BackendCheck]:
    if not any(check.ok for check in checks):
        return checks
    try:
        async with barchan.connect_async(state_dir=state_dir) as client:
            images = await client.images()
            done = []
            for check in checks:
                if check.ok:
                    say(f"starting a sandbox: {check.name}")
                    check = await _boot(client, check, images)
                done.append(check)
            return done
    except BarchanError as error:
        return [
            replace(check, ok=False, why=f"no node: {error}", remedy=LOOK_AT_LOG) if check.ok else check
            for check in checks
        ]


async def _boot(client: "barchan.AsyncClient", check: BackendCheck, images: list[ImageInfo]) -> BackendCheck:
    kind = "root" if "root" in check.kinds else "disk"
    image = usual_image(images, kind)
    if image is None:
        return replace(check, ok=False, why=f"there is no image to try it with (a {kind})", remedy=MAKE_IMAGE[kind])
    try:
        first_ms, _ = await _start(client, check.name, image)
        again_ms, exec_ms = await _start(client, check.name, image)
    except BarchanError as error:
        before, _, remedy = str(error).partition("(try: ")
        return replace(check, ok=False, why=before.strip(), remedy=remedy.rstrip(") ") or LOOK_AT_LOG)
    return replace(check, first_ms=first_ms, again_ms=again_ms, exec_ms=exec_ms)


async def _start(client: "barchan.AsyncClient", backend: str, image: str) -> tuple[float, float]:
    """Milliseconds until a sandbox is ready, and of a program in it."""
    began = time.monotonic()
    sandbox = await client.create(image, backend=backend, ttl_s=TTL_S, timeout_s=BOOT_S_MAX)
    try:
        ready = time.monotonic()
        (await sandbox.exec(["true"])).check()
        return (ready - began) * 1e3, (time.monotonic() - ready) * 1e3
    finally:
        await sandbox.kill()


def usual_image(images: list[ImageInfo], kind: str) -> str | None:
    """The image that everybody has; else the smallest of that kind that somebody made on purpose."""
    fitting = [item for item in images if item.kind == kind and not item.needs]
    if any(item.name in (ROOT_IMAGE, DISK_IMAGE) for item in fitting):
        return ROOT_IMAGE if kind == "root" else DISK_IMAGE
    named = [item for item in fitting if not item.name.startswith(MADE_PREFIXES)]
    return min(named, key=lambda item: item.size_bytes).name if named else None
