"""The synchronous face of a prepared pool."""

from types import TracebackType
from typing import Self, Unpack

from barchan.sdk.aio.fork import FORK_TIMEOUT_S
from barchan.sdk.aio.prepared import AsyncPrepared, PreparedStatistics
from barchan.sdk.background import run
from barchan.sdk.options import CreateOptions
from barchan.sdk.sandbox import Sandbox


class Prepared:
    """A pool of one set-up, made by `client.prepare()`; as a context it is closed on exit, and with its client it ends.

    Any thread may use it, of the process that it was made in.
    """

    def __init__(self, twin: AsyncPrepared) -> None:
        """Not called by users."""
        self._twin = twin

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def statistics(self) -> PreparedStatistics:
        return self._twin.statistics()

    def create(self, *, timeout_s: float = FORK_TIMEOUT_S, **options: Unpack[CreateOptions]) -> Sandbox:
        """A sandbox with the set-up done, that nobody else has: one that is ready, or, if none is, a fork made now.

        With options in which it is to differ, as for `sandbox.fork()`, it is always a fork made now. It lives on when
        the pool is closed.

        Raises:
            SetupFailed: What all are forked from had ended, and the set-up that was run again has failed.
            CapacityError, NotSnapshotable, ...: As `sandbox.fork()`.
        """
        return Sandbox(run(self._twin.create(timeout_s=timeout_s, **options)))

    def close(self) -> None:
        """End what is ready and what it was forked from; those handed out live on."""
        run(self._twin.close())
