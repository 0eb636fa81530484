"""Output: every byte once, at its offset, and bounded; input: every byte once, and no more than is read."""

import asyncio
import hashlib
import random

from barchan.errors import ReadTimeout
from barchan.sdk.aio.process import AsyncProcess
from barchan.testing.check import check
from barchan.testing.expect import equal, holds, raises
from barchan.testing.lab import MIB, Lab, collected, said_until, text


def counted(count: int) -> bytes:
    """What `seq COUNT` writes."""
    return b"".join(b"%d\n" % number for number in range(1, count + 1))


def some_bytes(size: int) -> bytes:
    """Bytes of every value, the same each time."""
    return random.Random(size).randbytes(size)


@check()
async def both_streams_are_kept_apart(lab: Lab) -> None:
    """What goes to stderr is not in stdout; merged, both are in the order in which they were written."""
    sandbox = await lab.common()
    source = "echo a; echo b >&2; echo c"
    apart, merged = await sandbox.exec(source), await sandbox.exec(source, merge_stderr=True)
    equal((apart.stdout, apart.stderr), (b"a\nc\n", b"b\n"))
    equal((merged.stdout, merged.stderr), (b"a\nb\nc\n", b""))


@check()
async def bytes_that_are_no_text_arrive(lab: Lab) -> None:
    """Every value of a byte, in both directions."""
    sandbox = await lab.common()
    data = bytes(range(256)) * 16
    equal((await sandbox.exec(["cat"], stdin=data)).stdout, data)


@check()
async def large_output_arrives_whole(lab: Lab) -> None:
    """Megabytes on both streams at once, with nothing cut."""
    sandbox = await lab.common()
    result = await sandbox.exec("seq 400000 & seq 200000 >&2; wait", max_output_bytes=8 * MIB, timeout_s=lab.s(60))
    equal(hashlib.sha256(result.stdout).digest(), hashlib.sha256(counted(400_000)).digest(), "stdout")
    equal(hashlib.sha256(result.stderr).digest(), hashlib.sha256(counted(200_000)).digest(), "stderr")
    equal((result.truncated, result.stdout_bytes), (False, len(counted(400_000))))


@check()
async def output_beyond_its_bound_is_cut_in_the_middle(lab: Lab) -> None:
    """Head and tail are kept, half each, and it is told how much there was."""
    sandbox = await lab.common()
    whole = counted(200_000)
    result = await sandbox.exec(["seq", "200000"], max_output_bytes=1000)
    equal((result.truncated, len(result.stdout), result.stdout_bytes), (True, 1000, len(whole)))
    holds(whole.startswith(result.stdout[:490]) and whole.endswith(result.stdout[-490:]), "head and tail are kept")


@check()
async def output_is_read_while_the_program_runs(lab: Lab) -> None:
    """What was written comes before the program ends, and what is said to it then is answered."""
    sandbox = await lab.common()
    process = await sandbox.start("echo first; read x; echo got $x; read y; echo $y")
    first = await said_until(process, b"first\n")
    await process.write_stdin("it\n")
    second = await said_until(process, b"got it\n", len(first))
    holds((await process.info()).running, "it still runs")
    await process.write_stdin("end\n")
    equal(await collected(process), first + second + b"end\n")
    equal((await process.wait()).exit_code, 0)


@check()
async def output_can_be_read_from_any_offset_again(lab: Lab) -> None:
    """After its end, too, and by several readers at once: each byte at its place."""
    sandbox = await lab.common()
    whole = counted(20_000)
    process = await sandbox.start(["seq", "20000"])
    readers = await asyncio.gather(*(collected(process) for _ in range(3)))
    equal({hashlib.sha256(said).digest() for said in readers}, {hashlib.sha256(whole).digest()}, "what readers saw")
    equal((await process.wait()).exit_code, 0)
    rest = bytearray()
    async for stream, offset, data in process.output(1000):
        if stream == "stdout":
            equal(offset, 1000 + len(rest), "offset")
            rest += data
    equal(bytes(rest), whole[1000:])


@check()
async def what_nobody_reads_can_hold_the_program_up(lab: Lab) -> None:
    """With `overflow="block"` a small spool loses nothing: the program waits for its reader."""
    sandbox = await lab.common()
    process = await sandbox.start(["seq", "200000"], overflow="block", spool_bytes=64 << 10)
    await asyncio.sleep(1)
    holds((await process.info()).running, "the program waits for a reader")
    equal(hashlib.sha256(await collected(process)).digest(), hashlib.sha256(counted(200_000)).digest())
    equal((await process.wait()).exit_code, 0)


@check()
async def what_nobody_reads_can_be_dropped(lab: Lab) -> None:
    """With `overflow="drop"` the program goes on; the newest bytes are kept, and a jump in the offsets tells of it."""
    sandbox = await lab.common()
    whole = counted(200_000)
    process = await sandbox.start(["seq", "200000"], overflow="drop", spool_bytes=64 << 10)
    equal((await process.wait(lab.s(60))).exit_code, 0)
    pieces = [(offset, data) async for stream, offset, data in process.output() if stream == "stdout"]
    holds(pieces and pieces[0][0] > 0, "the first offset is not 0")
    for offset, data in pieces:
        equal(data, whole[offset : offset + len(data)], f"the bytes at {offset}")
    equal(pieces[-1][0] + len(pieces[-1][1]), len(whole), "the last offset")
    holds(sum(len(data) for _, data in pieces) <= MIB, "no more is kept than the spool holds")


@check()
async def a_background_program_writes_on_after_its_starter(lab: Lab) -> None:
    """The end of the main process is told at once; what it left behind is heard until it ends, too."""
    sandbox = await lab.common()
    process = await sandbox.start("(sleep 1; echo late) & echo early")
    chunks = [
        (chunk.stream, chunk.data if chunk.stream == "stdout" else b"")
        async for chunk in process.chunks(0, 0, follow=True, quiet_timeout_s=lab.s(30))
    ]
    equal([data for stream, data in chunks if stream == "stdout"], [b"early\n", b"late\n"])
    at = [stream for stream, _ in chunks].index("exit")
    holds(at < len(chunks) - 1, "the exit was told before the last output")
    equal((await sandbox.exec("sleep 300 & echo done", timeout_s=lab.s(20))).text, "done\n")


@check()
async def output_of_what_runs_can_be_looked_at(lab: Lab) -> None:
    """Without `follow` there is what there is now, and the call returns."""
    sandbox = await lab.common()
    process = await sandbox.start("echo now; exec sleep 300")
    await said_until(process, b"now\n")
    equal(await collected(process, follow=False), b"now\n")
    holds((await process.info()).running, "it still runs")
    await process.kill()


@check()
async def input_is_given_whole_with_its_end(lab: Lab) -> None:
    """Megabytes with the start; and a start without any finds the end of its input at once."""
    sandbox = await lab.common()
    data = some_bytes(3 * MIB)
    told = await text(sandbox, "sha256sum", stdin=data, timeout_s=lab.s(60))
    equal(told.split()[0], hashlib.sha256(data).hexdigest())
    equal((await sandbox.exec(["cat"], timeout_s=lab.s(20))).stdout, b"")


@check()
async def input_is_written_piece_by_piece(lab: Lab) -> None:
    """In any pieces, until it is closed."""
    sandbox = await lab.common()
    data = some_bytes(2 * MIB + 17)
    process = await sandbox.start("sha256sum")
    for at in range(0, len(data), 700_001):
        await process.write_stdin(data[at : at + 700_001], timeout_s=lab.s(60))
    await process.close_stdin()
    equal((await collected(process)).split()[0].decode(), hashlib.sha256(data).hexdigest())


@check()
async def input_that_nobody_reads_waits(lab: Lab) -> None:
    """The writer is told after its time; neither the program nor the sandbox is harmed, and reading goes on later."""
    sandbox = await lab.common()
    process = await sandbox.start("until [ -e /tmp/read ]; do sleep 0.1; done; exec head -c 10")
    await raises(ReadTimeout, process.write_stdin(bytes(4 * MIB), timeout_s=1))
    equal(await text(sandbox, "echo on"), "on\n")
    holds((await process.info()).running, "it still runs")
    await text(sandbox, "touch /tmp/read")
    equal(await collected(process), bytes(10))
    await _ended(process)
    await text(sandbox, "rm /tmp/read")


async def _ended(process: AsyncProcess) -> None:
    equal((await process.wait()).running, False)
