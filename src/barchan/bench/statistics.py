"""Percentiles of samples, and bars that they are held against."""

from collections.abc import Sequence

from msgspec import Struct


class Percentiles(Struct, frozen=True, kw_only=True):
    """Of `count` samples in one unit, by nearest rank."""

    count: int
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Percentiles":
        ordered = sorted(samples)

        def at(percent: int) -> float:
            return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

        return cls(count=len(ordered), p50=at(50), p95=at(95), p99=at(99), max=ordered[-1])


class Bar(Struct, frozen=True, kw_only=True):
    """A promise with what was measured: held when `value` is at most (or at least) `bound`."""

    name: str
    value: float
    bound: float
    at_most: bool = True

    @property
    def is_held(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound
