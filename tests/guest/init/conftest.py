"""One init per test, killed and looked at afterwards; with real cgroup leaves where a test asks for them."""

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guest.init.driver import Connection
from tests.guest.init.guest import INIT, ROOT, Guest, Leaf


@pytest.fixture(scope="session", autouse=True)
def _built(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The program is fresh, unless BARCHAN_INIT names another build; parallel runs take turns."""
    if "BARCHAN_INIT" in os.environ:
        return
    with open(tmp_path_factory.getbasetemp().parent / "barchan-init.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        INIT.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["make", "-s", "-C", ROOT / "guest", "build/barchan-init"], check=True)


@pytest.fixture
def make_guest() -> Iterator[Callable[..., Guest]]:
    made: list[Guest] = []

    def make(**options: object) -> Guest:
        made.append(Guest(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for guest in made:
        guest.close()


@pytest.fixture
def guest(make_guest: Callable[..., Guest]) -> Guest:
    return make_guest()


@pytest.fixture
def connection(guest: Guest) -> Connection:
    """An authenticated connection after HELLO without leaves."""
    connection = guest.connect()
    connection.hello()
    return connection


@pytest.fixture
def leaf() -> Iterator[Leaf]:
    """Cgroups that must be empty, and can be removed, once the init is gone."""
    leaf = Leaf(f"barchan-init-test-{os.getpid()}-{time.monotonic_ns()}")
    leaf.create()
    yield leaf
    leaf.remove()


@pytest.fixture
def contained(leaf: Leaf, make_guest: Callable[..., Guest]) -> Iterator[tuple[Connection, Leaf, Guest]]:
    """A connection of an init in cgroups, with the guest leaf given."""
    guest = make_guest(cgroup=leaf.base)
    connection = guest.connect()
    with leaf.descriptors() as (procs, directory):
        connection.hello([(0, procs, directory)])
    yield connection, leaf, guest
    guest.close()


@pytest.fixture
def accounts(tmp_path: Path) -> dict[str, Path]:
    """Account files to mount over the machine's."""
    passwd, group = tmp_path / "passwd", tmp_path / "group"
    passwd.write_text("root:x:0:0::/root:/bin/sh\nann:x:2001:2002::/home/ann:/bin/sh\nbob:x:2003:2003::/:/bin/sh\n")
    group.write_text("root:x:0:\nann:x:2002:\nteam:x:2010:bob,ann\nmore:x:2011:ann\nothers:x:2012:annabel,xann\n")
    for path in (passwd, group):
        path.chmod(0o644)
    tmp_path.chmod(0o755)
    return {"/etc/passwd": passwd, "/etc/group": group}
