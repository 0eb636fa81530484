"""`barchan pool`."""

import barchan
from barchan.cli.common import DEFAULTS, OK, Common, print_json, print_table


def pool(*, keep: int | None = None, common: Common = DEFAULTS) -> int:
    """Show the warm pool of a node: sandboxes prepared ahead of their creates.

    For example:

        barchan pool
        barchan pool --keep 64

    Args:
        keep: From now on keep so many ready, at least; 0: none.
    """
    with barchan.connect(**common.connection) as client:
        found = client.pool() if keep is None else client.set_pool(keep)
    if common.json:
        print_json(found)
        return OK
    rows = [
        [
            f"{found.ready} of {found.wanted}",
            str(found.filling),
            str(found.claimed_total),
            str(found.cold_total),
            str(found.died_total),
            f"{found.fill_ms:.1f} ms",
        ]
    ]
    print_table(("READY", "FILLING", "CLAIMED", "COLD", "DIED", "FILL"), rows, empty="")
    return OK
