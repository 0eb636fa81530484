"""Take of what all sandboxes and the host share, until there is no more of it for this user, and keep it.

Argument: what to take. Prints how much there was.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
SIGNAL = 40
TAKEN: list[object] = []
ENOUGH = 200_000


def inotify() -> bool:
    return bool(libc.inotify_init1(0) >= 0)


def signals() -> bool:
    """Queued real-time signals: timers, too, come out of this account."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [SIGNAL])
    libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return bool(libc.sigqueue(os.getpid(), SIGNAL, None) == 0)


def queues() -> bool:
    """POSIX message queues of the default size."""
    return bool(libc.mq_open(f"/q{os.getpid()}-{len(TAKEN)}".encode(), os.O_CREAT | os.O_RDWR, 0o600, None) >= 0)


def terminals() -> bool:
    TAKEN.append(os.openpty())
    return True


def tcp() -> bool:
    """Bytes on their way between two sockets; counted in MiB."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    TAKEN.append((sender, receiver))
    sender.setblocking(False)
    try:
        for _ in range(1000):
            sender.send(bytes(65536))
    except BlockingIOError:
        pass
    return len(TAKEN) < 100


def take(what: str) -> int:
    kinds = {"inotify": inotify, "signals": signals, "queues": queues, "terminals": terminals, "tcp": tcp}
    count = 0
    try:
        while count < ENOUGH and kinds[what]():
            count += 1
            if what == "queues":
                TAKEN.append(count)
    except OSError:
        return count
    return count


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (20000, 20000))
    print(take(sys.argv[1]), flush=True)
    time.sleep(600)
