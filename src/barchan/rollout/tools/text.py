"""What a policy reads of an output: text, bounded, with what is missing said where it is missing."""

from msgspec import Struct


class Shown(Struct, frozen=True):
    """Text for a policy; `truncated` when the middle was left out."""

    text: str
    truncated: bool = False


def shown(data: bytes, chars_max: int, *, bytes_total: int | None = None, is_cut: bool = False) -> Shown:
    """An output as text, head and tail of it where it is too long.

    Args:
        data: What was kept of it: all, or a head and a tail that are each longer than half of `chars_max`.
        bytes_total: How many bytes were written, where that is known.
        is_cut: `data` is not all of it.
    """
    text = data.decode("utf-8", "replace")
    if len(text) <= chars_max:
        return Shown(text, is_cut)
    head, tail = text[: (chars_max + 1) // 2], text[len(text) - chars_max // 2 :]
    left_out = f"{len(text) - chars_max} characters"
    if is_cut:
        missing = (bytes_total or len(data)) - len(head.encode()) - len(tail.encode())
        left_out = f"{missing} bytes" if bytes_total is not None else f"more than {missing} bytes"
    return Shown(f"{head}\n[... {left_out} left out here ...]\n{tail}", True)


def joined(*parts: str) -> str:
    """Parts one below the other, the empty ones left out."""
    return "\n".join(part.rstrip("\n") for part in parts if part.strip("\n"))
