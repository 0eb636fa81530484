"""The server name in a TLS ClientHello (RFC 8446 4.1.2, RFC 6066 3). No I/O.

The name in the clear is what a shared address chooses its site by, so it has to be the name that was allowed. A guest
can leave it out or encrypt the real one (ECH); then the outer name is all there is to see.
"""

from barchan.errors import RemoteProtocolError

HELLO_BYTES_MAX = 16 << 10
RECORDS_MAX = 16  # a hello is one record, or a few; many tiny ones would only cost time at each new byte
HANDSHAKE_RECORD = 22
_CLIENT_HELLO = 1
_SERVER_NAME = 0


class _Reader:
    """Takes length-prefixed pieces off bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        piece = self._data[self._at : self._at + size]
        if len(piece) != size:
            raise RemoteProtocolError("the TLS ClientHello is malformed", status=400)
        self._at += size
        return piece

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, prefix: int) -> bytes:
        return self.take(self.number(prefix))


def client_hello(data: bytes) -> bytes | None:
    """The body of the ClientHello at the start of a TLS stream, or None while more bytes are needed.

    Raises:
        RemoteProtocolError: The first record is a handshake, but no ClientHello of a sane size follows.
    """
    handshake = b""
    at = records = 0
    while len(data) - at >= 5:
        records += 1
        kind, major, size = data[at], data[at + 1], int.from_bytes(data[at + 3 : at + 5], "big")
        if kind != HANDSHAKE_RECORD or major != 3 or not size or records > RECORDS_MAX:
            raise RemoteProtocolError("the TLS ClientHello is malformed", status=400)
        handshake += data[at + 5 : at + 5 + size]
        at += 5 + size
        if len(handshake) >= 4:
            length = int.from_bytes(handshake[1:4], "big")
            if handshake[0] != _CLIENT_HELLO or length > HELLO_BYTES_MAX:
                raise RemoteProtocolError("the TLS ClientHello is malformed", status=400)
            if len(handshake) >= 4 + length:
                return handshake[4 : 4 + length]
    if len(data) > HELLO_BYTES_MAX:
        raise RemoteProtocolError("the TLS ClientHello is too long", status=400)
    return None


def server_name(hello: bytes) -> str | None:
    """The name in a ClientHello's body, as sent, or None if it has none.

    Raises:
        RemoteProtocolError: Malformed, or several names.
    """
    reader = _Reader(hello)
    reader.take(2 + 32)
    reader.block(1)
    reader.block(2)
    reader.block(1)
    if reader.is_empty:
        return None
    extensions = _Reader(reader.block(2))
    found: list[bytes] = []
    while not extensions.is_empty:
        kind = extensions.number(2)
        body = extensions.block(2)
        if kind == _SERVER_NAME:
            names = _Reader(_Reader(body).block(2))
            while not names.is_empty:
                if names.number(1) != 0:
                    raise RemoteProtocolError("the TLS server name is of an unknown kind", status=400)
                found.append(names.block(2))
    if len(found) > 1 or (found and not found[0].isascii()):
        raise RemoteProtocolError("the TLS server name is ambiguous", status=400)
    return found[0].decode("ascii") if found else None
