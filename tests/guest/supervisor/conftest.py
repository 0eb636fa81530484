"""One supervisor per test, which must leave nothing; one small layer for all."""

import fcntl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guest.supervisor.driver import BUILD, ROOT, Client, Supervisor, make_layer


@pytest.fixture(scope="session")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system, with the programs built first; parallel runs take turns."""
    with open(tmp_path_factory.getbasetemp().parent / "barchan-supervisor.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        BUILD.mkdir(parents=True, exist_ok=True)
        programs = ("build/barchan-init", "build/barchan-supervisor")
        subprocess.run(["make", "-s", "-C", ROOT / "guest", *programs], check=True)
    root = tmp_path_factory.mktemp("layer")
    make_layer(root)
    return root


@pytest.fixture
def make_supervisor(tmp_path_factory: pytest.TempPathFactory, layer: Path) -> Iterator[Callable[[], Supervisor]]:
    """Makes supervisors, not yet started; each is ended, and nothing of it may be left."""
    made: list[Supervisor] = []

    def make() -> Supervisor:
        made.append(Supervisor(tmp_path_factory.mktemp("supervisor"), layer))
        return made[-1]

    yield make
    assert [line for supervisor in made for line in supervisor.end()] == []


@pytest.fixture
def supervisor(make_supervisor: Callable[[], Supervisor]) -> Supervisor:
    supervisor = make_supervisor()
    assert supervisor.start() == "ready"
    return supervisor


@pytest.fixture
def client(supervisor: Supervisor) -> Client:
    return supervisor.connect()
