"""A guest tries to see, signal or open processes of others. Argument: the host's pid of one of them."""

import os
import signal
import sys

from tests.security.guest import kit

HOST_PID = sys.argv[1]


def listed() -> kit.Evidence:
    """Process 1 and this program's family are all there may be: the test runs nothing else here."""
    own = {1, os.getpid(), os.getppid()}
    seen = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    others = [pid for pid in seen if pid not in own]
    return f"{len(others)} others" if others else None


def command_line() -> kit.Evidence:
    return kit.read(f"/proc/{HOST_PID}/cmdline").decode("utf-8", "replace") or None


def signal_any() -> kit.Evidence:
    """Signal 0 asks only whether one may."""
    own = {1, os.getpid(), os.getppid()}
    reached = []
    for pid in range(2, 40000):
        try:
            os.kill(pid, 0)
        except PermissionError:
            reached.append(pid)  # it is there
        except ProcessLookupError:
            continue
        else:
            if pid not in own:
                reached.append(pid)
    return f"{reached[:20]}" if reached else None


def everybody() -> kit.Evidence:
    """-1 means everyone but the sender: with nobody else there, there is nobody to reach."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.kill(-1, 0)
    return None


ATTEMPTS: dict[str, kit.Attempt] = {
    "list": listed,
    "command line": command_line,
    "signal": signal_any,
    "signal all": everybody,
}

if __name__ == "__main__":
    kit.run(ATTEMPTS)
