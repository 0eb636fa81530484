"""Take all processes there may be and all memory, and keep them. Prints `full` when nothing of either is left."""

import os
import signal
import time

MIB = 1 << 20


def wait_for_ever() -> None:
    while True:
        time.sleep(600)


def fork_all() -> list[int]:
    children: list[int] = []
    while True:
        try:
            pid = os.fork()
        except OSError:
            return children
        if pid == 0:
            wait_for_ever()
        children.append(pid)


def largest_mib() -> int:
    """A child grows until it is killed for it, and tells of each MiB it got."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        blocks = []
        while True:
            blocks.append(b"x" * MIB)
            os.write(writer, b".")
    os.close(writer)
    os.waitpid(pid, 0)
    got = os.read(reader, 65536)
    os.close(reader)
    return len(got)


def hold(size_mib: int) -> None:
    reader, writer = os.pipe()
    if os.fork() == 0:
        blocks = [b"x" * MIB for _ in range(size_mib)]
        os.write(writer, b"." * bool(blocks))
        wait_for_ever()
    os.read(reader, 1)


if __name__ == "__main__":
    last = fork_all().pop()  # its place is for those that take memory
    os.kill(last, signal.SIGKILL)
    os.waitpid(last, 0)
    hold(largest_mib() - 1)
    print("full", flush=True)
    wait_for_ever()
