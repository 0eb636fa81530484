"""Guest frames: cut from any split of the stream, refused when they break a bound."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import InvalidSpec, RemoteProtocolError
from barchan.wire import guest

HEADER = struct.Struct("<IBBHI")
KINDS = st.sampled_from([guest.ERROR, guest.Pushed.OUTPUT, guest.Request.PING | 0x80])


def raw(kind: int, tag: int, body: bytes) -> bytes:
    return HEADER.pack(len(body), kind, 0, 0, tag) + body


@given(st.lists(st.tuples(KINDS, st.integers(0, 2**32 - 1), st.binary(max_size=300)), max_size=8), st.data())
def test_frames_survive_any_split(frames: list[tuple[int, int, bytes]], data: st.DataObject) -> None:
    """A stream cut anywhere gives the same frames."""
    stream = b"".join(raw(*frame) for frame in frames)
    reader = guest.FrameReader()
    found = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += reader.feed(stream[:size])
        stream = stream[size:]
    assert [guest.Frame(*frame) for frame in frames] == found


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(guest.TO_HOST_BYTES_MAX + 1, guest.Pushed.OUTPUT, 0, 0, 0),
        HEADER.pack(1, guest.Pushed.OUTPUT, 1, 0, 0),
        HEADER.pack(1, guest.Pushed.OUTPUT, 0, 7, 0),
        HEADER.pack(1, 0x01, 0, 0, 0),
        HEADER.pack(1, 0x00, 0, 0, 0),
    ],
    ids=["too long", "reserved byte", "reserved word", "a request", "unknown"],
)
def test_a_bad_header_is_refused_before_its_body(header: bytes) -> None:
    """The check needs the header alone."""
    with pytest.raises(RemoteProtocolError):
        guest.FrameReader().feed(header)


@given(st.binary(max_size=200), st.sampled_from([guest.Pushed.OUTPUT, guest.Pushed.EXIT, guest.Pushed.END]))
def test_hostile_bodies_decode_or_are_refused(body: bytes, kind: int) -> None:
    """A guest's bytes never raise anything but RemoteProtocolError."""
    try:
        pushed = guest.decode_pushed(guest.Frame(kind, 0, body))
    except RemoteProtocolError:
        return
    assert pushed.handle >= 0


@given(st.binary(max_size=200))
def test_hostile_replies_decode_or_are_refused(body: bytes) -> None:
    """So do the bodies of replies, whichever decoder reads them."""
    for decode in (
        guest.decode_started,
        guest.decode_list,
        guest.decode_entries,
        guest.decode_error,
        guest.decode_pong,
    ):
        try:
            decode(body)
        except RemoteProtocolError:
            continue


def test_output_decodes() -> None:
    """An OUTPUT frame as the init writes it."""
    body = struct.pack("<IBQI", 7, guest.STDERR, 4096, 3) + b"abc"
    assert guest.decode_pushed(guest.Frame(guest.Pushed.OUTPUT, 0, body)) == guest.Output(7, 2, 4096, b"abc")


def test_a_start_too_long_for_one_frame_is_the_callers_mistake() -> None:
    """The bound towards the init is checked before anything is sent."""
    with pytest.raises(InvalidSpec):
        guest.Start(process_id="p", argv=("x",), stdin=b"x" * guest.TO_INIT_BYTES_MAX).encode(1)


def test_nul_in_an_argument_is_the_callers_mistake() -> None:
    """The kernel would cut the argument there."""
    with pytest.raises(InvalidSpec):
        guest.Start(process_id="p", argv=("a\0b",)).encode(1)


@given(
    st.lists(
        st.tuples(st.sampled_from("cmdvo"), st.text(max_size=20).filter(lambda name: "\0" not in name)), max_size=5
    ),
    st.data(),
)
def test_change_records_survive_any_split(changes: list[tuple[str, str]], data: st.DataObject) -> None:
    """What is left of an unfinished record joins the next bytes."""
    stream = b"".join(kind.encode() + guest.text(path) for kind, path in changes)
    found: list[tuple[str, str]] = []
    rest = b""
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        more, rest = guest.decode_changes(rest + stream[:size])
        found += more
        stream = stream[size:]
    assert (changes, b"") == (found, rest)


def test_a_list_rises_from_what_was_asked_for() -> None:
    """A page that begins before it, or repeats itself, would be read for ever."""

    def listing(*handles: int) -> bytes:
        items = [struct.pack("<II", handle, 1) + b"p" + struct.pack("<iBi", 7, 0, 0) for handle in handles]
        return struct.pack("<I", len(items)) + b"".join(items)

    assert [item.handle for item in guest.decode_list(listing(5, 7), 5)] == [5, 7]
    for handles in ((4,), (5, 5), (6, 5), (0xFFFFFFFF,)):
        with pytest.raises(RemoteProtocolError):
            guest.decode_list(listing(*handles), 5)
