"""Many sandboxes to one tier of waiting, told of one by one."""

from collections.abc import AsyncGenerator, Mapping, Sequence

from barchan.model.tiers import Tier, TierChange, TierRequest
from barchan.sdk.checks import checked_labels
from barchan.sdk.transport import Call, Transport, encode, records

TIER_MANY = Call("tier_many", TierChange)
QUIET_S = 600.0  # between two of them


async def bring(
    transport: Transport, tier: Tier, labels: Mapping[str, str] | None, sandbox_ids: Sequence[str]
) -> AsyncGenerator[TierChange, None]:
    """A record of each as it is there, or refused; with neither labels nor ids: of every sandbox of the node."""
    asked = TierRequest(
        tier=tier,
        labels=checked_labels(labels or {}),
        sandbox_ids=tuple(sandbox_ids),
        all=not labels and not sandbox_ids,
    )
    response = await transport.open(TIER_MANY, TIER_MANY.target(), encode(asked), timeout_s=QUIET_S)
    try:
        async for change in records(response, TIER_MANY, quiet_s=QUIET_S):
            yield change
    finally:
        response.close()
