"""Leave a daemon behind that is hard to find: another session, no descriptors, another name, deaf to signals, and never
the same process for long. It counts in /tmp/beat. Then wait to be killed."""

import ctypes
import os
import signal
import time

PR_SET_NAME = 15
STEP_S = 0.01


def beat(count: int) -> None:
    with open("/tmp/beat.new", "w") as file:
        file.write(str(count))
    os.rename("/tmp/beat.new", "/tmp/beat")


def vanish() -> None:
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue  # KILL, STOP and those of the C library
    os.setsid()
    os.chdir("/")
    os.closerange(0, 256)
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"kthreadd", 0, 0, 0)


def hop() -> None:
    """Each process lives for one beat: a child goes on."""
    for count in range(2000):
        beat(count)
        time.sleep(STEP_S)
        if os.fork():
            os._exit(0)
        os.setsid()
    os._exit(0)


if __name__ == "__main__":
    if os.fork() == 0:
        vanish()
        if os.fork():
            os._exit(0)
        hop()
    time.sleep(600)
