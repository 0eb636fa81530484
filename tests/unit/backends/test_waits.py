"""Which calls of a program end by themselves."""

import platform
import stat

import pytest

from barchan.backends.container import waits
from barchan.backends.container.waits import is_endless

MACHINE = platform.machine()
NEVER = 0xFFFFFFFF


def argument(at: int, value: int) -> list[int]:
    """Six arguments, one of them of weight; the others look like pointers."""
    return [value if index == at else 0x7F0000000000 for index in range(6)]


def test_a_call_waits_for_ever_only_without_a_limit_of_time() -> None:
    """By a limit in milliseconds, by a pointer to one, or none at all."""
    for number, at in waits._MILLISECONDS[MACHINE].items():
        assert is_endless(number, argument(at, NEVER), lambda fd: 0)
        assert not is_endless(number, argument(at, 0), lambda fd: 0)
        assert not is_endless(number, argument(at, 0x7FFFFFFF), lambda fd: 0)
    for number, at in waits._POINTER[MACHINE].items():
        assert is_endless(number, argument(at, 0), lambda fd: 0)
        assert not is_endless(number, argument(at, 0x7FFD12345678), lambda fd: 0)
    for number in waits._ENDLESS[MACHINE]:
        assert is_endless(number, argument(0, 1), lambda fd: 0)


@pytest.mark.parametrize(
    ("mode", "endless"),
    [
        (stat.S_IFIFO, True),
        (stat.S_IFSOCK, True),
        (stat.S_IFCHR, True),  # a terminal
        (stat.S_IFREG, False),  # it waits for a disk, which answers
        (0, False),  # of the kernel's own, such as a timer
    ],
)
def test_a_read_waits_for_ever_at_what_others_feed(mode: int, endless: bool) -> None:
    """What a disk or the kernel itself feeds, comes by itself."""
    for number in waits._FD[MACHINE]:
        assert is_endless(number, argument(0, 7), lambda fd: mode if fd == 7 else 0) is endless


def test_a_call_that_is_not_known_may_end() -> None:
    """As one that sleeps."""
    assert not is_endless(100_000, argument(0, 0), lambda fd: stat.S_IFIFO)
    assert not is_endless(35 if MACHINE == "x86_64" else 101, argument(0, 0), lambda fd: 0)  # nanosleep
