"""Memory on demand: right bytes or none, whatever the programs, the snapshot or the pager do meanwhile."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from barchan.backends.container import criu
from barchan.backends.container.pager import Pager
from barchan.errors import BackendError, SnapshotCorrupt
from barchan.snapshot.pager.keeper import Group
from barchan.snapshot.pager.link import PagerLink
from barchan.snapshot.pager.served import Served
from barchan.snapshot.pager.source import Chunks, Source
from barchan.snapshot.shelf import FOLDER, Shelf
from tests.lazy_memory import Ground, ask
from tests.leaks import parent_of, processes

pytestmark = [pytest.mark.requires("root", "cgroup", "criu"), pytest.mark.timeout(120)]

MIB = 48
RIGHT = "hashlib.sha256(ballast).hexdigest() == expected and table_is_right()"
AREAS_RIGHT = "all(area.is_right() for area in areas.values())"
WATCH = "go.set()"
MEANWHILE = [
    "shuffled() == []",
    "fork_then_drop()",
    "move()",
    "drop()",
    "unmap()",
    "grow()",
    "protect()",
    "run_program()",
    "[forked(lambda: True) for _ in range(150)] == [0] * 150",
    "forked(table_is_right) == 0",
    "not any(bytearray(30 << 20))",
]


class Dumped:
    """A program's memory as snapshot `snap_1` on a shelf, and CRIU's images without what comes on demand."""

    def __init__(self, folder: Path, ground: Ground) -> None:
        self.folder = folder
        self.ground = ground
        self.shelf = Shelf(folder / "shelf")
        self.rest = folder / "rest" / "criu"

    async def restore(self, work: Path) -> None:
        await asyncio.to_thread(self.ground.restore, self.rest, work, lazy=True)

    async def ask(self, expression: str) -> object:
        async with asyncio.timeout(60):
            return await ask(self.folder, expression)

    async def gone(self) -> None:
        """Wait until no program is left."""
        async with asyncio.timeout(30):
            while not self.ground.is_empty():
                await asyncio.sleep(0.02)

    def was_wrong(self) -> bool:
        return (self.folder / "wrong").exists()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dumped]:
    found = criu.find(Path("/nonexistent"))
    assert found is not None
    folder = tmp_path_factory.mktemp("pager")
    ground = Ground("pager", found.command)
    try:
        dumped = Dumped(folder, ground)
        dumped.shelf.start()
        ground.start(folder, MIB)
        assert asyncio.run(ask(folder, f"{RIGHT} and {AREAS_RIGHT}")) is True
        ground.dump(folder / "memory")
        dumped.shelf.pack("snap_1", folder / "memory")
        with dumped.shelf.open("snap_1") as file:
            file.unpack(folder / "rest", leave_lazy=True)
        yield dumped
    finally:
        ground.close()


@pytest.fixture
async def dumped(made: Dumped) -> AsyncIterator[Dumped]:
    """Nothing runs before and after a test."""
    yield made
    Group(os.fspath(made.ground.group)).kill()
    await made.gone()


class Node:
    """What a node does with a pager."""

    def __init__(self, dumped: Dumped, state_dir: Path) -> None:
        self.dumped = dumped
        self.state_dir = state_dir
        self.failed: list[tuple[str, str]] = []
        self.shelf = state_dir / FOLDER
        self.shelf.symlink_to(dumped.shelf.root)
        self.pager = Pager(state_dir, lambda _: os.fspath(dumped.ground.group / "guest"), self._on_unavailable)

    def _on_unavailable(self, sandbox_id: str, cause: str) -> None:
        self.failed.append((sandbox_id, cause))

    def pids(self) -> list[int]:
        """Of the pager and its keeper, in this order."""
        directory = str(self.state_dir / "pager")
        found = [pid for pid, argv in processes() if directory in argv and "barchan.snapshot.pager" in argv]
        return sorted(found, key=lambda pid: parent_of(pid) in found)

    async def restore_and_stop_pager(self) -> PagerLink:
        """Restore, and stop the pager with SIGSTOP before all memory is there; it may take some tries."""
        while True:
            link = await self.pager.serve("sb_1", "snap_1")
            await self.dumped.restore(link.directory)
            os.kill(self.pids()[0], signal.SIGSTOP)
            await asyncio.sleep(0.05)  # for what it has said before
            if self.pager.link("sb_1") is not None:
                return link
            os.kill(self.pids()[0], signal.SIGCONT)
            Group(os.fspath(self.dumped.ground.group)).kill()
            await self.dumped.gone()


@pytest.fixture
async def node(dumped: Dumped, tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(dumped, tmp_path)
    yield made
    await made.pager.shutdown()
    await made.pager.close()
    async with asyncio.timeout(10):
        while made.pids():
            await asyncio.sleep(0.01)


class NoKeeper:
    """In place of the process: here the test itself does not die."""

    def enter(self, group: Group) -> int:
        return 0

    def leave(self, entry: int) -> None:
        return


async def test_programs_may_do_anything_before_their_memory_is_there(dumped: Dumped, tmp_path: Path) -> None:
    """Threads, forks, moved, dropped, unmapped and grown areas: each byte is what it would be without the pager."""

    async def before_end(sandbox_id: str, error: BaseException) -> None:
        raise AssertionError(f"{sandbox_id} was ended") from error

    turn = asyncio.Lock()
    with ThreadPoolExecutor(2) as executor:
        source = Source(dumped.shelf.open("snap_1"), Chunks())
        place = (tmp_path / "work", os.fspath(dumped.ground.group), NoKeeper())
        served = Served("sb_1", source, *place, executor, turn, before_end, is_alone=True)  # type: ignore[arg-type]
        serving = asyncio.create_task(served.run())
        async with turn:  # nothing comes unasked
            await dumped.restore(tmp_path / "work")
            done = {expression: await dumped.ask(expression) for expression in MEANWHILE}
            assert not serving.done()
            await dumped.ask(WATCH)
        placed = await serving
        assert done == dict.fromkeys(MEANWHILE, True)
        assert await dumped.ask(RIGHT) is True
        assert placed.faults > 100
        assert placed.streamed_bytes > 0
        assert not dumped.was_wrong()
        assert not (tmp_path / "work").exists()


async def test_all_of_it_again_while_memory_streams_in(node: Node) -> None:
    """The same with the pager's own process, which hurries; afterwards memory is ordinary, and the pager waits."""
    link = await node.pager.serve("sb_1", "snap_1")
    await node.dumped.restore(link.directory)
    await node.dumped.ask(WATCH)
    done = {expression: await node.dumped.ask(expression) for expression in MEANWHILE}
    assert done == dict.fromkeys(MEANWHILE, True)
    placed = await link.complete()
    assert await node.dumped.ask(RIGHT) is True
    assert placed.faulted_bytes + placed.streamed_bytes > MIB << 20
    assert node.pager.link("sb_1") is None
    assert not link.directory.exists()
    assert not node.dumped.was_wrong()
    await link.drop()
    assert len(node.dumped.ground.pids()) == 1


async def test_a_killed_pager_takes_the_sandbox_with_it(node: Node) -> None:
    """Nobody sees a page that is missing: the node ends the programs while the keeper holds those pages back."""
    link = await node.restore_and_stop_pager()
    asking = asyncio.create_task(node.dumped.ask(WATCH))
    os.kill(node.pids()[0], signal.SIGKILL)
    with pytest.raises(BackendError, match="the pager died"):
        await link.complete()
    assert [sandbox_id for sandbox_id, _ in node.failed] == ["sb_1"]
    await node.dumped.gone()
    assert not node.dumped.was_wrong()
    await asyncio.gather(asking, return_exceptions=True)
    again = await node.pager.serve("sb_1", "snap_1")
    await node.dumped.restore(again.directory)
    assert await node.dumped.ask(RIGHT) is True
    await again.complete()


async def test_a_pager_without_keeper_ends_its_work_and_no_other(node: Node) -> None:
    """The sandbox gets its memory; the next one gets another pager."""
    link = await node.pager.serve("sb_1", "snap_1")
    pager, keeper = node.pids()
    os.kill(keeper, signal.SIGKILL)
    await node.dumped.restore(link.directory)
    assert await node.dumped.ask(RIGHT) is True
    await link.complete()
    await (await node.pager.serve("sb_2", "snap_1")).drop()
    assert pager not in node.pids()
    assert node.failed == []


async def test_a_damaged_chunk_ends_the_sandbox(node: Node) -> None:
    """The node is told why; none of the programs reads a wrong byte."""
    node.shelf.unlink()
    shutil.copytree(node.dumped.shelf.root, node.shelf, symlinks=True)
    (packed,) = [path for path in node.shelf.iterdir() if not path.is_symlink()]
    content = bytearray(packed.read_bytes())
    for at in range(len(content) // 2, len(content) // 2 + (4 << 20), 64 << 10):
        content[at] ^= 1
    packed.write_bytes(content)
    link = await node.pager.serve("sb_1", "snap_1")
    await node.dumped.restore(link.directory)
    asking = asyncio.create_task(node.dumped.ask(WATCH))
    with pytest.raises(SnapshotCorrupt):
        await link.complete()
    ((sandbox_id, cause),) = node.failed
    assert sandbox_id == "sb_1"
    assert "sha256" in cause
    await node.dumped.gone()
    assert not node.dumped.was_wrong()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_node_finds_what_the_one_before_had_begun(node: Node) -> None:
    """A pager outlives its node, and goes on."""
    first = await node.pager.serve("sb_1", "snap_1")
    await node.pager.close()
    assert node.pager.link("sb_1") is None
    node.pager.adopted(["sb_1"])
    link = await node.pager.known_link("sb_1")
    assert link is not None
    assert link.directory == first.directory
    await node.dumped.restore(link.directory)
    await link.complete()
    assert await node.dumped.ask(RIGHT) is True


async def test_a_restore_that_ended_with_its_node_begins_anew(node: Node) -> None:
    """Nobody comes for what the killed node had asked for; the next one asks for the same."""
    first = await node.pager.serve("sb_1", "snap_1")
    other = await node.pager.serve("sb_2", "snap_1")
    await node.pager.close()
    node.pager.adopted([])
    link = await node.pager.serve("sb_1", "snap_1")
    assert link.directory == first.directory
    assert not other.directory.exists()
    await node.dumped.restore(link.directory)
    await link.complete()
    assert await node.dumped.ask(RIGHT) is True
    assert node.failed == []


async def test_a_sandbox_that_is_ended_meanwhile_leaves_nothing(node: Node) -> None:
    """Before CRIU came, after its failure, and while memory comes in."""
    link = await node.pager.serve("sb_1", "snap_1")
    await link.drop()
    assert not link.directory.exists()
    link = await node.pager.serve("sb_1", "snap_1")
    _, writer = await asyncio.open_unix_connection(link.directory / "lazy-pages.socket")
    writer.close()  # as a CRIU that fails
    with pytest.raises(BackendError, match="CRIU ended"):
        await link.complete()
    assert not link.directory.exists()
    link = await node.pager.serve("sb_1", "snap_1")
    await node.dumped.restore(link.directory)
    Group(os.fspath(node.dumped.ground.group)).kill()
    await node.dumped.gone()
    await link.complete()
    assert not link.directory.exists()
    assert node.failed == []


async def test_the_keeper_ends_a_sandbox_alone(node: Node) -> None:
    """Where no node sees the pager die."""
    await node.restore_and_stop_pager()
    pager = node.pids()[0]
    await node.pager.close()
    asking = asyncio.create_task(node.dumped.ask(WATCH))
    os.kill(pager, signal.SIGKILL)
    await node.dumped.gone()
    await asyncio.gather(asking, return_exceptions=True)
    assert node.failed == []
    assert not node.dumped.was_wrong()


async def test_a_pager_that_hangs_is_killed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that wait for it do not wait for ever."""
    monkeypatch.setattr("barchan.backends.container.pager.LOOK_S", 0.05)
    monkeypatch.setattr("barchan.backends.container.pager.ANSWER_S", 0.3)
    link = await node.restore_and_stop_pager()
    with pytest.raises(BackendError, match="the pager died"):
        await link.complete()
    assert [sandbox_id for sandbox_id, _ in node.failed] == ["sb_1"]
    await node.dumped.gone()
