"""Numbers by name whose sum is known without adding them up. Pure."""

from typing import Generic, TypeVar

N = TypeVar("N", int, float)


class Summed(Generic[N]):
    """A mapping to numbers, and their `total`."""

    __slots__ = ("_numbers", "_zero", "total")

    def __init__(self, zero: N) -> None:
        self._numbers: dict[str, N] = {}
        self._zero: N = zero
        self.total: N = zero

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def __getitem__(self, name: str) -> N:
        return self._numbers[name]

    def __setitem__(self, name: str, number: N) -> None:
        self.total += number - self._numbers.get(name, self._zero)
        self._numbers[name] = number

    def pop(self, name: str) -> N | None:
        """Remove a number and return it; None if there was none."""
        number = self._numbers.pop(name, None)
        if number is not None:
            self.total = self.total - number if self._numbers else self._zero  # what rounding left goes with the last
        return number
