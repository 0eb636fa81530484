"""Runs checks against one backend: a node of the suite's own, check after check, and a look at what is left."""

import asyncio
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from msgspec import Struct

from barchan.errors import BarchanError, InvalidSpec, NotSnapshotable, RequirementMissing
from barchan.sdk.aio.client import AsyncClient, connect_async
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.testing.check import Check
from barchan.testing.conformance import CHECKS
from barchan.testing.expect import NotConforming
from barchan.testing.lab import Lab
from barchan.testing.node import NodeProcess
from barchan.testing.profiles import NEVER_ASKED_FOR, Profile

CHECK_S = 90.0
LEFTOVERS = "nothing_is_left_on_the_host"
Result = Literal["passed", "gap", "failed", "closed", "unmet"]


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of one check.

    Attributes:
        result: `gap`: it is about what the backend lacks, and was refused as that must be. `closed`: the backend is
            said to lack it, and can do it: a fault of the list. `unmet`: this host lacks something that it needs.
        message: Why, unless it has passed.
    """

    name: str
    area: str
    result: Result
    took_s: float
    message: str = ""

    @property
    def ok(self) -> bool:
        return self.result in ("passed", "gap")


class Report(Struct, frozen=True, kw_only=True):
    """A backend's outcomes."""

    backend: str
    template: str
    outcomes: tuple[Outcome, ...]

    def named(self, *results: Result) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.result in results)

    @property
    def ok(self) -> bool:
        return all(outcome.ok for outcome in self.outcomes)

    def summary(self) -> str:
        """One line: counts, with what is not a pass named."""
        counts = Counter(outcome.result for outcome in self.outcomes)
        line = f"{self.backend}: {counts['passed']} of {len(self.outcomes)} passed"
        words: dict[Result, str] = {"gap": "gaps", "failed": "failed", "closed": "closed gaps", "unmet": "unmet here"}
        for result, word in words.items():
            if found := self.named(result):
                line += f"; {word}: {', '.join(outcome.name for outcome in found)}"
        return line


class Suite:
    """One backend under test. As a context it has a node, which ends with it; `left` then says what it left behind.

    Args:
        images: The image store that the node uses.
        options: Of the node, as on its command line.
    """

    def __init__(self, backend: str, template: str, profile: Profile, images: Path, options: tuple[str, ...] = ()):
        self.backend = backend
        self.template = template
        self.profile = profile
        self.left: list[str] = []
        self._images = images
        self._options = options
        self._shared: AsyncSandbox | None = None
        self._client: AsyncClient | None = None

    async def __aenter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="barchan-"))
        self.node = NodeProcess(self._folder / "state", self._images)
        try:
            await asyncio.to_thread(self.node.start, *self._options)
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(BarchanError):  # its node may be gone, and is looked at below
            if self._client is not None:
                await self._client.close()
        self.left = await asyncio.to_thread(self.node.end)
        await asyncio.to_thread(shutil.rmtree, self._folder)

    async def outcome(self, check: Check) -> Outcome:
        """Run one check; whatever is wrong with the backend is in the outcome."""
        began = time.monotonic()
        result, message = await self._judged(check)
        took_s = time.monotonic() - began
        return Outcome(name=check.name, area=check.area, result=result, took_s=took_s, message=message)

    async def _judged(self, check: Check) -> tuple[Result, str]:
        lacking = self.profile.lacks.get(check.needs or "")
        try:
            await self._run(check)
        except (InvalidSpec, RequirementMissing, NotSnapshotable) as error:
            if lacking is not None:
                return "gap", f"{check.needs}: {lacking}"
            return ("unmet", str(error)) if isinstance(error, RequirementMissing) else ("failed", _told(error))
        except Exception as error:
            if lacking is not None and check.needs in NEVER_ASKED_FOR and isinstance(error, NotConforming):
                return "gap", f"{check.needs}: {lacking}"
            return "failed", _told(error)
        if lacking is not None:
            return "closed", f"it is listed as lacking {check.needs} ({lacking}), and can do it"
        return "passed", ""

    async def _run(self, check: Check) -> None:
        """A time-out is the check's own failure: it ends what was made all the same."""
        if self.node.process is None:  # a check that had killed it was cut short
            await asyncio.to_thread(self.node.start, *self._options)
        folder = self._folder / "check"
        folder.mkdir()
        try:
            async with connect_async(self._url) as client, asyncio.timeout(self.profile.patience * CHECK_S):
                lab = self._lab(client, folder)
                try:
                    await check.body(lab)
                finally:
                    await lab.close()
        finally:
            await asyncio.to_thread(shutil.rmtree, folder)

    @property
    def _url(self) -> str:
        return f"unix://{self.node.socket}"

    def _lab(self, client: AsyncClient, folder: Path) -> Lab:
        return Lab(self.backend, self.template, self.profile, self.node, client, self._common, folder)

    async def _common(self) -> AsyncSandbox:
        """The sandbox that checks share; another one when it has ended."""
        if self._client is None:
            self._client = await connect_async(self._url)
        if self._shared is not None:
            with suppress(BarchanError):
                if (await self._shared.info()).phase not in ("stopped", "lost"):
                    return self._shared
        self._shared = await self._lab(self._client, self._folder).create()
        return self._shared


def _told(error: Exception) -> str:
    """What went wrong, and the line of the check that saw it, or stood there when its time was over."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    trace = error.__traceback__
    if isinstance(error, TimeoutError) and error.__cause__ is not None:
        trace = error.__cause__.__traceback__
    frames = [frame for frame in traceback.extract_tb(trace) if "/testing/conformance/" in frame.filename]
    at = f" (in {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


def chosen(only: Sequence[str] = ()) -> tuple[Check, ...]:
    """The checks of these areas, or of these names; with none given, all.

    Raises:
        InvalidSpec: There is no such area or check.
    """
    known = {name for each in CHECKS for name in (each.area, each.name)}
    if unknown := sorted(set(only) - known):
        areas = ", ".join(dict.fromkeys(each.area for each in CHECKS))
        raise InvalidSpec(f"no check or area {unknown[0]!r}; the areas are: {areas} (try: barchan conformance --list)")
    return tuple(each for each in CHECKS if not only or {each.area, each.name} & set(only))


async def run(
    suite: Suite, checks: Iterable[Check], *, told: Callable[[Outcome], None] = lambda outcome: None
) -> Report:
    """Run checks one after the other, then end the node, and look at what is left.

    Args:
        told: Called with each outcome as it is there.
    """
    outcomes: list[Outcome] = []
    async with suite:
        for check in checks:
            outcomes.append(await suite.outcome(check))
            told(outcomes[-1])
    left = "; ".join(suite.left)
    result: Result = "failed" if left else "passed"
    outcomes.append(Outcome(name=LEFTOVERS, area="leftovers", result=result, took_s=0.0, message=left))
    told(outcomes[-1])
    return Report(backend=suite.backend, template=suite.template, outcomes=tuple(outcomes))
