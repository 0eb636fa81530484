"""Take of one thing until there is no more, or as much as was asked for; then keep asking for a while.

Arguments: what, how much at most, for how many seconds to go on. Prints how much there was, and the errno that ended
it, 0 for none.
"""

import ctypes
import errno
import os
import socket
import sys
import time

MIB = 1 << 20
AT = "/var/bomb"
libc = ctypes.CDLL(None, use_errno=True)
HELD: list[object] = []


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def fork() -> None:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)


def zombie() -> None:
    """A process that has ended, which nobody asks for."""
    if os.fork() == 0:
        os._exit(0)


def memory() -> None:
    HELD.append(b"x" * MIB)


def disk() -> None:
    with open(f"{AT}/{len(HELD)}", "wb", buffering=0) as file:
        if file.write(bytes(MIB)) < MIB:
            raise OSError(errno.ENOSPC, "")
    HELD.append(None)


def entry() -> None:
    """A directory: what a file system has beside its data."""
    os.mkdir(f"{AT}/{len(HELD)}")
    HELD.append(None)


def descriptor() -> None:
    os.open("/dev/null", os.O_RDONLY)


def inotify() -> None:
    checked(libc.inotify_init1(0))


def pipe() -> None:
    """With as much in it as it takes."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    os.write(writer, bytes(65536))


def stream() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    one.send(bytes(65536))
    HELD.append((one, other))


def output() -> None:
    os.write(2, b"x" * MIB)


BOMBS = {bomb.__name__: bomb for bomb in (fork, zombie, memory, disk, entry, descriptor, inotify, pipe, stream, output)}


def main() -> None:
    bomb, most, seconds = BOMBS[sys.argv[1]], int(sys.argv[2]), float(sys.argv[3])
    os.makedirs(AT, exist_ok=True)
    got, problem = 0, 0
    until = time.monotonic() + seconds
    while got < most and not problem:
        try:
            bomb()
            got += 1
        except OSError as error:
            problem = error.errno or 0
    while time.monotonic() < until:
        try:
            if problem or sys.argv[1] == "output":
                bomb()
            else:
                time.sleep(0.1)
        except OSError:
            continue
    try:
        print(got, problem, flush=True)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
