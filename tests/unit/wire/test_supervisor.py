"""Supervisor messages: what is encoded decodes, what is malformed is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.errors import LocalProtocolError, RemoteProtocolError
from barchan.wire import supervisor

WORDS = st.text(st.characters(codec="ascii", exclude_characters="\0="), min_size=1, max_size=12)


@given(
    WORDS, st.dictionaries(WORDS.filter(str.isidentifier), st.text(max_size=30).filter(lambda text: "\0" not in text))
)
def test_messages_round_trip(word: str, keys: dict[str, str]) -> None:
    """Keys and values come back as they were given."""
    keys.pop("word", None)
    try:
        packet = supervisor.encode(word, **keys)
    except UnicodeEncodeError:
        return
    assert supervisor.Message(word, tuple(keys.items())) == supervisor.decode(packet)


@pytest.mark.parametrize("packet", [b"", b"ok", b"ok\0tag\0"], ids=["empty", "no end", "no value"])
def test_a_malformed_packet_is_refused(packet: bytes) -> None:
    """Half a message is no message."""
    with pytest.raises(RemoteProtocolError):
        supervisor.decode(packet)


def test_a_nul_can_not_smuggle_a_key() -> None:
    """A value with a NUL would become a second key for the supervisor."""
    with pytest.raises(LocalProtocolError):
        supervisor.encode("create", id="x\0upper_bytes=0")


def test_a_missing_key_is_named() -> None:
    """So that a version mismatch reads well."""
    with pytest.raises(RemoteProtocolError, match="uid_base"):
        supervisor.decode(b"ok\0tag=1\0").number("uid_base")
