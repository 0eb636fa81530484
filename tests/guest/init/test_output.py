"""Output: spools, offsets, windows, and followers that come back."""

import contextlib
import hashlib
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.guest.init.driver import BLOCK, FOLLOWED, Connection, Output
from tests.guest.init.guest import Guest

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(90)]

MIB = 1 << 20


def seq(last: int) -> bytes:
    return subprocess.run(["seq", str(last)], capture_output=True, check=True).stdout


def wait_ended(connection: Connection) -> None:
    deadline = time.monotonic() + 20
    while connection.ping()["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_quiet(connection: Connection) -> int:
    """Until the spools do not grow any more; their size."""
    sizes = [-1, connection.ping()["spool_bytes"]]
    while sizes[-1] != sizes[-2]:
        time.sleep(0.1)
        sizes.append(connection.ping()["spool_bytes"])
    return sizes[-1]


@pytest.mark.parametrize("flags", [FOLLOWED | BLOCK, FOLLOWED], ids=["block", "drop"])
def test_50_mib_byte_exact(connection: Connection, flags: int) -> None:
    """50 MiB arrive byte for byte; a follower that acknowledges and keeps up loses nothing, whatever the mode."""
    output = connection.run(["seq", "7000000"], flags=flags, spool_bytes=64 * MIB if flags == FOLLOWED else MIB)
    assert output.gaps == [] and len(output.out) > 50 * MIB
    assert hashlib.sha256(output.out).digest() == hashlib.sha256(seq(7_000_000)).digest()


def test_block_mode_stops_the_writer(connection: Connection) -> None:
    """With nobody reading, a BLOCK process fills its spool and waits; then it loses nothing."""
    handle, _, _ = connection.start("b", ["seq", "300000"], flags=BLOCK, spool_bytes=64 << 10)
    assert wait_quiet(connection) == 64 << 10
    assert connection.ping()["running"] == 1
    state = connection.follow(handle)
    assert (state["stdout_tail"], state["stdout_head"], state["exited"]) == (0, 64 << 10, 0)
    output = connection.wait_exit(handle)
    assert output.gaps == [] and output.out == seq(300_000)


def test_block_mode_exit_counts_what_is_still_in_the_pipe(guest: Guest) -> None:
    """A BLOCK process may end with bytes in its pipe that do not fit the spool: EXIT comes, and counts them."""
    connection = guest.connect(ack=False)
    connection.hello()
    handle, _, _ = connection.start("b", ["seq", "12000"], flags=BLOCK, spool_bytes=16 << 10)
    expected = seq(12_000)
    assert 16 << 10 < len(expected) < (16 << 10) + (64 << 10)
    wait_ended(connection)
    connection.follow(handle)
    output = connection.outputs[handle]
    while not output.exit:
        connection.pump()
    assert output.exit["stdout_end"] == len(expected) and output.position[0] == 16 << 10
    connection.ack = True
    connection.send_ack(handle, 1, output.position[0])
    assert connection.wait_exit(handle).out == expected


def test_drop_mode_keeps_the_newest(connection: Connection) -> None:
    """Without a reader the oldest bytes go; the offsets say which, and the process is never held up."""
    handle, _, _ = connection.start("d", ["seq", "300000"], flags=0, spool_bytes=100_000)
    wait_ended(connection)
    state = connection.follow(handle)
    expected = seq(300_000)
    assert state["stdout_head"] == len(expected) and state["exited"] == 1
    assert state["stdout_head"] - state["stdout_tail"] == 100_000
    output = connection.wait_exit(handle)
    assert output.gaps == [(1, 0, len(expected) - 100_000)]
    assert output.out == expected[-100_000:]


def test_small_spool_keeps_its_promise(connection: Connection) -> None:
    """Spools that never leave memory wrap as files do: at least the asked-for newest bytes stay."""
    handle, _, _ = connection.start("d", ["seq", "20000"], flags=0, spool_bytes=4096)
    wait_ended(connection)
    connection.follow(handle)
    output = connection.wait_exit(handle)
    assert len(output.out) >= 4096 and seq(20_000).endswith(output.out)


def test_window_without_acks(guest: Guest) -> None:
    """At most 1 MiB is pushed beyond the last ACK; EXIT does not wait for ACKs, and one ACK gives the next window."""
    connection = guest.connect(ack=False)
    connection.hello()
    handle, _, _ = connection.start("w", ["seq", "400000"], spool_bytes=8 * MIB)
    output = connection.outputs.setdefault(handle, Output())
    while not output.exit:
        connection.pump()
    connection.ping()
    assert output.position[0] == MIB and output.exit["stdout_end"] == len(seq(400_000))
    connection.send_ack(handle, 1, 1000)
    while output.position[0] < MIB + 1000:
        connection.pump()
    connection.ping()
    assert output.position[0] == MIB + 1000


def test_slow_follower_of_a_drop_spool(guest: Guest) -> None:
    """A follower that falls far behind sees jumps over what is lost, and gets the rest: lost bytes need no ACK."""
    connection = guest.connect(ack=False)
    connection.hello()
    handle, _, _ = connection.start("s", ["seq", "2000000"], spool_bytes=256 << 10)
    wait_ended(connection)
    output = connection.outputs[handle]
    connection.ack = True
    connection.send_ack(handle, 1, output.position[0])
    connection.wait_exit(handle)
    expected = seq(2_000_000)
    assert output.gaps and output.gaps[-1][2] >= len(expected) - (256 << 10)
    assert output.is_part_of(expected)


def test_reconnect_without_losing_a_byte(guest: Guest) -> None:
    """Connections that break in the middle, again and again, cost no byte: the next one goes on from the offset."""
    first = guest.connect()
    first.hello()
    handle, _, _ = first.start("r", ["seq", "1500000"], flags=FOLLOWED | BLOCK, spool_bytes=256 << 10)
    expected, got, connection = seq(1_500_000), bytearray(), first
    for turn in range(1, 6):
        output = connection.outputs.setdefault(handle, Output())
        while len(output.data[0]) < 300_000 * turn:
            connection.pump()
        got += output.data[0]
        assert output.gaps == []
        connection.close()
        connection = guest.connect()
        connection.hello()
        connection.follow(handle, len(got))
    output = connection.wait_exit(handle)
    assert output.gaps == [] and got + output.data[0] == expected


def test_newer_connection_replaces_the_older(guest: Guest) -> None:
    """One host at a time: the older connection is closed, the newer one works."""
    old = guest.connect()
    old.hello()
    new = guest.connect()
    assert new.hello() == (1, 0)
    assert old.socket.recv(1) == b""
    assert new.run(["true"]).code == 0


def test_follow_after_the_end(connection: Connection) -> None:
    """An ended process gives its output from any offset, then EXIT and END, as often as asked."""
    handle, _, _ = connection.start("f", ["sh", "-c", "echo 0123456789; exit 4"], flags=0)
    wait_ended(connection)
    for offset in (0, 4, 11):
        connection.outputs.clear()
        state = connection.follow(handle, offset)
        output = connection.wait_exit(handle)
        assert (output.out, output.code) == (b"0123456789\n"[offset:], 4)
        assert state == {"stdout_tail": 0, "stdout_head": 11, "stderr_tail": 0, "stderr_head": 0, "exited": 1}
        assert output.end == {1: 11, 2: 0}


def test_background_child_does_not_delay_exit(connection: Connection) -> None:
    """EXIT comes when the main process ends, with its own output complete; END when the last writer lets go."""
    handle, _, _ = connection.start("bg", ["sh", "-c", "(sleep 3; echo late) & echo early"])
    output = connection.wait_exit(handle)
    assert (output.out, output.code, output.exit["stdout_end"]) == (b"early\n", 0, 6)
    assert 1 not in output.end
    while 1 not in output.end:
        connection.pump()
    assert output.out == b"early\nlate\n" and output.end[1] == 11


def test_noisy_background_child_does_not_delay_exit(connection: Connection) -> None:
    """Nor when the child writes without pause."""
    handle, _, _ = connection.start("bg", ["sh", "-c", "yes & exit 3"], spool_bytes=MIB)
    assert connection.wait_exit(handle).code == 3
    connection.signal(handle, 9, 2)


def test_total_bound_takes_the_longest_ended(make_guest: Callable[..., Guest]) -> None:
    """Past the bound of all spools the longest-ended process loses its output first; the running one keeps its own."""
    connection = make_guest(spool_max=MIB).connect()
    connection.hello()
    size = 400_000
    handles = []
    for i in range(4):
        handles.append(connection.start(f"p{i}", ["head", "-c", str(size), "/dev/zero"], flags=0)[0])
        wait_ended(connection)
    kept = []
    for handle in handles:
        state = connection.follow(handle)
        kept.append(state["stdout_head"] - state["stdout_tail"])
        assert state["stdout_head"] == size
        output = connection.wait_exit(handle)
        assert output.gaps == ([] if kept[-1] else [(1, 0, size)])
    assert kept == [0, 0, size, size]
    assert connection.ping()["spool_bytes"] <= MIB


def test_one_stream_can_not_pass_the_bound(make_guest: Callable[..., Guest]) -> None:
    """A running process that asks for more than the whole bound keeps the newest part that fits."""
    connection = make_guest(spool_max=MIB).connect()
    connection.hello()
    handle, _, _ = connection.start("big", ["seq", "1000000"], flags=0, spool_bytes=64 * MIB)
    wait_ended(connection)
    state = connection.follow(handle)
    assert MIB * 0.8 < state["stdout_head"] - state["stdout_tail"] <= MIB
    assert seq(1_000_000).endswith(connection.wait_exit(handle).out)
    assert connection.ping()["spool_bytes"] <= MIB


def test_many_small_outputs_are_kept(connection: Connection, guest: Guest) -> None:
    """Outputs of a few bytes stay readable long after, cost no file, and are counted by what they hold."""
    handles = [connection.start(f"s{i}", ["echo", str(i)], flags=0)[0] for i in range(200)]
    wait_ended(connection)
    assert connection.ping()["spool_bytes"] == sum(len(f"{i}\n") for i in range(200))
    assert len(guest.descriptors()) < 20
    for i, handle in enumerate(handles):
        connection.follow(handle)
        assert connection.wait_exit(handle).out == f"{i}\n".encode()


def test_host_that_does_not_read(guest: Guest) -> None:
    """A host that stops reading blocks neither programs nor the init; a fresh connection is served at once."""
    deaf = guest.connect(ack=False)
    deaf.hello()
    for i in range(20):
        deaf.start(f"n{i}", ["seq", "200000"], spool_bytes=MIB)
    deaf.socket.settimeout(0.5)  # once its answers fill the socket, the init takes no more of its requests
    with contextlib.suppress(TimeoutError):
        for _ in range(2000):
            deaf.send(2)
    connection = guest.connect()
    connection.hello()
    wait_ended(connection)
    handle, _, _ = connection.lookup("n19")
    connection.follow(handle, len(seq(200_000)) - 1000)
    assert connection.wait_exit(handle).out == seq(200_000)[-1000:]


def test_ack_of_nothing(connection: Connection) -> None:
    """Acknowledging more than there is means all of it; an unknown handle is answered with ENOENT."""
    handle, _, _ = connection.start("a", ["cat"], flags=FOLLOWED | BLOCK | 2)
    connection.send_ack(handle, 1, (1 << 64) - 1)
    connection.stdin(handle, 0, b"x" * 1000, eof=True)
    assert connection.wait_exit(handle).out == b"x" * 1000
    tag = connection.send_ack(99, 1, 0)
    connection.ping()
    assert connection.replies.pop(tag)[0] == 0xFF
