"""What a client asks of a node about runs: who holds their leases, and to put them aside."""

import getpass
import os
import socket
import time

from barchan.errors import NotFound
from barchan.model.lease import KEEP_S, PreemptRequest
from barchan.model.node import LeaseInfo
from barchan.model.tiers import TierChange
from barchan.sdk.aio.tiers import Progress, hear
from barchan.sdk.checks import check_seconds
from barchan.sdk.http1 import Response
from barchan.sdk.lease import Lease
from barchan.sdk.transport import Call, Transport, encode, records

LEASES = Call("lease_list", list[LeaseInfo])
PREEMPT = Call("lease_preempt", TierChange)
QUIET_S = 600.0  # between two sandboxes


class RunCalls:
    """A part of `AsyncClient`."""

    _transport: Transport
    _lease: Lease

    def use_tokens(self, count: int) -> None:
        """Count prompt and completion tokens of a model call towards the budget of this client's lease.

        `rollout.record` does so by itself; this is for model calls beside rollouts.
        """
        self._lease.use_tokens(count)

    async def leases(self, *, ended: bool = False) -> "list[LeaseInfo]":
        """The leases of the node: what each run may use, has used, and who holds it.

        Args:
            ended: Those that ended within the last day, too; they come first.
        """
        return await self._transport.value(LEASES, LEASES.target({"ended": ended or None}))

    async def preempt(
        self, run: str, *, keep_s: float = KEEP_S, by: str = "", progress: Progress | None = None
    ) -> "list[TierChange]":
        """Put a run aside: all its sandboxes stand still at once, in the middle of whatever they do, and then go to
        disk. Whoever drives it gets `Preempted`; nothing of it is lost.

        Whoever goes on with the run finds them as they were: they wake with the first request. Repeating is harmless,
        and cancelling ends nothing of it.

        Args:
            run: Its name, or the id of a lease.
            keep_s: How long its sandboxes are kept for that; then they end. They use no seconds of its budget.
            by: Who wants it, for those who are told. Empty: this user and host.
            progress: Told of each sandbox as it stands still (`paused`), and again as it is on disk or stays paused.

        Returns:
            Where each sandbox is, once all have come as far as they can; in `refused` why one is not on disk.

        Raises:
            NotFound: No run has a lease here by that name or id; the message says how one has ended.
        """
        check_seconds(keep_s=keep_s)
        known = [lease for lease in await self.leases(ended=True) if run in (lease.lease_id, lease.labels.get("run"))]
        found = [lease.lease_id for lease in known if lease.end is None]
        if not found:
            raise NotFound(_none_left(run, known), lease_id=run)
        body = encode(PreemptRequest(keep_s=keep_s, by=by or _name()))
        responses: list[Response] = []
        changes: dict[str, TierChange] = {}
        try:
            for lease_id in found:  # all of them stand still before the first is told of
                target = PREEMPT.target(lease_id=lease_id)
                responses.append(await self._transport.open(PREEMPT, target, body, timeout_s=QUIET_S))
            for response in responses:
                await hear(records(response, PREEMPT, quiet_s=QUIET_S), changes, progress)
        finally:
            for response in responses:
                response.close()
        return list(changes.values())


def _none_left(run: str, known: list[LeaseInfo]) -> str:
    if not known or (end := known[-1].end) is None:
        return f"no run {run!r} has a lease on this node (try: a name or id that barchan ps --runs lists)"
    ago_s = max(0, round(time.time() - end.at_unix_s))
    return (
        f"run {run!r} is over, and nothing of it is left to put aside: {end.why}, {ago_s} s ago "
        "(try: barchan ps --runs, for those that go on)"
    )


def _name() -> str:
    try:
        user = getpass.getuser()
    except OSError:  # one without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:128]
