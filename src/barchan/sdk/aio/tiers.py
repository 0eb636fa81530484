"""Many sandboxes to one tier of waiting, told of one by one."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from barchan.model.tiers import Tier, TierChange, TierRequest
from barchan.sdk.checks import checked_labels
from barchan.sdk.transport import Call, Transport, encode, records

TIER_MANY = Call("tier_many", TierChange)
QUIET_S = 600.0  # between two of them
Progress = Callable[[TierChange], None]


async def bring(
    transport: Transport,
    tier: Tier,
    labels: Mapping[str, str] | None,
    sandbox_ids: Sequence[str],
    progress: Progress | None,
) -> list[TierChange]:
    """What became of each; with neither labels nor ids: of every sandbox of the node."""
    asked = TierRequest(
        tier=tier,
        labels=checked_labels(labels or {}),
        sandbox_ids=tuple(sandbox_ids),
        all=not labels and not sandbox_ids,
    )
    response = await transport.open(TIER_MANY, TIER_MANY.target(), encode(asked), timeout_s=QUIET_S)
    found: dict[str, TierChange] = {}
    try:
        await hear(records(response, TIER_MANY, quiet_s=QUIET_S), found, progress)
    finally:
        response.close()
    return list(found.values())


async def hear(changes: AsyncIterator[TierChange], found: dict[str, TierChange], progress: Progress | None) -> None:
    """Keep the last record of each sandbox, and tell of all."""
    async for change in changes:
        found[change.sandbox_id] = change
        if progress is not None:
            progress(change)
