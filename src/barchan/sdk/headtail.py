"""The beginning and the end of a stream of bytes, half of a bound each."""

from collections import deque


class HeadTail:
    """Keeps at most `bytes_max` bytes, and a piece more while it is being fed."""

    def __init__(self, bytes_max: int) -> None:
        self._head_max = (bytes_max + 1) // 2
        self._tail_max = bytes_max - self._head_max
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._cut = False

    def feed(self, data: bytes) -> None:
        room = self._head_max - len(self._head)
        self._head += data[:room]
        if rest := data[room:] if room > 0 else data:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail and self._tail_bytes - len(self._tail[0]) >= self._tail_max:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._tail_bytes -= len(self._tail.popleft())
        self._cut = True

    def content(self) -> tuple[bytes, bool]:
        """What was kept, and whether bytes between head and tail were left out."""
        tail = b"".join(self._tail)
        kept = tail[max(0, len(tail) - self._tail_max) :]
        return bytes(self._head) + kept, self._cut or len(kept) < len(tail)
