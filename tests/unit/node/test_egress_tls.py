"""The server name in a TLS ClientHello."""

import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import RemoteProtocolError
from barchan.node.egress_tls import HELLO_BYTES_MAX, client_hello, server_name


def hello_bytes(name: str | None) -> bytes:
    """What OpenSSL sends first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def records(handshake: bytes, size: int) -> bytes:
    pieces = [handshake[start : start + size] for start in range(0, len(handshake), size)]
    return b"".join(struct.pack(">BHH", 22, 0x0301, len(piece)) + piece for piece in pieces)


def hello_with(extensions: bytes) -> bytes:
    body = b"\x03\x03" + bytes(32) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    return body + struct.pack(">H", len(extensions)) + extensions


def sni(*names: bytes, kind: int = 0) -> bytes:
    listed = b"".join(struct.pack(">BH", kind, len(name)) + name for name in names)
    return struct.pack(">HHH", 0, len(listed) + 2, len(listed)) + listed


def name_in(data: bytes) -> str | None:
    hello = client_hello(data)
    assert hello is not None
    return server_name(hello)


def test_a_real_hello_shows_its_name() -> None:
    """As OpenSSL writes it, with a name, without, and with more bytes behind."""
    assert name_in(hello_bytes("a.example") + b"more") == "a.example"
    assert name_in(hello_bytes(None)) is None


@given(st.integers(64, 3000))
def test_a_hello_in_several_records(size: int) -> None:
    """Splitting the hello over records hides nothing."""
    assert name_in(records(hello_bytes("a.example")[5:], size)) == "a.example"


def test_a_hello_comes_in_pieces() -> None:
    """Until its last byte there is nothing to say."""
    data = hello_bytes("a.example")
    assert {client_hello(data[:size]) for size in range(len(data))} == {None}


@given(st.binary(max_size=400))
def test_any_bytes_are_a_hello_or_refused(data: bytes) -> None:
    """Hostile bytes raise nothing but the error that closes the tunnel."""
    for make in (
        lambda: client_hello(b"\x16" + data),
        lambda: server_name(data),
        lambda: server_name(hello_with(data)),
    ):
        try:
            make()
        except RemoteProtocolError as error:
            assert error.details["status"] == 400


@pytest.mark.parametrize(
    "extensions",
    [
        sni(b"a.example", b"b.example"),
        sni(b"a.example") * 2,
        sni(b"a.example", kind=1),
        sni("ä".encode()),
        sni(b"a")[:-1],
    ],
)
def test_an_ambiguous_name_is_refused(extensions: bytes) -> None:
    """The server might choose the other one."""
    with pytest.raises(RemoteProtocolError):
        server_name(hello_with(extensions))


@pytest.mark.parametrize(
    "data",
    [
        records(b"\x02\x00\x00\x01x", 100),
        records(b"\x01\x00\xff\xff" + bytes(100), 200),
        records(b"\x01\x00\x20\x00" + bytes(100), 1),
        b"\x16\x03\x01\x00\x00" * 2,
        b"\x16\x02\x00\x00\x05hello",
        records(b"\x01\x00\x10\x00", 4) + b"\x15\x03\x01\x00\x02\x01\x00",
        b"\x16\x03\x01\xff\xff" + bytes(HELLO_BYTES_MAX),
    ],
)
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    """Another handshake message, endless, empty or too many records, another version: no tunnel waits for these."""
    with pytest.raises(RemoteProtocolError):
        client_hello(data)
