"""What all suites share: host requirements that skip by name, and a node of the suite's own that must leave nothing."""

import fcntl
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from barchan.errors import NotFound
from barchan.image.store import ImageStore
from barchan.sdk.endpoint import default_state_dir
from tests.nodes import NodeProcess
from tests.requirements import ONE_OF, PROBES, must_run

# Ignored by whoever started this in the background, it would be ignored by every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# How fast an example runs says nothing on a busy machine; each test has its own time-out.
settings.register_profile("barchan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("barchan")


@functools.cache
def _missing(name: str) -> str:
    if name not in PROBES:
        raise pytest.UsageError(f"unknown requirement {name!r}; known: {', '.join(PROBES)}")
    return PROBES[name]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose host requirement is unmet, naming it; fail it where the requirement is owed."""
    for marker in item.iter_markers("requires"):
        for name in marker.args:
            if reason := _missing(name):
                if name in must_run():
                    pytest.fail(f"requirement {name} must be met here: {reason}", pytrace=False)
                pytest.skip(f"{name}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, where everything is installed, no test may skip for any other reason either."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not reason.startswith(tuple(f"Skipped: {name}:" for name in ONE_OF)):
            report.outcome = "failed"
            report.longrepr = f"in CI no test may skip. {reason}"
    return report


@pytest.fixture(scope="session")
def images() -> Path:
    """The machine's image store, with the base image `debian` in it (built if it is not there)."""
    root = default_state_dir() / "images"
    try:
        ImageStore(root).resolve("debian")
    except NotFound:
        subprocess.run([sys.executable, "-m", "barchan.cli", "image", "build", "debian"], check=True)
    return root


@pytest.fixture(scope="session")
def with_pytest(images: Path) -> str:
    """The name of an image with git and pytest in the machine's store (built if it is not there, by one at a time)."""
    name = "debian-pytest"
    turn = os.open(images, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            ImageStore(images).resolve(name)
        except NotFound:
            words = ("image", "build", "debian", "--name", name, "--include", "git,python3-pytest")
            subprocess.run([sys.executable, "-m", "barchan.cli", *words], check=True)
    finally:
        os.close(turn)
    return name


@pytest.fixture(scope="session")
def make_lasting_node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], NodeProcess]]:
    """Makes nodes, not yet started, that last as long as the run. Each is ended, and must leave nothing on the host."""
    made: list[NodeProcess] = []

    def make() -> NodeProcess:
        made.append(NodeProcess(tmp_path_factory.mktemp("node"), images))
        return made[-1]

    yield make
    assert [line for node in made for line in node.end()] == []


@pytest.fixture(scope="module")
def make_node(make_lasting_node: Callable[[], NodeProcess]) -> Iterator[Callable[[], NodeProcess]]:
    """Makes nodes for the tests of one module, which may kill theirs: what those leave is looked for at the run's end,
    when their supervisors' grace is over, too.
    """
    made: list[NodeProcess] = []

    def make() -> NodeProcess:
        made.append(make_lasting_node())
        return made[-1]

    yield make
    assert [line for node in made if node.process is not None for line in node.end()] == []


_SHARED = pytest.StashKey[NodeProcess]()
LEASE_GRACE_S = 15.0  # sandboxes of a client that died live for its lease's grace, 10 s unless asked otherwise


@pytest.fixture(scope="session")
def node(make_lasting_node: Callable[[], NodeProcess], pytestconfig: pytest.Config) -> NodeProcess:
    """One started node that the whole run shares."""
    node = pytestconfig.stash[_SHARED] = make_lasting_node()
    node.start()
    return node


@pytest.fixture(scope="module", autouse=True)
def _no_sandbox_outlives_its_module(pytestconfig: pytest.Config) -> Iterator[None]:
    """A module leaves no sandbox on the shared node."""
    yield
    node = pytestconfig.stash.get(_SHARED, None)
    if node is not None and node.process is not None:
        assert node.wait_empty(LEASE_GRACE_S) == []
