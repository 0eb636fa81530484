"""One run of `barchan rollout` under a plan: started, hurt, taken up again, and judged."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from barchan.errors import InvalidSpec
from barchan.rollout.store import ROLLOUTS, RUN, SUMMARY, read_rollouts
from barchan.testing.faults import ground as grounds
from barchan.testing.faults.events import FILE, EventFile
from barchan.testing.faults.ground import Ground
from barchan.testing.faults.injector import Injector
from barchan.testing.faults.judge import FaultTable, Truth, judge
from barchan.testing.faults.plan import Plan
from barchan.trajectory.format import FOLDER

LOG = "client.log"
LOOK_EVERY_S = 0.02
COME_AGAIN_S, GIVE_UPS_MAX = 1.0, 10
_FOR_GOOD = (0, 2)  # exit codes: it is done, or was asked for what can't be
END_S = 60.0  # what a client that was asked to end may still take


class Campaign:
    """A run under a plan.

    Args:
        arguments: Those of `barchan rollout` (the task set first), without where the results and the node are.
        out: The run's folder, new or empty.
        images: An image store, which is left as it is.
        template: The image of tasks without one of their own.
        base_url: Of the model's server, where the run has one; faults of endpoints happen before it.
        wall_s_max: After so many seconds the client is ended: it hangs.
        quiet: Its output goes to `client.log` in the folder, and is not shown.
    """

    def __init__(
        self,
        plan: Plan,
        arguments: Sequence[str],
        out: Path,
        *,
        images: Path,
        template: str = "debian",
        base_url: str | None = None,
        wall_s_max: float | None = None,
        quiet: bool = False,
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        if plan.needs("endpoint-") and base_url is None:
            raise InvalidSpec("a plan with faults of an endpoint is for a run that asks one (try: --policy chat)")
        self.plan = plan
        self.out = out
        self.exit_code = 0
        self.resumed = 0
        self.gave_up = 0  # clients that ended in an error before the run was done
        self.has_hung = False
        self._arguments = list(arguments)
        self._images, self._template, self._base_url = images, template, base_url
        self._wall_s_max = wall_s_max
        self._quiet = quiet
        self._told = told
        self._client: asyncio.subprocess.Process | None = None
        self._killed = asyncio.Event()
        self._back = asyncio.Event()

    async def run(self, truth: Truth) -> FaultTable:
        """Carry it out, and judge what became of it.

        Raises:
            InvalidSpec: The folder holds a run already.
            RequirementMissing: The host lacks something that a fault needs.
        """
        # As an interrupt, so that all is undone.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
        self.out.mkdir(parents=True, exist_ok=True)
        if (self.out / RUN).exists() or (self.out / FILE).exists():
            raise InvalidSpec(f"{self.out} holds a run already; faults are for a new one")
        with EventFile(self.out / FILE) as events:
            async with grounds.opened(self.plan, self._images, self._template, self._base_url) as ground:
                injector = Injector(ground, self.plan, events, self._kill_client, self._count_over, self._told)
                started = time.monotonic()
                await self._carry_out(ground, injector)
                wall_s = time.monotonic() - started
            # A client that refused to begin has said why, and left no results.
            records = read_rollouts(self.out) if (self.out / ROLLOUTS).exists() else []
            return judge(
                records,
                events.events,
                truth,
                seed=self.plan.seed,
                resumed=self.resumed,
                wall_s=wall_s,
                left=ground.left,
            )

    async def _carry_out(self, ground: Ground, injector: Injector) -> None:
        injecting = asyncio.create_task(self._inject(injector))
        driving = asyncio.create_task(self._drive(ground))
        try:
            async with asyncio.timeout(self._wall_s_max):
                await asyncio.wait((injecting, driving), return_when=asyncio.FIRST_COMPLETED)
                if not driving.done() and injecting.exception() is None:  # a plan with an end
                    await driving
        except TimeoutError:
            self.has_hung = True
        finally:
            for task in (injecting, driving):
                task.cancel()
            ended = await asyncio.gather(injecting, driving, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error.exceptions[0] if isinstance(error, ExceptionGroup) else error

    def _count_over(self) -> int:
        """Rollouts that are over."""
        try:
            return (self.out / ROLLOUTS).read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    async def _inject(self, injector: Injector) -> None:
        """From the first rollout's opening on: a client that does not even begin shows nothing."""
        while True:
            if await asyncio.to_thread(_has_files, self.out / FOLDER):
                return await injector.run()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _drive(self, ground: Ground) -> None:
        """Run clients, one after the other, until one has done the run, or none gets on."""
        while True:
            self._killed.clear()
            place = "--resume" if (self.out / RUN).exists() else "--out"
            await self._start([*self._arguments, f"{place}={self.out}", f"--url={ground.url}", *self._endpoint(ground)])
            assert self._client is not None
            try:
                code = await self._client.wait()
            finally:
                await self._end_client()
            if self._killed.is_set():
                await self._back.wait()
                self._back.clear()
            elif code in _FOR_GOOD or (self.out / SUMMARY).exists() or self.gave_up == GIVE_UPS_MAX:
                self.exit_code = code
                return
            else:  # as a job's scheduler does with one that ended before it was done
                self.gave_up += 1
                await asyncio.sleep(COME_AGAIN_S)
            self.resumed += 1

    def _endpoint(self, ground: Ground) -> list[str]:
        url = ground.endpoint.url if ground.endpoint is not None else self._base_url
        return [] if url is None else [f"--base-url={url}"]

    async def _start(self, words: Sequence[str]) -> None:
        log = (self.out / LOG).open("ab") if self._quiet else None
        # It ends with this process, even if that is killed.
        guard = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "barchan.cli", "rollout"]
        try:
            self._client = await asyncio.create_subprocess_exec(
                *guard, *words, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        finally:
            if log is not None:
                log.close()

    async def _kill_client(self, for_s: float) -> str:
        client = self._client
        if client is None or client.returncode is not None or self._killed.is_set():
            return ""
        self._killed.set()
        client.kill()
        try:
            await asyncio.sleep(for_s)
        finally:
            self._back.set()
        return f"client {client.pid}"

    async def _end_client(self) -> None:
        """In order first, so that it can say what it has; then not."""
        client = self._client
        if client is None or client.returncode is not None:
            return
        with suppress(ProcessLookupError):
            client.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_S):
                await asyncio.shield(client.wait())
        except TimeoutError:
            client.kill()
            await client.wait()


def _has_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
