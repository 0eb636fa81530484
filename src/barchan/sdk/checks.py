"""What callers pass, checked before anything is sent or waited for."""

from collections.abc import Mapping
from typing import Any

from barchan.errors import InvalidSpec
from barchan.model.sandbox import DURATION_S_MAX


def check_seconds(*, can_be_zero: bool = False, **durations: float | None) -> None:
    """Refuse what is no duration: text, NaN, negative, or over a year. None, where the type allows it, is no bound."""
    for name, value in durations.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidSpec(f"{name} is a number of seconds, not {type(value).__name__}")
        if not (0 < value <= DURATION_S_MAX or (can_be_zero and value == 0)):
            bound = "0 or more" if can_be_zero else "more than 0"
            raise InvalidSpec(f"{name}={value!r}: give {bound} seconds, at most {DURATION_S_MAX:.0f} (a year)")


def check_count(least: int = 1, **counts: Any) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidSpec(f"{name}={value!r}: give a whole number, {least} or more")


def checked_bytes(what: str, data: Any) -> bytes:
    """What goes to a program's stdin: bytes, or text in UTF-8. A number is neither, though `bytes()` takes it."""
    if isinstance(data, str):
        return data.encode()
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidSpec(f"{what} is text or bytes, not {type(data).__name__}")
    return bytes(data)


def checked_env(env: Any) -> dict[str, str]:
    names = _text_keys("env", env)
    for name in names:
        if not name or "=" in name or "\0" in name:
            raise InvalidSpec(f"env name {name!r}: a name is not empty and holds neither '=' nor NUL")
    return names


def checked_labels(labels: Any) -> dict[str, str]:
    names = _text_keys("labels", labels)
    for name in names:
        if not name or "=" in name:
            raise InvalidSpec(f"label name {name!r}: a name is not empty and holds no '='")
    return names


def checked_rlimits(rlimits: Any) -> dict[str, tuple[int, int]]:
    """Names in lower case, as the node knows them."""
    limits = _text_keys("rlimits", rlimits)
    lowered = {name.lower(): pair for name, pair in limits.items()}
    if len(lowered) < len(limits):
        raise InvalidSpec(f"rlimits names one limit twice: {', '.join(limits)}")
    return lowered


def _text_keys(what: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidSpec(f"{what} is a mapping, not {type(given).__name__}")
    for name in given:
        if not isinstance(name, str):
            raise InvalidSpec(f"{what}: the name {name!r} is no text")
    return dict(given)
