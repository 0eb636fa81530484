"""Waiting and copies: pause, page-out, hibernation, snapshots, forks; with right clocks, and randomness apart."""

import asyncio
import time

from barchan.errors import NotFound
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.testing.check import check
from barchan.testing.expect import equal, holds, raises, until
from barchan.testing.lab import CREATE_S, Lab, Talker, made, text

CLOCK_S = 2.0  # a clock that is set once, from outside, over a connection
DRAW = "head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n'; echo"


async def clock_is_right(lab: Lab, sandbox: AsyncSandbox) -> None:
    """The guest's wall clock is the host's."""
    before = time.time()
    said = float(await text(sandbox, "date +%s.%N"))
    after = time.time()
    slack_s = CLOCK_S * lab.profile.patience
    holds(before - slack_s <= said <= after + slack_s, f"its clock is right: {said - before:+.2f} s")


@check()
async def the_clock_of_a_new_sandbox_is_right(lab: Lab) -> None:
    """However long ago that was prepared which it is made of."""
    await clock_is_right(lab, await lab.create())


@check()
async def a_paused_sandbox_stands_still_until_it_is_asked(lab: Lab) -> None:
    """Its programs make no step and use no time; looking at it wakes nothing; then they go on with what they had."""
    sandbox = await lab.create()
    talker = await Talker.start(sandbox)
    equal(await talker.ask("x=41; echo $x"), "41")
    await sandbox.start("while :; do echo x >> /tmp/steps; sleep 0.05; done")

    async def has_begun() -> bool:
        return await sandbox.files.exists("/tmp/steps")

    await until(has_begun, "it writes", lab.s(20))
    info = await sandbox.pause()
    equal((info.phase, info.tier), ("paused", "paused"))
    began = time.monotonic()
    await asyncio.sleep(1.5)
    equal((await sandbox.info()).phase, "paused")
    equal([item.phase for item in await lab.client.list() if item.sandbox_id == sandbox.id], ["paused"])
    slept_s = time.monotonic() - began
    equal(await talker.ask("x=$((x + 1)); echo $x"), "42")
    steps = int(await text(sandbox, "wc -l < /tmp/steps"))
    equal((await sandbox.info()).phase, "ready")
    holds(steps < 20 * (slept_s + lab.s(30)), "it did not run on")
    before, after = (await text(sandbox, "wc -l < /tmp/steps; sleep 0.5; wc -l < /tmp/steps")).split()
    holds(int(after) > int(before), "it goes on")
    await clock_is_right(lab, sandbox)


@check()
async def whatever_is_asked_wakes_a_paused_sandbox(lab: Lab) -> None:
    """Files, output, input, signals and counters are served as if it had never slept."""
    sandbox = await lab.create()
    await sandbox.files.write("/tmp/a", b"one")
    talker = await Talker.start(sandbox)
    equal(await talker.ask("echo up"), "up")
    await sandbox.pause()
    equal(await sandbox.files.read("/tmp/a"), b"one")
    await sandbox.pause()
    await sandbox.files.write("/tmp/a", b"two")
    await sandbox.pause()
    equal(await talker.ask("cat /tmp/a; echo"), "two")
    await sandbox.pause()
    equal(await talker.process.signal("CONT", scope="process"), 1)
    await sandbox.pause()
    holds((await sandbox.stats()).memory_bytes > 0, "it has counters")
    for _ in range(3):
        await sandbox.pause()
        results = await asyncio.gather(*(sandbox.exec(["echo", str(number)]) for number in range(20)))
        equal([result.text for result in results], [f"{number}\n" for number in range(20)])


@check()
async def deadlines_stand_still_while_it_is_paused(lab: Lab) -> None:
    """A program that was paused for longer than it may take has all of its time."""
    sandbox = await lab.create()
    limit_s = lab.s(2)
    waiting = lab.spawn(sandbox.exec("sleep 1; echo whole", timeout_s=limit_s))

    async def runs() -> bool:
        return any(info.running for info in await sandbox.processes())

    await until(runs, "it runs", lab.s(20))
    await sandbox.pause()
    await asyncio.sleep(limit_s + 0.5)
    holds(not waiting.done(), "it stands still")
    await sandbox.resume()
    result = await waiting
    equal((result.timed_out, result.text), (False, "whole\n"))


@check()
async def a_paged_out_sandbox_comes_back_whole(lab: Lab) -> None:
    """Where the host has swap its memory goes there; where it has none, that is told. Every byte comes back."""
    sandbox = await lab.create()
    source = "import sys\nheap = bytes(range(256)) * 65536\nfor line in sys.stdin: print(sum(heap[::257]), flush=True)"
    process = await sandbox.start(["python3", "-u", "-c", source])
    talker = Talker(process)
    first = await talker.ask("")
    info = await sandbox.page_out()
    equal(info.phase, "paused")
    holds(info.tier == "paged_out" or info.stays_paused, f"it is paged out, or says why not: {info}")
    equal(await talker.ask(""), first)
    equal((await sandbox.info()).phase, "ready")


@check("memory")
async def a_hibernated_sandbox_comes_back_as_it_was(lab: Lab) -> None:
    """Variables, files, a terminal's program and offsets of output, again and again; meanwhile it takes no memory."""
    sandbox = await lab.create()
    talker = await Talker.start(sandbox)
    equal(await talker.ask("x=0; cd /tmp; pwd"), "/tmp")
    for turn in range(1, 3):
        await sandbox.files.write(f"/tmp/file-{turn}", str(turn))
        info = await sandbox.hibernate()
        equal((info.phase, info.tier, info.stays_paused), ("hibernated", "hibernated", ""))
        equal(await asyncio.to_thread(lab.node.watch.sandbox_pids, sandbox.id), [], "its processes on the host")
        equal(await talker.ask("x=$((x + 1)); echo $x $(cat file-*) $(pwd)"), f"{turn} {'12'[:turn]} /tmp")
        equal((await sandbox.info()).phase, "ready")
        await clock_is_right(lab, sandbox)
    await sandbox.hibernate()
    holds(await sandbox.kill(), "it was killed on disk")
    await lab.nothing_remains(sandbox.id)


@check("memory")
async def a_program_outlasts_hibernation_with_its_deadline(lab: Lab) -> None:
    """Whoever waits for it waits on, and its time goes on when the sandbox does."""
    sandbox = await lab.create()
    limit_s = lab.s(2.5)
    waiting = lab.spawn(sandbox.exec("sleep 1; echo whole; exit 3", timeout_s=limit_s))

    async def runs() -> bool:
        return any(info.running for info in await sandbox.processes())

    await until(runs, "it runs", lab.s(20))
    await sandbox.hibernate()
    await asyncio.sleep(limit_s)
    holds(not waiting.done(), "it waits")
    await sandbox.resume()
    result = await waiting
    equal((result.exit_code, result.timed_out, result.text), (3, False, "whole\n"))


@check("fork")
async def a_snapshot_keeps_files(lab: Lab) -> None:
    """As they were at one moment, without the programs; what comes later is not in it, and any number start from it."""
    sandbox = await lab.create(user="root")
    # /opt, for a machine's system sets the mode of some others, /srv among them, whenever it boots.
    await text(
        sandbox, "echo kept > /srv/kept; rm /etc/motd 2>/dev/null; chmod 751 /opt; mkdir /srv/dir; ln -s kept /srv/link"
    )
    await sandbox.start(["sleep", "4242"])
    snapshot = await sandbox.snapshot(metadata={"step": "1"})
    await text(sandbox, "echo later > /srv/kept")
    equal((snapshot.kind, snapshot.metadata), ("fs", {"step": "1"}))
    copies = [
        await lab.client.create(snapshot, timeout_s=lab.s(CREATE_S), **lab.options(user="root")) for _ in range(2)
    ]
    for copy in copies:
        equal(
            await text(copy, "cat /srv/link; stat -c %a /opt; ls /etc/motd 2>/dev/null; ls /srv | wc -l"),
            "kept\n751\n3\n",
        )
        equal((await copy.exec("grep -las '424[2]' /proc/[0-9]*/cmdline")).stdout, b"", "programs")
        await text(copy, "echo own > /srv/kept")
    equal(await text(sandbox, "cat /srv/kept"), "later\n")
    await snapshot.remove()
    equal(await text(copies[1], "cat /srv/kept"), "own\n")
    await raises(NotFound, lab.client.snapshot(snapshot.id))


@check("memory")
async def a_snapshot_keeps_programs(lab: Lab) -> None:
    """With their memory; sandboxes of it go on from there, each on its own, with the right clock and own randomness."""
    sandbox = await lab.create()
    talker = await Talker.start(sandbox)
    equal(await talker.ask("x=41; echo x > /tmp/f; echo $x"), "41")
    snapshot = await sandbox.snapshot(kind="memory")
    await sandbox.kill()
    drawn = set()
    for _ in range(2):
        copy = await lab.client.create(snapshot, timeout_s=lab.s(CREATE_S))
        again = talker.of(copy)
        equal(await again.ask("x=$((x + 1)); echo $x $(cat /tmp/f)"), "42 x")
        await clock_is_right(lab, copy)
        drawn.add(await text(copy, DRAW))
    equal(len(drawn), 2, "different random numbers")
    await snapshot.remove()


@check("fork")
async def forks_start_with_the_files_and_go_their_own_ways(lab: Lab) -> None:
    """Each child has what was there, and what it writes is its own; so is its randomness, and the parent goes on."""
    sandbox = await lab.create(user="root", env={"A": "a"})
    await text(sandbox, "echo kept > /srv/kept; rm -rf /usr/share/doc; mkdir /usr/share/doc")
    beat = await sandbox.start("while :; do echo x >> /tmp/beat; sleep 0.05; done")
    children = made(await sandbox.fork(3, env={"B": "b"}, timeout_s=lab.s(CREATE_S)))
    drawn = set()
    for number, child in enumerate(children):
        equal(await text(child, 'cat /srv/kept; ls /usr/share/doc | wc -l; echo "$A$B"'), "kept\n0\nab\n")
        await text(child, f"echo {number} > /srv/kept; echo x > /srv/own-{number}")
        drawn.add(await text(child, DRAW))
        await clock_is_right(lab, child)
    equal([await text(child, "cat /srv/kept; ls /srv | wc -l") for child in children], ["0\n2\n", "1\n2\n", "2\n2\n"])
    equal(await text(sandbox, "cat /srv/kept; ls /srv | wc -l"), "kept\n1\n")
    equal(len(drawn), 3, "different random numbers")
    holds((await beat.info()).running, "the parent goes on")
    await sandbox.kill()
    (grandchild,) = made(await children[0].fork(timeout_s=lab.s(CREATE_S)))
    equal(await text(grandchild, "cat /srv/kept; ls /srv/own-0"), "0\n/srv/own-0\n")


@check("memory")
async def forks_go_on_with_the_programs(lab: Lab) -> None:
    """Each child has the parent's programs, with variables, files and offsets; name and randomness are its own."""
    sandbox = await lab.create()
    talker = await Talker.start(sandbox)
    equal(await talker.ask("x=41; exec 5> /tmp/open; echo $x"), "41")
    children = made(await sandbox.fork(3, kind="memory", timeout_s=lab.s(CREATE_S)))
    drawn, names = set(), set()
    again = talker
    for number, child in enumerate(children):
        again = talker.of(child)
        equal(await again.ask(f"x=$((x + {number})); echo $x; echo {number} >&5"), str(41 + number))
        equal(await text(child, "cat /tmp/open"), f"{number}\n")
        names.add(await text(child, ["uname", "-n"]))
        drawn.add(await text(child, DRAW))
        await clock_is_right(lab, child)
    equal((len(names), len(drawn)), (3, 3), "different names and random numbers")
    equal(await talker.ask("echo $x $(cat /tmp/open | wc -c)"), "41 0")
    (grandchild,) = made(await children[2].fork(kind="memory", timeout_s=lab.s(CREATE_S)))
    await children[2].kill()
    equal(await again.of(grandchild).ask("x=$((x * 2)); echo $x"), "86")


@check("memory")
async def what_runs_goes_on_in_parent_and_children(lab: Lab) -> None:
    """An exec that somebody waits for ends in each of them as it would have, with all of its output."""
    sandbox = await lab.create()
    source = "for i in 1 2 3 4 5 6; do echo $i; sleep 0.3; done; exit 3"
    waiting = lab.spawn(sandbox.exec(source, process_id="loop", timeout_s=lab.s(60)))

    async def runs() -> bool:
        return any(info.running for info in await sandbox.processes())

    await until(runs, "it runs", lab.s(20))
    children = made(await sandbox.fork(2, kind="memory", timeout_s=lab.s(CREATE_S)))
    for owner in (sandbox, *children):
        process = owner.process("loop")
        equal((await process.wait(lab.s(60))).exit_code, 3)
        said = b"".join([data async for stream, _, data in process.output() if stream == "stdout"])
        equal(said.split(), [b"1", b"2", b"3", b"4", b"5", b"6"])
    equal((await waiting).exit_code, 3)
