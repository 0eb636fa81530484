"""Nearest-rank percentiles: each is one of the values that were measured."""

import math
from collections.abc import Sequence

from msgspec import Struct


class Percentiles(Struct, frozen=True, kw_only=True):
    """None when nothing was measured."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


def percentile(values: Sequence[float], share: float) -> float | None:
    if not values:
        return None
    return round(sorted(values)[math.ceil(len(values) * share) - 1], 3)


def percentiles(values: Sequence[float]) -> Percentiles:
    ordered = sorted(values)
    return Percentiles(p50=percentile(ordered, 0.50), p95=percentile(ordered, 0.95), p99=percentile(ordered, 0.99))
