"""Limits: reaching one harms the guest alone, is told with evidence, and the platform still gets through."""

import asyncio
import time

from barchan.errors import InvalidSpec
from barchan.sdk.aio.process import AsyncProcess
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.testing.check import check
from barchan.testing.expect import equal, holds, present, raises, until
from barchan.testing.lab import MIB, Lab, said_until, text

# All processes there may be, then all memory: prints `full` when nothing of either is left, and keeps it.
FILL = """
import os, sys, time
MIB = 1 << 20
def keep():
    while True:
        time.sleep(600)
children = []
while True:
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        keep()
    children.append(pid)
print("crowded", flush=True)
sys.stdin.readline()
os.kill(children[-1], 9)
os.waitpid(children[-1], 0)
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    blocks = []
    while True:
        blocks.append(b"x" * MIB)
        os.write(writer, b".")
os.close(writer)
os.waitpid(pid, 0)
got = len(os.read(reader, 1 << 16))
reader, writer = os.pipe()
if os.fork() == 0:
    blocks = [b"x" * MIB for _ in range(got - 2)]
    os.write(writer, b".")
    keep()
os.read(reader, 1)
print("full", flush=True)
keep()
"""
FORKS = """
import os, time
count = 0
while count < 400:
    try:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    except OSError:
        break
    count += 1
print(count, flush=True)
"""
OPENS = """
import os
count = 0
try:
    while count < 100000:
        os.open("/dev/null", os.O_RDONLY)
        count += 1
except OSError as error:
    print(count, error.errno)
"""
FULL_TRIES = 3
DISK_MIB = 64


def eat(mib: int) -> list[str]:
    """Piece by piece: all of it at once a kernel may refuse that sees that it has not so much."""
    return ["python3", "-c", f"x = [b'x' * (1 << 20) for _ in range({mib})]; print(len(x) << 20)"]


@check()
async def memory_beyond_the_limit_kills_in_the_guest_with_evidence(lab: Lab) -> None:
    """The program dies and the kernel's counter shows why; the sandbox and its neighbour go on."""
    limit_mib = lab.profile.memory_mib
    sandbox, neighbour = await lab.create(), await lab.create()
    bystander = await neighbour.start(["sleep", "300"])
    result = await sandbox.exec(eat(2 * limit_mib + 64), timeout_s=lab.s(60))
    equal((result.exit_code, result.signal, result.oom_killed), (137, 9, True))
    holds((await sandbox.stats()).oom_kills >= 1, "the kernel has counted it")
    equal(await text(sandbox, "echo on"), "on\n")
    equal((await neighbour.stats()).oom_kills, 0, "the neighbour's kills")
    holds((await bystander.info()).running, "the neighbour's program runs on")


@check()
async def a_kill_of_ones_own_is_no_evidence(lab: Lab) -> None:
    """A program that dies by SIGKILL otherwise did not run out of memory, whatever it says."""
    sandbox = await lab.create()
    result = await sandbox.exec("echo Out of memory >&2; kill -KILL $$")
    equal((result.exit_code, result.oom_killed, result.timed_out), (137, False, False))
    equal((await sandbox.stats()).oom_kills, 0)


@check()
async def half_of_the_memory_can_be_had(lab: Lab) -> None:
    """The limit is the guest's own: what the platform needs for itself does not come out of it."""
    sandbox = await lab.create()
    half = lab.profile.memory_mib // 2
    equal(await text(sandbox, eat(half)), f"{half * MIB}\n")


@check()
async def processes_end_at_their_limit(lab: Lab) -> None:
    """A guest that forks without end gets no more than it may have, and can use the sandbox again afterwards."""
    sandbox = await lab.create(pids_max=40)
    process = await sandbox.start(["python3", "-c", FORKS])
    count = int(await said_until(process, b"\n", quiet_s=lab.s(60)))
    holds(10 <= count < 40, f"there were no more than the limit: {count}")
    await process.kill()
    equal(await text(sandbox, "/bin/true; /bin/true; echo on"), "on\n")


@check()
async def a_fork_bomb_stays_where_it_is(lab: Lab) -> None:
    """It ends with its time, the neighbour answers meanwhile, and nothing of it is left."""
    sandbox, neighbour = await lab.create(pids_max=64), await lab.create()
    bomb = await sandbox.start("b() { b | b & }; b; sleep 300", timeout_s=lab.s(3))
    for _ in range(5):
        equal(await text(neighbour, "echo on", timeout_s=lab.s(20)), "on\n")
    ended = await bomb.wait(lab.s(60))
    holds(ended.timed_out, "the bomb had its time")

    async def answers() -> bool:
        return (await sandbox.exec("/bin/true; /bin/true; /bin/true", timeout_s=lab.s(20))).ok

    await until(answers, "the sandbox can be used again", lab.s(20))


@check()
async def files_end_at_the_size_of_the_disk(lab: Lab) -> None:
    """With an error of the guest's kernel, and no kill; what is removed can be had again."""
    sandbox = await lab.create(disk_mib=DISK_MIB, user="root")
    room_mib = DISK_MIB + lab.profile.disk_spare_mib
    full = await sandbox.exec(f"head -c {4 * room_mib}M /dev/zero > /var/big", timeout_s=lab.s(60))
    holds(full.exit_code not in (0, 137), f"the program saw an error: {full.exit_code}")
    holds(b"No space" in full.stderr or b"uota" in full.stderr, f"it was told why: {full.error_text[-200:]}")
    written = (await sandbox.files.stat("/var/big")).size
    holds(DISK_MIB * MIB // 2 < written <= (room_mib + 1) * MIB, f"it got what it may have: {written} bytes")
    equal((await sandbox.stats()).oom_kills, 0)
    await text(sandbox, "rm /var/big; head -c 16M /dev/zero > /var/again; rm /var/again")
    equal(await text(sandbox, "echo on"), "on\n")


@check()
async def many_small_files_end_at_the_size_of_the_disk(lab: Lab) -> None:
    """What a file system keeps beside its data counts, too; and memory is not used up instead."""
    sandbox = await lab.create(disk_mib=32, user="root")
    room_mib = 32 + lab.profile.disk_spare_mib
    source = f"""
import os
written, problem = 0, 0
os.mkdir("/var/small")
while written < {3 * room_mib} << 20:
    try:
        if written % 1800000 == 0:
            place = "/var/small/" + str(written)
            os.mkdir(place)
        with open(place + "/" + str(written), "wb", buffering=0) as file:
            file.write(bytes(1800))
    except OSError as error:
        problem = error.errno
        break
    written += 1800
print(written, problem)
"""
    written, problem = (await text(sandbox, ["python3", "-c", source], timeout_s=lab.s(80))).split()
    holds(int(problem) in (28, 122), f"the disk is full: errno {problem}")
    holds(MIB < int(written) <= (room_mib + 1) * MIB, f"it got what it may have: {written} bytes")
    equal((await sandbox.stats()).oom_kills, 0)


@check()
async def shared_memory_is_bounded(lab: Lab) -> None:
    """Filling /dev/shm ends with an error or a kill in the guest; the sandbox goes on."""
    sandbox = await lab.create()
    result = await sandbox.exec(f"head -c {2 * lab.profile.memory_mib + 64}M /dev/zero > /dev/shm/big", user="root")
    holds(not result.ok, "it could not all be written")
    await text(sandbox, "rm -f /dev/shm/big; echo on", user="root")


@check()
async def processor_time_is_bounded(lab: Lab) -> None:
    """A quarter of a processor is no more, whatever runs."""
    sandbox = await lab.create(cpus=0.25)
    await text(sandbox, "true")
    before, began = (await sandbox.stats()).cpu_s, time.monotonic()
    await sandbox.exec("while :; do :; done & while :; do :; done", timeout_s=3)
    used_s, took_s = (await sandbox.stats()).cpu_s - before, time.monotonic() - began
    holds(used_s > 0, "it was counted")
    holds(used_s <= 0.25 * took_s + 0.5, f"{used_s:.2f} s of {took_s:.2f} s are a quarter")


@check()
async def descriptors_end_at_the_limit_asked_for(lab: Lab) -> None:
    """The program gets EMFILE; the next one has descriptors again."""
    sandbox = await lab.common()
    count, problem = (await text(sandbox, ["python3", "-c", OPENS], rlimits={"nofile": (100, 100)})).split()
    equal(problem, "24")
    holds(50 < int(count) < 100, f"it got what it may have: {count}")
    holds(await text(sandbox, "ulimit -n") != "100\n", "the next program has its usual limit")


@check()
async def output_without_end_is_bounded(lab: Lab) -> None:
    """An exec's is cut, a start's drops what is old; neither costs the sandbox memory or disk."""
    sandbox = await lab.create(disk_mib=32)
    result = await sandbox.exec(["yes"], timeout_s=2, max_output_bytes=10_000)
    equal((result.timed_out, result.truncated), (True, True))
    holds(len(result.stdout) <= 10_000 < MIB < result.stdout_bytes, f"it wrote {result.stdout_bytes} bytes")
    process = await sandbox.start(["yes"], timeout_s=2, spool_bytes=MIB)
    holds((await process.wait(lab.s(30))).timed_out, "it had its time")
    kept = sum([len(data) async for _, _, data in process.output(follow=False)])
    holds(0 < kept <= 2 * MIB, f"no more is kept than the spool holds: {kept}")
    equal((await sandbox.stats()).oom_kills, 0)


async def exhausted(lab: Lab) -> tuple[AsyncSandbox, AsyncProcess] | None:
    """A guest with its memory and processes used up, and by what. None: the memory's limit has killed that."""
    sandbox = await lab.create(pids_max=40)
    hog = await sandbox.start(["python3", "-c", FILL], user="root")
    said = await said_until(hog, b"crowded\n", quiet_s=lab.s(60))
    # Another user's, and no single one: a kernel that counts the dead for a moment may have room for one or two.
    more = await sandbox.exec(["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do sleep 1 & done; wait"], timeout_s=lab.s(20))
    holds(not more.ok, "the guest can start nothing any more")
    await hog.write_stdin("\n")
    filled = asyncio.create_task(said_until(hog, b"full\n", at=len(said), quiet_s=lab.s(60)))
    killed = asyncio.create_task(hog.wait(lab.s(60)))
    try:
        await asyncio.wait({filled, killed}, return_when=asyncio.FIRST_COMPLETED)
        if killed.done() and not filled.done():
            equal((await killed).oom_killed, True, "what ends it is the memory's limit")
            await sandbox.kill()
            return None
        await filled
    finally:
        filled.cancel()
        killed.cancel()
        await asyncio.gather(filled, killed, return_exceptions=True)
    return sandbox, hog


@check()
async def the_platform_gets_through_to_an_exhausted_guest(lab: Lab) -> None:
    """With its memory and processes used up: files are read and written, platform programs run, and a kill kills."""
    for _ in range(FULL_TRIES):
        if (full := await exhausted(lab)) is not None:
            break
    sandbox, hog = present(full, "guest whose memory's limit spares what fills it")
    answer_s = lab.s(10)
    holds(await sandbox.files.read("/etc/passwd", timeout_s=answer_s), "a file is read")
    await sandbox.files.write("/tmp/written", b"x", timeout_s=answer_s)
    (await sandbox.exec(["/bin/true"], platform=True, timeout_s=answer_s)).check()
    holds(await hog.kill() > 1, "the kill reached them")

    async def answers() -> bool:
        return (await sandbox.exec("/bin/true; /bin/true", timeout_s=answer_s)).ok

    await until(answers, "the sandbox can be used again", lab.s(20))


@check()
async def what_a_sandbox_takes_is_told(lab: Lab) -> None:
    """Memory, processes and CPU time, as the host or the guest's kernel counts them: they rise with use."""
    sandbox = await lab.create()
    before = await sandbox.stats()
    await sandbox.start(["python3", "-c", "import time; x = b'x' * (16 << 20); time.sleep(300)"])
    for _ in range(2):
        await sandbox.start(["sleep", "300"])
    await sandbox.exec("i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done")
    after = await sandbox.stats()
    holds(after.pids >= 3, f"processes are counted: {after.pids}")
    holds(after.memory_bytes > before.memory_bytes, f"memory is counted: {before}, {after}")
    holds(after.cpu_s > before.cpu_s, "CPU time is counted")
    holds(after.memory_peak_bytes >= after.memory_bytes // 2, f"the peak is counted: {after}")


@check()
async def what_can_never_fit_is_refused(lab: Lab) -> None:
    """More memory or processors than the host has: at once, and as the caller's fault."""
    await asyncio.gather(
        raises(InvalidSpec, lab.create(memory_mib=1 << 20)), raises(InvalidSpec, lab.create(cpus=1000.0))
    )
