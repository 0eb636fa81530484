"""Stdin: inline, in frames, ends of file, and readers that are gone."""

import hashlib
import os
import signal

import pytest

from tests.guest.init.driver import FOLLOWED, PTY, STDIN_OPEN, Connection, GuestReplyError, Output
from tests.guest.init.guest import Guest

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(90)]

FRAME = 256 << 10
WAIT = "echo ready; exec sleep 60"  # dies by its signal at any moment; Python would miss one just before it sleeps


def test_no_stdin_is_end_of_file(connection: Connection) -> None:
    """Without stdin a reader sees the end at once."""
    assert connection.run(["cat"]).out == b""


@pytest.mark.parametrize("size", [1, 65536, 1_000_000])
def test_inline_stdin(connection: Connection, size: int) -> None:
    """Inline bytes of any size arrive whole, followed by end of file."""
    data = os.urandom(size)
    assert connection.run(["cat"], stdin=data).out == data


def test_50_mib_through_frames(connection: Connection) -> None:
    """50 MiB in frames of 256 KiB reach the program byte for byte; each reply counts what is in the pipe."""
    data = os.urandom(FRAME) * 200
    handle, _, _ = connection.start("in", ["sha256sum"], flags=FOLLOWED | STDIN_OPEN)
    for at in range(0, len(data), FRAME):
        assert connection.stdin(handle, at, data[at : at + FRAME], eof=at + FRAME == len(data)) == at + FRAME
    assert connection.wait_exit(handle).out.split()[0].decode() == hashlib.sha256(data).hexdigest()


def test_inline_then_frames(connection: Connection) -> None:
    """With STDIN the inline bytes come first, and offsets go on after them."""
    handle, _, _ = connection.start("in", ["cat"], flags=FOLLOWED | STDIN_OPEN, stdin=b"abc")
    assert connection.stdin(handle, 3, b"def", eof=True) == 6
    assert connection.wait_exit(handle).out == b"abcdef"


def test_a_frame_without_bytes_asks_how_far_the_stream_has_come(connection: Connection) -> None:
    """Whoever goes on with a stream that another began learns where; it may ask for the end of file as well."""
    handle, _, _ = connection.start("in", ["cat"], flags=FOLLOWED | STDIN_OPEN)
    assert connection.stdin(handle, 0, b"") == 0
    assert connection.stdin(handle, 0, b"hello ") == 6
    assert connection.stdin(handle, 0, b"") == 6
    assert connection.stdin(handle, 6, b"world") == 11
    assert connection.stdin(handle, 0, b"", eof=True) == 11
    assert connection.wait_exit(handle).out == b"hello world"


def test_repeated_bytes_are_taken_once(connection: Connection) -> None:
    """A frame sent again after a lost reply changes nothing; one that leaves a hole is refused."""
    handle, _, _ = connection.start("in", ["cat"], flags=FOLLOWED | STDIN_OPEN)
    assert connection.stdin(handle, 0, b"hello ") == 6
    assert connection.stdin(handle, 0, b"hello ") == 6
    assert connection.stdin(handle, 3, b"lo world") == 11
    with pytest.raises(GuestReplyError) as hole:
        connection.stdin(handle, 12, b"!")
    assert hole.value.errno == 22
    assert connection.stdin(handle, 11, b"", eof=True) == 11
    assert connection.stdin(handle, 11, b"", eof=True) == 11
    with pytest.raises(GuestReplyError) as ended:
        connection.stdin(handle, 11, b"more")
    assert ended.value.errno == 32
    assert connection.wait_exit(handle).out == b"hello world"


def test_full_pipe_delays_the_reply_only(connection: Connection) -> None:
    """Bytes that a sleeping reader does not take wait; meanwhile all else is served, and too many are refused."""
    handle, _, _ = connection.start("in", ["sh", "-c", "read x; cat | wc -c"], flags=FOLLOWED | STDIN_OPEN)
    connection.signal(handle, signal.SIGSTOP, 1)
    tags = [connection.send_stdin(handle, 0, b"\n" + b"x" * (FRAME - 1))]
    tags += [connection.send_stdin(handle, i * FRAME, b"x" * FRAME) for i in range(1, 4)]
    refused = connection.send_stdin(handle, 4 * FRAME, b"x" * FRAME)
    with pytest.raises(GuestReplyError) as full:
        connection.wait_reply(refused)
    assert full.value.errno == 11
    assert connection.run(["true"]).code == 0 and not connection.replies
    connection.signal(handle, signal.SIGCONT, 1)
    for tag in tags:
        connection.wait_reply(tag)
    assert connection.stdin(handle, 4 * FRAME, b"", eof=True) == 4 * FRAME
    assert connection.wait_exit(handle).out.strip() == str(4 * FRAME - 1).encode()


def test_reader_that_ends_early(connection: Connection, guest: Guest) -> None:
    """What a program did not read is answered with EPIPE, also what was waiting; its exit is not affected."""
    before = guest.descriptors()
    handle, _, _ = connection.start("in", ["head", "-c", "5"], flags=FOLLOWED | STDIN_OPEN)
    with pytest.raises(GuestReplyError) as caught:
        for i in range(4):
            connection.stdin(handle, i * FRAME, b"x" * FRAME)
    assert caught.value.errno == 32
    assert connection.wait_exit(handle).out == b"xxxxx"
    assert guest.descriptors() == before


def test_stdin_of_a_process_without(connection: Connection) -> None:
    """EPIPE without the STDIN flag, ENOENT for an unknown handle."""
    handle, _, _ = connection.start("in", ["sleep", "1"])
    with pytest.raises(GuestReplyError) as closed:
        connection.stdin(handle, 0, b"x")
    with pytest.raises(GuestReplyError) as unknown:
        connection.stdin(77, 0, b"x")
    assert (closed.value.errno, unknown.value.errno) == (32, 2)


def test_stdin_survives_a_new_connection(guest: Guest) -> None:
    """A frame whose connection broke is still delivered; the next connection goes on from its offset."""
    first = guest.connect()
    first.hello()
    handle, _, _ = first.start("in", ["sh", "-c", "sleep 0.3; wc -c"], flags=STDIN_OPEN)
    first.send_stdin(handle, 0, b"x" * FRAME)
    first.ping()
    second = guest.connect()
    second.hello()
    assert second.stdin(handle, FRAME, b"y" * 10, eof=True) == FRAME + 10
    second.follow(handle)
    assert second.wait_exit(handle).out.strip() == str(FRAME + 10).encode()


def test_terminal_input(connection: Connection) -> None:
    """Bytes reach a program through its pty, control characters work, and end of file is ^D."""
    handle, _, _ = connection.start("in", ["sh", "-c", "stty -echo; echo ready; cat; echo end"], flags=FOLLOWED | PTY)
    connection.wait_until(handle, b"ready\r\n")
    assert connection.stdin(handle, 0, b"line\n") == 5
    connection.wait_until(handle, b"line\r\n")
    assert connection.stdin(handle, 5, b"", eof=True) == 5
    assert connection.wait_exit(handle).out == b"ready\r\nline\r\nend\r\n"
    handle, _, _ = connection.start("int", ["sh", "-c", WAIT], flags=FOLLOWED | PTY)
    connection.wait_until(handle, b"ready")
    connection.stdin(handle, 0, b"\x03")
    assert connection.wait_exit(handle).code == -signal.SIGINT


def test_shell_round_trips(connection: Connection) -> None:
    """A shell on open pipes answers each command as it comes."""
    handle, _, _ = connection.start("in", ["sh"], flags=FOLLOWED | STDIN_OPEN)
    offset = 0
    for i in range(50):
        offset = connection.stdin(handle, offset, f"echo {i}.\n".encode())
        connection.wait_until(handle, f"{i}.\n".encode())
    connection.stdin(handle, offset, b"exit 9\n")
    output: Output = connection.wait_exit(handle)
    assert output.code == 9
