"""Messages between a node and its supervisor: docs/formats/supervisor-protocol.md, version 1. No I/O."""

from typing import Final

from msgspec import Struct

from barchan.errors import LocalProtocolError, RemoteProtocolError

VERSION: Final = 1
PACKET_BYTES_MAX: Final = 64 << 10
FDS_MAX: Final = 8


class Message(Struct, frozen=True):
    """One packet. `word` is an operation, `ok`, `error` or `exit`; a key may repeat, hence `pairs`."""

    word: str
    pairs: tuple[tuple[str, str], ...]

    def get(self, key: str, default: str | None = None) -> str:
        for name, value in self.pairs:
            if name == key:
                return value
        if default is None:
            raise RemoteProtocolError(f"the supervisor's {self.word!r} message lacks {key!r}")
        return default

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key, None if default is None else str(default))
        try:
            return int(value)
        except ValueError as error:
            raise RemoteProtocolError(f"the supervisor sent {key}={value!r}") from error


def encode(word: str, **keys: str | int) -> bytes:
    packet = "".join([f"{word}\0", *(f"{key}={value}\0" for key, value in keys.items())]).encode()
    if len(packet) > PACKET_BYTES_MAX or packet.count(b"\0") != len(keys) + 1:
        raise LocalProtocolError(f"a {word!r} message is too long or holds a NUL")
    return packet


def decode(packet: bytes) -> Message:
    if not packet.endswith(b"\0"):
        raise RemoteProtocolError("the supervisor sent a packet that does not end")
    word, *rest = packet[:-1].decode("utf-8", "replace").split("\0")
    pairs = []
    for item in rest:
        key, separator, value = item.partition("=")
        if not separator:
            raise RemoteProtocolError(f"the supervisor sent {item!r} where key=value belongs")
        pairs.append((key, value))
    return Message(word, tuple(pairs))
