"""What is typed and pressed on a machine's keyboard, as the keys of a US layout: decisions only.

Keys have the names that QEMU's QMP has for them (`QKeyCode`).
"""

from barchan.errors import InvalidSpec

TEXT_CHARS_MAX = 2000
CHORD_KEYS_MAX = 6
Chord = tuple[str, ...]
"""Keys that are pressed in this order, and released in the other."""

_SHIFT = "shift"
_PLAIN = {
    **{char: char for char in "abcdefghijklmnopqrstuvwxyz0123456789"},
    " ": "spc",
    "\n": "ret",
    "\t": "tab",
    "-": "minus",
    "=": "equal",
    "[": "bracket_left",
    "]": "bracket_right",
    "\\": "backslash",
    ";": "semicolon",
    "'": "apostrophe",
    "`": "grave_accent",
    ",": "comma",
    ".": "dot",
    "/": "slash",
}
_SHIFTED = dict(
    zip(
        'ABCDEFGHIJKLMNOPQRSTUVWXYZ)!@#$%^&*(_+{}|:"~<>?',
        "abcdefghijklmnopqrstuvwxyz0123456789-=[]\\;'`,./",
        strict=True,
    )
)
_NAMED = {
    "ctrl": "ctrl",
    "shift": _SHIFT,
    "alt": "alt",
    "altgr": "alt_r",
    "super": "meta_l",
    "meta": "meta_l",
    "win": "meta_l",
    "cmd": "meta_l",
    "enter": "ret",
    "return": "ret",
    "esc": "esc",
    "escape": "esc",
    "tab": "tab",
    "space": "spc",
    "backspace": "backspace",
    "delete": "delete",
    "del": "delete",
    "insert": "insert",
    "home": "home",
    "end": "end",
    "pageup": "pgup",
    "pagedown": "pgdn",
    "up": "up",
    "down": "down",
    "left": "left",
    "right": "right",
    "capslock": "caps_lock",
    "numlock": "num_lock",
    "scrolllock": "scroll_lock",
    "print": "print",
    "pause": "pause",
    "menu": "menu",
    "minus": "minus",
    **{f"f{number}": f"f{number}" for number in range(1, 13)},
}


def typed(text: str) -> list[Chord]:
    """The keys that give a text, one chord for each character.

    Raises:
        InvalidSpec: It is too long, or has a character that no key of the layout gives.
    """
    if len(text) > TEXT_CHARS_MAX:
        raise InvalidSpec(f"{len(text)} characters are more than the {TEXT_CHARS_MAX} that are typed at once")
    return [_of_char(char) for char in text]


def _of_char(char: str) -> Chord:
    if char in _PLAIN:
        return (_PLAIN[char],)
    if char in _SHIFTED:
        return (_SHIFT, _PLAIN[_SHIFTED[char]])
    raise InvalidSpec(f"no key of a US keyboard gives {char!r}: write it into a file, and paste it from there")


def chord(words: str) -> Chord:
    """The keys of `ctrl-alt-delete`, `shift-f3`, `enter`, `a`: names joined by `-`, the last may be any character.
    Letters after another key are small ones: `Ctrl-C` is no other than `ctrl-c`.

    Raises:
        InvalidSpec: One of them is no key; the message lists what there is.
    """
    keys: list[str] = []
    rest = words
    while rest:
        name, separator, after = rest.partition("-")
        if not name or (separator and not after):  # the minus itself
            name, after = rest, ""
        keys += _of_word(name.lower() if keys and name.isalpha() else name)
        rest = after
    if not keys or len(keys) > CHORD_KEYS_MAX:
        raise InvalidSpec(f"{words[:80]!r} is not between 1 and {CHORD_KEYS_MAX} keys")
    return tuple(dict.fromkeys(keys))


def _of_word(word: str) -> Chord:
    known = _NAMED.get(word.lower().replace("_", ""))
    if known is not None:
        return (known,)
    if len(word) == 1:
        return _of_char(word)
    raise InvalidSpec(f"{word[:40]!r} is no key; there are characters, and {', '.join(_NAMED)}")
