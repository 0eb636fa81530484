"""How fast copies of machines answer, and what each takes of the host's memory, by what it takes it for.

    sudo python -m bench.machines --backend microvm --count 8
    sudo python -m bench.machines --backend vm --count 4

A copy is told until the node has its guest's first reply (`create` returns), and until `true` has run in it. Memory is
proportional, of all processes of a copy, with `count` of them alive.
"""

import argparse
import asyncio
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import barchan
from barchan.backends.container.outer_ids import outer_id
from barchan.bench.statistics import Percentiles
from barchan.sdk.endpoint import default_state_dir
from bench.state_common import mib, ms, pids_of, say, table
from scripts.own_node import OwnNode

IMAGES = {"microvm": "debian", "vm": "debian-disk"}
MEMORY_MIB = {"microvm": 128, "vm": 512}
SLOTS_S = 4.0  # for a slot to be filled again
PROGRAMS = {"fresh": "", "after true": "true", "after Python": "python3 -c pass", "2 s later": "sleep 2"}
_HEAD = re.compile(r"[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ (\d+) *(.*)")


def kinds(pids: Sequence[int]) -> Counter[str]:
    """Proportional bytes of processes: the guest's memory, code that QEMU has translated, and the rest."""
    found: Counter[str] = Counter()
    for pid in pids:
        kind = "rest"
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            head = _HEAD.match(line)
            if head is not None:
                modes, _, path = head.groups()
                is_guest = path.endswith("/ram") or "memory-backend" in path
                kind = "guest" if is_guest else "code" if modes.startswith("rwx") else "rest"
            elif line.startswith("Pss:"):
                found[kind] += int(line.split()[1]) << 10
                found["all"] += int(line.split()[1]) << 10
    return found


class Bench:
    def __init__(self, own: OwnNode, client: barchan.AsyncClient, backend: str, count: int) -> None:
        self._own = own
        self._client = client
        self._backend = backend
        self._count = count
        self._rows: list[list[str]] = []

    async def _create(self, template: str | barchan.AsyncSnapshot) -> barchan.AsyncSandbox:
        waiting = barchan.Waiting(pause=False, page_out=False, hibernate=False)
        memory_mib = MEMORY_MIB[self._backend]
        return await self._client.create(template, backend=self._backend, memory_mib=memory_mib, waiting=waiting)

    async def _timed(self, what: str, template: Callable[[], str | barchan.AsyncSnapshot], between_s: float) -> None:
        replies, programs = [], []
        for _ in range(self._count):
            await asyncio.sleep(between_s)
            began = time.monotonic()
            sandbox = await self._create(template())
            replies.append((time.monotonic() - began) * 1e3)
            try:
                (await sandbox.exec(["true"])).check()
                programs.append((time.monotonic() - began) * 1e3)
            finally:
                await sandbox.kill()
        for until, samples in (("first reply", replies), ("`true`", programs)):
            found = Percentiles.of(samples)
            self._rows.append([f"{what} to {until}", ms(found.p50), ms(found.p95)])

    async def run(self) -> None:
        image = IMAGES[self._backend]
        say("the first boot")
        began = time.monotonic()
        await (await self._create(image)).kill()
        self._rows.append(["first boot", ms((time.monotonic() - began) * 1e3), ""])
        say("copies from slots")
        await self._timed("copy from a slot", lambda: image, SLOTS_S)
        await self._client.set_pool(0)
        say("copies without")
        await self._timed("copy", lambda: image, 0.0)
        say("copies of a snapshot")
        async with await self._create(image) as sandbox:
            await sandbox.start(["python3", "-c", "import json, time; time.sleep(1e6)"])
            await asyncio.sleep(SLOTS_S)
            snapshot = await sandbox.snapshot(kind="memory")
        try:
            await self._timed("restore", lambda: snapshot, 0.0)
        finally:
            await snapshot.remove()
        print(table(f"{self._backend}, ms", ("what", "p50", "p95"), self._rows))
        await self._memory(image)

    async def _memory(self, image: str) -> None:
        say(f"{self._count} at once")
        made = [await self._create(image) for _ in range(self._count)]
        rows = []
        try:
            for what, program in PROGRAMS.items():
                if program:
                    await asyncio.gather(*(sandbox.exec(program) for sandbox in made))
                found: Counter[str] = Counter()
                for sandbox in made:
                    ids = (sandbox.id, outer_id(sandbox.id, self._backend))
                    found += kinds(sorted({pid for name in ids for pid in pids_of(self._own.cgroup, name)}))
                rows.append([what, *(mib(found[kind] // self._count) for kind in ("all", "guest", "code", "rest"))])
        finally:
            await asyncio.gather(*(sandbox.kill() for sandbox in made))
        columns = ("when", "all", "guest's memory", "translated code", "rest")
        print(table(f"{self._backend}, MiB each of {self._count}", columns, rows))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=sorted(IMAGES), required=True)
    parser.add_argument("--count", type=int, default=8)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="barchan-bench-", dir="/var/tmp") as name:
        state_dir = Path(name)
        (state_dir / "images").symlink_to(default_state_dir() / "images")
        own = OwnNode(state_dir, ())
        try:
            async with barchan.connect_async(state_dir=own.state_dir) as client:
                await Bench(own, client, given.backend, given.count).run()
        finally:
            if own.process.poll() is None:
                own.shut_down()
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    asyncio.run(main())
