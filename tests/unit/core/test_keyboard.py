"""The keys of what is typed and pressed."""

import string

import pytest

from barchan.core.keyboard import TEXT_CHARS_MAX, chord, typed
from barchan.errors import InvalidSpec


def test_every_printable_character_has_its_keys() -> None:
    """Each character that a US keyboard prints gives a key, capitals and signs with shift, no two the same."""
    chords = [typed(char)[0] for char in string.printable if char not in "\r\x0b\x0c"]
    assert len(set(chords)) == len(chords)
    assert typed("aZ?\n") == [("a",), ("shift", "z"), ("shift", "slash"), ("ret",)]
    assert typed('~|"{_') == [
        ("shift", "grave_accent"),
        ("shift", "backslash"),
        ("shift", "apostrophe"),
        ("shift", "bracket_left"),
        ("shift", "minus"),
    ]


@pytest.mark.parametrize("text", ["ä", "naïve", "\x1b", "日", "\x00"])
def test_what_no_key_gives_is_refused(text: str) -> None:
    """A character without a key is refused before anything is typed."""
    with pytest.raises(InvalidSpec, match="no key of a US keyboard"):
        typed(text)


def test_a_text_is_bounded() -> None:
    """The longest text is typed; one character more is refused."""
    assert len(typed("x" * TEXT_CHARS_MAX)) == TEXT_CHARS_MAX
    with pytest.raises(InvalidSpec, match="typed at once"):
        typed("x" * (TEXT_CHARS_MAX + 1))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("enter", ("ret",)),
        ("ctrl-c", ("ctrl", "c")),
        ("Ctrl-C", ("ctrl", "c")),
        ("ctrl-alt-delete", ("ctrl", "alt", "delete")),
        ("shift-F3", ("shift", "f3")),
        ("Page_Up", ("pgup",)),
        ("A", ("shift", "a")),
        ("-", ("minus",)),
        ("ctrl--", ("ctrl", "minus")),
        ("ctrl-+", ("ctrl", "shift", "equal")),
        ("alt-tab", ("alt", "tab")),
        ("super", ("meta_l",)),
    ],
)
def test_names_of_keys(words: str, expected: tuple[str, ...]) -> None:
    """Names joined by `-` are the keys in that order."""
    assert chord(words) == expected


@pytest.mark.parametrize("words", ["", "ctrl-", "hyper-x", "ctrl-alt-shift-super-tab-a-b", "ö", "-ctrl"])
def test_what_is_no_key_is_refused(words: str) -> None:
    """An unknown name, an empty one and too many keys are the caller's mistake."""
    with pytest.raises(InvalidSpec):
        chord(words)
