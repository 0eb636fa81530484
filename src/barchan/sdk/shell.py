"""The synchronous face of a shell."""

from types import TracebackType
from typing import Any, Self

from barchan.model.sandbox import DEFAULT_EXEC_TIMEOUT_S
from barchan.sdk.aio.shell import AsyncShell, ShellPoint, ShellResult, ShellRun
from barchan.sdk.background import run


class Shell:
    """Runs one command at a time, and keeps directory, variables and functions between them.

    Picklable between two commands; one process at a time goes on with it.
    """

    def __init__(self, twin: AsyncShell) -> None:
        self._twin = twin

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._twin,)

    @property
    def point(self) -> ShellPoint | None:
        """Where it stands between two commands, for whoever goes on with it; None before the first command."""
        return self._twin.point

    def begin(self) -> ShellRun:
        """Make sure that there is a shell, and say where the next command will stand in it."""
        return run(self._twin.begin())

    def run(
        self,
        command: str,
        *,
        timeout_s: float = DEFAULT_EXEC_TIMEOUT_S,
        idle_timeout_s: float | None = None,
        begun: ShellRun | None = None,
    ) -> ShellResult:
        """Run a command in the shell. Its stdin is empty; what background jobs wrote since the last run comes with it.

        A time-out and an interrupt kill every process below the shell, also earlier background jobs; the shell and what
        it knows live on, unless it is the shell itself that does not come back in 2 s.

        Args:
            idle_timeout_s: Time out when it writes nothing for this long.
            begun: What `begin` gave for this command, to this handle or another, whose process was killed then: what of
                the command the shell has taken already it does not take again.

        Raises:
            NotBegun: The shell of `begun` has ended or was never there, and had not taken the command.
        """
        return run(self._twin.run(command, timeout_s=timeout_s, idle_timeout_s=idle_timeout_s, begun=begun))

    def close(self) -> None:
        """End the shell and what runs below it."""
        run(self._twin.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
