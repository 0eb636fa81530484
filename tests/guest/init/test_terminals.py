"""Terminals: what a program's last moments on one look like from outside."""

import pytest

from tests.guest.init.driver import FOLLOWED, PTY, Connection

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(60)]
LEAVES = "import os, time; print('last', flush=True); os.closerange(0, 3); time.sleep(0.02); os._exit(3)"


def test_who_closes_a_terminal_before_its_end_is_not_hung_up(connection: Connection) -> None:
    """Programs close their streams, and then exit: the exit code is theirs, and no SIGHUP comes in between."""
    for _ in range(5):
        output = connection.run(["/usr/bin/python3", "-SIc", LEAVES], flags=FOLLOWED | PTY)
        assert (output.code, output.out) == (3, b"last\r\n")


def test_a_terminal_that_was_let_go_can_be_opened_again(connection: Connection) -> None:
    """By a program that had closed it: what it writes then is heard."""
    output = connection.sh("exec <&- >&- 2>&-; sleep 0.1; echo again > /dev/tty", flags=FOLLOWED | PTY)
    assert (output.code, output.out) == (0, b"again\r\n")
