"""The backend that a real node chooses, and the doctor's boots."""

import asyncio
from pathlib import Path

import pytest

import barchan
from barchan import InvalidSpec, Zygote
from barchan.cli.backend_checks import BackendCheck, Report, with_boots
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]
SMALL = {"memory_mib": 64, "disk_mib": 64}


@pytest.fixture
def client(node: NodeProcess) -> barchan.Client:
    return barchan.connect(f"unix://{node.socket}")


def test_the_strongest_that_has_what_is_asked_for(client: barchan.Client) -> None:
    """Only containers have a warm interpreter and are no mere workers; the info says what spoke against the others."""
    wishes = {"backend": "auto", "zygote": Zygote(), "create_id": "chosen", **SMALL}
    with client, client.create("debian", **wishes) as sandbox:
        info = sandbox.info()
        assert info.spec.backend == "container"
        assert info.backend_reason.startswith("container is the strongest isolation that fits")
        assert "not gvisor: it has no zygote" in info.backend_reason
        assert client.create("debian", **wishes).id == sandbox.id  # asked again, it is that one


def test_a_tight_budget(client: barchan.Client) -> None:
    """What is known to start in time, and else an error that says what each would take."""
    with client:
        with client.create("debian", **SMALL) as sandbox:  # so that there is a time that was seen
            assert sandbox.info().backend_reason == ""
        with pytest.raises(InvalidSpec, match=r"container: a start takes .* \(as it did here\).*start_within_s=1e-05"):
            client.create("debian", backend="auto", start_within_s=0.00001, **SMALL)
        with client.create(
            "debian", backend="auto", start_within_s=60, needs=["fork"], zygote=Zygote(), **SMALL
        ) as sandbox:
            assert sandbox.exec(["true"]).ok


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"start_within_s": 1.0}, 'goes with backend="auto"'),
        ({"needs": ["own_kernel"]}, "which needs own_kernel: it has no own_kernel"),
        ({"backend": "auto", "needs": ["screen"]}, "no backend fits"),
        ({"backend": "auto", "needs": "screen"}, "a list"),
    ],
)
def test_what_can_not_be(client: barchan.Client, options: dict[str, object], told: str) -> None:
    """A wish that nothing fulfils is refused before anything starts, with what each backend lacks."""
    with client, pytest.raises(InvalidSpec, match=told):
        client.create("debian", **options, **SMALL)  # type: ignore[arg-type]


def test_the_doctors_boots(images: Path, tmp_path: Path) -> None:
    """One that runs is told with its times; one that is not there, with why."""
    (tmp_path / "images").symlink_to(images)
    given = [
        BackendCheck(name="container", isolation="container", ok=True, kinds=("root",)),
        BackendCheck(name="nowhere", isolation="container", ok=True, kinds=("root",)),
        BackendCheck(name="unready", isolation="container", ok=False, why="no x", remedy="get x"),
    ]
    try:
        checks = with_boots(Report(requirements=[], backends=given), tmp_path, lambda text: None).backends
    finally:
        asyncio.run(_shut_down(tmp_path))
    assert [check.ok for check in checks] == [True, False, False]
    assert all(ms is not None and ms > 0 for ms in (checks[0].first_ms, checks[0].again_ms, checks[0].exec_ms))
    assert "no backend 'nowhere'" in checks[1].why
    assert checks[2] == given[2]


async def _shut_down(state_dir: Path) -> None:
    """Not to wait for its idle time."""
    reader, writer = await asyncio.open_unix_connection(str(state_dir / "node.sock"))
    writer.write(b"POST /v1/node/shutdown HTTP/1.1\r\nHost: node\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    await reader.read()
    writer.close()
    for _ in range(600):
        if not (state_dir / "node.sock").exists():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the node did not end")
