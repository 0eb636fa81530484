"""How fast this host's time stamp counter runs: a machine that is emulated on it counts time by the same one.

Such a machine could find out itself, but on a busy host it fails, and then has a clock of 10 ms.
"""

import ctypes
import mmap
import time
from functools import cache

APART_S = 0.05
ROUND_KHZ = 100  # 50 millionth parts at most of any counter there is: who boots twice gets the same
TRIES = 5
_READ_COUNTER = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret


@cache
def tsc_khz() -> int:
    """In kHz, rounded to 100; 0 where it can't be read. The first call blocks for some 50 ms."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return 0
    page.write(_READ_COUNTER)
    code = (ctypes.c_char * len(_READ_COUNTER)).from_buffer(page)
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(code))
    first = _moment(read)
    time.sleep(APART_S)
    second = _moment(read)
    del read, code
    page.close()
    khz = (second[1] - first[1]) * 1_000_000 / (second[0] - first[0])
    return round(khz / ROUND_KHZ) * ROUND_KHZ


def _moment(read: "ctypes._FuncPointer") -> tuple[int, int]:
    """The time in ns and the counter then: of several tries the one that took least time."""
    tries = []
    for _ in range(TRIES):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        counter = read()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        tries.append((after - before, (before + after) // 2, counter))
    _, when, counter = min(tries)
    return when, counter
