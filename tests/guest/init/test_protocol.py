"""Frames: versions, bounds, and everything a broken or hostile peer could send. After each the init still answers."""

import os
import random
import struct
import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.guest.init.driver import (
    HELLO,
    PING,
    START,
    STDIN,
    TO_INIT_MAX,
    Closed,
    Connection,
    GuestReplyError,
    start_body,
)
from tests.guest.init.guest import Guest

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(120)]


def frame(
    kind: int, body: bytes = b"", tag: int = 1, length: int | None = None, reserved: tuple[int, int] = (0, 0)
) -> bytes:
    return struct.pack("<IBBHI", len(body) if length is None else length, kind, *reserved, tag) + body


def is_closed_after(guest: Guest, data: bytes) -> bool:
    connection = guest.connect()
    connection.socket.sendall(data)
    connection.socket.settimeout(5)
    try:
        while connection.socket.recv(65536):
            pass
    except ConnectionResetError:
        return True
    finally:
        connection.close()
    return True


def held(guest: Guest) -> int:
    """How many descriptors the init holds with one fresh connection, which shows that it answers."""
    guest.connect().ping()
    return len(guest.descriptors())


def test_hello(guest: Guest) -> None:
    """HELLO may be repeated, tells how many processes are remembered, and answers another version with our own."""
    connection = guest.connect()
    assert connection.hello() == (1, 0)
    connection.run(["true"])
    assert connection.hello() == (1, 1)
    assert connection.hello(version=2) == (1, 1)


def test_hello_with_wrong_descriptors(guest: Guest) -> None:
    """Too few or too many descriptors, or an impossible list of leaves, end the connection and leak nothing."""
    before = held(guest)
    null = os.open("/dev/null", os.O_WRONLY)
    bodies = [
        (b"\1\0\0\0\1" + b"\0\1\1", 1),
        (b"\1\0\0\0\1" + b"\0\1\0", 2),
        (b"\1\0\0\0\0", 3),
        (b"\1\0\0\0\1" + b"\2\0\0", 0),
        (b"\1\0\0\0\1" + b"\0\x09\0", 9),
        (b"\1\0\0\0\1" + b"\0\0\2", 1),
        (b"\1\0\0\0\2" + b"\0\0\0\0\0\0", 0),
        (b"\1\0\0\0\3" + b"\0\0\0" * 3, 0),
        (b"\1\0\0\0\1" + b"\0\1\0", 60),
    ]
    for body, count in bodies:
        connection = guest.connect()
        with pytest.raises(Closed):
            connection.request(HELLO, body, [null] * count)
    os.close(null)
    assert held(guest) == before


def test_descriptors_without_hello_are_dropped(guest: Guest) -> None:
    """Descriptors that no HELLO claims are closed with their connection."""
    before = held(guest)
    null = os.open("/dev/null", os.O_WRONLY)
    for _ in range(5):
        guest.connect().request(PING, b"", [null] * 3)
    os.close(null)
    assert held(guest) == before


@pytest.mark.parametrize(
    "data",
    [
        frame(0),
        frame(18),
        frame(0x82),
        frame(0xA0),
        frame(0xFF),
        frame(PING, reserved=(1, 0)),
        frame(PING, reserved=(0, 1)),
        frame(PING, reserved=(0, 256)),
        frame(START, length=TO_INIT_MAX + 1),
        frame(START, length=0xFFFFFFFF),
        frame(PING, b"x"),
        frame(4, bytes(19)),
        frame(4, bytes(21)),
        frame(START, b""),
        frame(START, start_body("x", ["true"]) + b"x"),
        frame(START, start_body("x", ["true"])[:-1]),
        frame(START, start_body("", ["true"])),
        frame(START, start_body("x" * 129, ["true"])),
        frame(START, start_body("a\0b", ["true"])),
        frame(START, start_body("x", [])),
        frame(START, start_body("x", [b"a\0b"])),
        frame(START, start_body("x", ["true"], kind=4)),
        frame(START, start_body("x", ["true"], flags=128)),
        frame(START, start_body("x", ["true"], env={"A": "\0"})),
        frame(START, start_body("x", ["true"], user="a\0")),
        frame(START, start_body("x", ["true"], limits=[(16, 1, 1)])),
        frame(START, start_body("x", ["true"], limits=[(1, 2, 1)])),
        frame(STDIN, struct.pack("<IQBI", 1, 0, 2, 0)),
        frame(STDIN, struct.pack("<IQBI", 1, 0, 0, (256 << 10) + 1) + bytes((256 << 10) + 1)),
        frame(9, struct.pack("<I", 100) + b"short"),
        frame(9, struct.pack("<I", 0xFFFFFFFF)),
    ],
)
def test_broken_frames_end_the_connection(guest: Guest, data: bytes) -> None:
    """Unknown types, reserved fields, lengths out of bounds and bodies that do not decode exactly."""
    assert is_closed_after(guest, data)
    assert guest.connect().ping()["total"] == 0


def test_largest_frame(connection: Connection) -> None:
    """A frame of exactly 2 MiB is taken."""
    empty = start_body("big", ["sh", "-c", "wc -c <&3"], script=b"")
    script = b"x" * (TO_INIT_MAX - len(empty))
    assert connection.run(["sh", "-c", "wc -c <&3"], process_id="big", script=script).out == f"{len(script)}\n".encode()


def test_a_claimed_length_costs_nothing(guest: Guest) -> None:
    """Many connections that promise 2 MiB and send nothing do not add up: each replaces the one before."""

    def reserved() -> int:
        with open(f"/proc/{guest.pid}/statm") as statm:
            return int(statm.read().split()[0]) * 4096

    guest.connect().ping()
    before = reserved()
    for _ in range(200):
        guest.connect().socket.sendall(frame(START, b"x" * 100, length=TO_INIT_MAX))
    guest.connect().ping()
    assert reserved() - before < 200 * TO_INIT_MAX // 4


def test_split_writes(guest: Guest) -> None:
    """Frames may come in any pieces."""
    connection = guest.connect()
    data = (
        frame(HELLO, b"\1\0\0\0\0", tag=1)
        + frame(START, start_body("s", ["echo", "x" * 5000]), tag=2)
        + frame(PING, tag=3)
    )
    rng = random.Random(5)
    while data:
        size = rng.choice((1, 2, 3, 11, 12, 13, 500))
        connection.socket.sendall(data[:size])
        data = data[size:]
        time.sleep(0.0005)
    connection.wait_reply(1)
    handle, _, _ = struct.unpack("<IiB", connection.wait_reply(2)[1])
    assert connection.wait_reply(3)[0] == PING | 0x80
    assert connection.wait_exit(handle).out == b"x" * 5000 + b"\n"


def test_unknown_handles_are_errors(connection: Connection) -> None:
    """Every request about a handle answers ENOENT for one that was never given."""
    bodies = {4: "<IQQ", 6: "<IQBI", 7: "<IIB", 8: "<IHH"}
    for handle in (0, 1, 0xFFFFFFFF):
        for kind, layout in bodies.items():
            fields = [handle, *[0] * (len(layout) - 2)]
            with pytest.raises(GuestReplyError) as caught:
                connection.request(kind, struct.pack(layout, *fields))
            assert caught.value.errno == 2


def test_too_many_running(make_guest: Callable[..., Guest]) -> None:
    """Where descriptors run out a start is refused, and works again after others ended."""
    connection = make_guest(nofile=64).connect()
    connection.hello()
    handles = []
    with pytest.raises(GuestReplyError) as caught:
        for i in range(64):
            handles.append(connection.start(f"p{i}", ["sleep", "1000"])[0])
    assert caught.value.errno == 24 and len(handles) > 15
    assert connection.ping()["running"] == len(handles)
    for handle in handles:
        connection.signal(handle, 9, 1)
        connection.wait_exit(handle)
    assert connection.run(["true"], process_id=f"p{len(handles)}").code == 0


def _valid_frames() -> list[bytes]:
    """One of each request, as they are."""
    return [
        frame(HELLO, b"\1\0\0\0\0"),
        frame(PING),
        frame(START, start_body("fuzz", ["echo", "hi"], env={"A": "b"}, limits=[(1, 1, 2)], script=b"s", stdin=b"i")),
        frame(START, start_body("applet", ["stat", "/"], kind=1)),
        frame(4, struct.pack("<IQQ", 1, 0, 0)),
        frame(5, struct.pack("<IBQ", 1, 1, 3)),
        frame(STDIN, struct.pack("<IQBI", 1, 0, 1, 3) + b"abc"),
        frame(7, struct.pack("<IIB", 1, 0, 2)),
        frame(8, struct.pack("<IHH", 1, 2, 3)),
        frame(9, struct.pack("<I", 4) + b"fuzz"),
        frame(10, struct.pack("<I", 0)),
        frame(11, struct.pack("<I", 4) + b"seed"),
        frame(12, struct.pack("<q", 0)),
        frame(13, struct.pack("<Q", 0)),
        frame(14),
    ]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A few valid frames with bytes changed, cut out or doubled. The clock and the seed stay as they are."""
    frames = [data for data in _valid_frames() if data[4] not in (11, 12)]
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(frames), min_size=1, max_size=6))))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(data) - 1))
        action = draw(st.sampled_from(["set", "cut", "insert", "big"]))
        if action == "set":
            data[at] = draw(st.integers(0, 255))
        elif action == "cut" and len(data) > 20:
            del data[at : at + draw(st.integers(1, 8))]
        elif action == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif at + 4 <= len(data):
            data[at : at + 4] = draw(st.sampled_from([b"\xff" * 4, b"\0\0\0\x80", b"\xff\xff\xff\x7f", b"\0\0\x20\0"]))
    return bytes(data)


FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))


def feed(guest: Guest, data: bytes, pieces: int) -> None:
    connection = guest.connect(ack=False)
    try:
        size = max(1, len(data) // pieces)
        for at in range(0, len(data), size):
            connection.socket.sendall(data[at : at + size])
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        connection.close()
    fresh = guest.connect()
    fresh.socket.settimeout(5)
    assert fresh.ping()["monotonic_ns"] > 0
    fresh.close()


@FUZZ
@given(data=st.binary(min_size=1, max_size=600), pieces=st.integers(1, 5))
@example(data=frame(START, b"\xff" * 200), pieces=1)
def test_random_bytes(guest: Guest, data: bytes, pieces: int) -> None:
    """Noise ends at most its own connection."""
    feed(guest, data, pieces)


@FUZZ
@given(data=mutated(), pieces=st.integers(1, 5))
def test_mutated_frames(guest: Guest, data: bytes, pieces: int) -> None:
    """Nor do frames that are almost right."""
    feed(guest, data, pieces)


@FUZZ
@given(kind=st.integers(1, 14), body=st.binary(max_size=300))
def test_random_bodies(guest: Guest, kind: int, body: bytes) -> None:
    """Nor right headers with noise behind them."""
    feed(guest, frame(HELLO, b"\1\0\0\0\0") + frame(kind, body if kind not in (11, 12) else b""), 1)


def test_garbage_after_garbage_leaks_nothing(guest: Guest) -> None:
    """A thousand broken connections later the init holds what it held, and works."""
    before = held(guest)
    rng = random.Random(7)
    for _ in range(1000):
        connection = guest.connect()
        connection.socket.sendall(
            frame(rng.randrange(256), rng.randbytes(rng.randrange(64)), length=rng.randrange(1 << rng.randrange(1, 32)))
        )
        connection.close()
    connection = guest.connect()
    connection.hello()
    assert connection.run(["echo", "ok"]).out == b"ok\n"
    assert held(guest) == before
