"""Images from recipes on a real node: what is in them, built once for all who ask, and nothing left of a failure."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import barchan
from barchan.errors import CapacityError, InvalidSpec, NotFound, TaskError
from barchan.model.sandbox import SandboxSpec
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.build import PREFIX, build
from barchan.sdk.dockerfile import load_dockerfile
from barchan.sdk.recipe import Put, Recipe, Run, Take
from tests.nodes import NodeProcess
from tests.stores import node_of_its_own

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs")]

DEADLINE_S = 120.0
BUILDER = """
import asyncio, sys
import msgspec
import barchan
from barchan.sdk.build import build
from barchan.sdk.recipe import Recipe

async def main():
    async with barchan.connect_async(state_dir=sys.argv[1]) as client:
        recipe = msgspec.json.decode(sys.argv[2], type=Recipe)
        try:
            print(await build(client, recipe, progress=lambda said: print(said, flush=True)))
        except barchan.BarchanError as error:
            print(type(error).__name__, error)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with an image store of its own, which starts with the base image."""
    yield from node_of_its_own(images, tmp_path_factory)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client
        for image in await client.images():
            if image.name != "debian":
                await client.remove_image(image.name)


async def left(client: AsyncClient) -> list[str]:
    """Live sandboxes, and images of recipes."""
    built = [image.name for image in await client.images() if image.name.startswith(PREFIX)]
    return [info.sandbox_id for info in await client.list()] + built


def start(node: NodeProcess, recipe: Recipe) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", BUILDER, str(node.state_dir), msgspec.json.encode(recipe).decode()]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Read what it says up to a line that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(text):
            return
    raise AssertionError(f"it never said {text!r}")


async def read(client: AsyncClient, image: str, command: str) -> str:
    async with await client.create(image, memory_mib=128) as sandbox:
        return (await sandbox.exec(command)).check().text.strip()


async def test_what_is_in_an_image(client: AsyncClient, tmp_path: Path) -> None:
    """Files with their modes, owners and links, what the commands did, and what sandboxes start with."""
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "bin" / "run").chmod(0o755)
    (tree / "link").symlink_to("bin/run")
    recipe = Recipe(
        base="debian",
        steps=(
            Put(path="/opt/tree", source=str(tree)),
            Put(path="/opt/tree", source=str(tree / "bin" / "run"), mode=0o700),
            Run(command=("mkdir", "/shared")),
            Put(path="/shared", source=str(tree), user="agent"),
            Put(path="/fresh", source=str(tree), user="agent", mode=0o750),
            Put(path="/data/x", data=b"\0\1", user="1000:1000"),
            Run(command='echo "$A" > /made; id -un > /by', env={"A": "a b"}, cwd="/opt"),
            Run(command="pwd > where; id -un >> where", user="agent", cwd="/home/agent"),
        ),
        env={"ADDED": "yes"},
        user="agent",
        workdir="/opt/tree",
    )
    said: list[str] = []
    image = await build(client, recipe, progress=said.append)
    assert said[0] == "step 1 of 8: put /opt/tree"
    seen = await read(
        client,
        image,
        "./link; pwd; id -un; echo $ADDED $LANG; cat /made /by ~/where; "
        "stat -c '%n %a %U' run bin/run /shared /shared/bin /shared/bin/run /fresh /fresh/bin/run /data/x; ls /tmp",
    )
    assert seen.splitlines() == [
        "ran",
        "/opt/tree",
        "agent",
        "yes C.UTF-8",
        "a b",
        "root",
        "/home/agent",
        "agent",
        "run 700 root",
        "bin/run 755 root",
        "/shared 755 root",
        "/shared/bin 755 agent",
        "/shared/bin/run 755 agent",
        "/fresh 755 agent",
        "/fresh/bin/run 750 agent",
        "/data/x 644 agent",
    ]


async def test_a_dockerfile(client: AsyncClient, tmp_path: Path) -> None:
    """The image of a Dockerfile holds what its lines say, and runs as they say."""
    (tmp_path / "main.py").write_text("print('main')\n")
    (tmp_path / "Dockerfile").write_text(
        "FROM debian\nARG WHO=you\nENV TO=$WHO\nWORKDIR /app\nCOPY --chown=agent *.py .\n"
        'RUN echo "to $TO" > said\nUSER agent\nCMD ["python3", "main.py"]\n'
    )
    image = await build(client, load_dockerfile(tmp_path / "Dockerfile", network="none", args={"WHO": "me"}))
    seen = await read(client, image, "python3 main.py; cat said; id -un; stat -c %U main.py said; echo $TO")
    assert seen.split("\n") == ["main", "to me", "agent", "agent", "root", "me"]


async def test_an_image_is_built_once(client: AsyncClient) -> None:
    """Asking again starts nothing, another client's asking neither; a base that is a recipe is built before."""
    base = Recipe(base="debian", steps=(Run(command="echo base > /base"),))
    recipe = Recipe(base=base, steps=(Run(command="cp /base /top"),))
    image = await build(client, recipe)
    creates = (await client.node_info()).creates_total
    async with barchan.connect_async(state_dir=client.endpoint.state_dir) as other:
        assert [await build(other, recipe), await build(client, recipe)] == [image, image]
        base_image = await build(other, base)
    assert (await client.node_info()).creates_total == creates
    assert await left(client) == sorted([base_image, image])
    assert await read(client, image, "cat /top") == "base"


async def test_what_changes_is_built_again(client: AsyncClient, tmp_path: Path) -> None:
    """One client that asks twice gets what its sources and base are now, and no image that is gone."""
    (tmp_path / "file").write_text("one")
    recipe = Recipe(base="debian", steps=(Put(path="/file", source=str(tmp_path / "file")),))
    first = await build(client, recipe)
    await client.remove_image(first)
    assert await build(client, recipe) == first
    assert await read(client, first, "cat /file") == "one"
    (tmp_path / "file").write_text("two")
    second = await build(client, recipe)
    assert second != first and await read(client, second, "cat /file") == "two"


async def test_a_source_that_changes_on_the_way(client: AsyncClient, tmp_path: Path) -> None:
    """No image is named after what is not in it."""
    (tmp_path / "file").write_text("one")
    recipe = Recipe(base="debian", steps=(Put(path="/file", source=str(tmp_path / "file")),))
    with pytest.raises(TaskError, match=r"step 1 of 1, put /file: .* was changed while it was being sent"):
        await build(client, recipe, progress=lambda said: (tmp_path / "file").write_text("two") and None)
    assert await left(client) == []


async def test_files_of_another_image_wait_for_room(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the build itself does: the node is full for a moment when the image that they are in needs a sandbox."""
    tries: list[str] = []

    async def create(
        spec: SandboxSpec, *, real: Callable[..., Awaitable[AsyncSandbox]] = client.create
    ) -> AsyncSandbox:
        tries.append(spec.create_id)
        if len(tries) in (1, 3):
            raise CapacityError("no room now", retry_after_ms=1)
        return await real(spec)

    monkeypatch.setattr(client, "create", create)
    take = Take(image="debian", source="/etc/debian_version", path="/v")
    image = await build(client, Recipe(base="debian", steps=(take,)))
    assert len(tries) == 4 and tries[0] == tries[1] != tries[2] == tries[3]
    monkeypatch.undo()
    assert await read(client, image, "cmp /v /etc/debian_version") == ""


async def test_what_counts_as_added(client: AsyncClient) -> None:
    """All above the image at a recipe's very bottom goes along when the recipe's image lies above another, also where
    an image of `layers` brings the base's own layers once more, and where the base is a recipe.
    """
    bottom = Recipe(base="debian", steps=(Run(command="echo low > /low"),))
    low = await build(client, bottom)
    high = await build(client, Recipe(base=bottom, steps=(Run(command="echo high > /high"),)))
    side = await build(client, Recipe(base="debian", steps=(Run(command="echo side > /side"),)))
    step = (Run(command="cat /low > top"),)
    for base, layers, own, top in (
        (low, (high,), 3, "/home/agent/top"),
        (replace(bottom, workdir="/opt"), (high, side), 5, "/opt/top"),
    ):
        built = await client.image(await build(client, Recipe(base=base, layers=layers, steps=step)))
        assert (len(built.layers), built.base_layers) == (own + 1, 1)
        async with await client.create("debian", layers=[built.name], memory_mib=128) as sandbox:
            assert (await sandbox.exec(f"cat /low /high {top}")).check().text == "low\nhigh\nlow\n"


async def test_nothing_to_add(client: AsyncClient) -> None:
    """A recipe without steps and settings is its base."""
    assert await build(client, Recipe(base=Recipe(base="debian"))) == "debian"


async def test_processes_that_ask_at_once(client: AsyncClient, node: NodeProcess) -> None:
    """Of several processes, and several askers in each, one builds: one sandbox is made, and each step runs once."""
    recipe = Recipe(base="debian", steps=(Run(command="sleep 1; cat /proc/sys/kernel/random/uuid > /id"),))
    creates = (await client.node_info()).creates_total
    processes = [start(node, recipe) for _ in range(4)]
    images = {*await asyncio.gather(*(build(client, recipe) for _ in range(8)))}
    said = [(await asyncio.to_thread(process.communicate, timeout=DEADLINE_S))[0] for process in processes]
    assert {text.splitlines()[-1] for text in said} == images
    assert (await client.node_info()).creates_total == creates + 1
    assert await left(client) == sorted(images)


async def test_processes_of_one_run_build_together(client: AsyncClient, tmp_path: Path) -> None:
    """A sandbox of a run goes over to whoever of the run asks for it; what one of them builds, the others wait for."""
    (tmp_path / "file").write_text("one")
    slow = Run(command="sleep 1; cat /proc/sys/kernel/random/uuid > /of-a-run")
    recipe = Recipe(base="debian", steps=(slow, Put(path="/file", source=str(tmp_path / "file"))))
    creates = (await client.node_info()).creates_total
    async with client.run("r") as one, client.run("r") as other:
        assert one.lease_id != other.lease_id
        images = {*await asyncio.gather(*(build(run.client, recipe) for run in (one, other) for _ in range(2)))}
    assert len(images) == 1
    assert (await client.node_info()).creates_total == creates + len(recipe.steps)


async def test_a_step_that_fails(client: AsyncClient) -> None:
    """The error has number, command, exit code and the end of the output; what was done before it is kept."""
    recipe = Recipe(
        base="debian", steps=(Run(command="true"), Run(command="seq 100000; echo told >&2; exit 7"), Run(command="x"))
    )
    with pytest.raises(TaskError) as failed:
        await build(client, recipe)
    text = str(failed.value)
    assert "step 2 of 3, run `seq 100000; echo told >&2; exit 7`, ended with exit code 7:\n" in text
    assert text.endswith("99999\n100000\ntold") and len(text) < 4000
    assert failed.value.details == {"step": 2, "exit_code": 7}
    assert await left(client) == [await build(client, Recipe(base="debian", steps=(Run(command="true"),)))]


async def test_a_command_does_not_run_again(client: AsyncClient, tmp_path: Path) -> None:
    """After equal steps on an equal base its image is found, whatever comes then; a change before it makes it run."""
    (tmp_path / "file").write_text("one")
    put = Put(path="/file", source=str(tmp_path / "file"))
    slow = Run(command="cat /proc/sys/kernel/random/uuid > /id")
    ids = []
    for steps in ((slow, Run(command="echo 1 > /x")), (slow, put, Run(command="echo 2 > /x")), (put, slow)):
        image = await build(client, Recipe(base="debian", steps=steps))
        ids.append(await read(client, image, "cat /id"))
    assert ids[0] == ids[1] != ids[2]
    found = {image.name: image for image in await client.images()}[image]
    assert found.base_layers == 1 and len(found.layers) == 2


async def test_how_else_a_step_fails(client: AsyncClient) -> None:
    """Out of time, out of memory, and files that can't be put are told apart."""
    for step, told in (
        (Run(command="sleep 100", timeout_s=0.5), "ran out of its time of 0.5 s"),
        (Run(command=("python3", "-c", "b'x' * (1 << 30)")), "ran out of 64 MiB of memory"),
        (Run(command=("no-such-program",)), "exit code 127"),
        (Put(path="/proc/x", data=b""), "put /proc/x"),
    ):
        with pytest.raises(TaskError, match=told):
            await build(client, Recipe(base="debian", steps=(step,), memory_mib=64))
    assert await left(client) == []


async def test_a_failure_is_told_to_all(client: AsyncClient, node: NodeProcess) -> None:
    """Whoever watches another's build hears which step failed."""
    recipe = Recipe(base="debian", steps=(Run(command="sleep 2; exit 3"),))
    other = start(node, recipe)
    await asyncio.to_thread(wait_for, other, "step 1")
    with pytest.raises(TaskError, match="step 1 of 1, run `sleep 2; exit 3`, ended with exit code 3"):
        await build(client, recipe)
    said, _ = await asyncio.to_thread(other.communicate, timeout=DEADLINE_S)
    assert said.startswith("TaskError") and "exit code 3" in said
    assert await left(client) == []


async def test_nothing_starts_for_what_can_t_be_built(client: AsyncClient, tmp_path: Path) -> None:
    """A missing source anywhere in the recipe, or a missing base, is said before a sandbox is made."""
    creates = (await client.node_info()).creates_total
    missing = Recipe(base="debian", steps=(Put(path="/x", source=str(tmp_path / "no")),))
    with pytest.raises(InvalidSpec, match=r"can't read .*/no"):
        await build(client, Recipe(base=missing, steps=(Run(command="true"),)))
    with pytest.raises(NotFound, match="no image 'nowhere:1'"):
        await build(client, Recipe(base="nowhere:1", steps=(Run(command="true"),)))
    assert (await client.node_info()).creates_total == creates


async def test_a_build_that_is_cancelled(client: AsyncClient) -> None:
    """Nothing is left of it; another client that waited for it builds the image itself."""
    recipe = Recipe(base="debian", steps=(Run(command="sleep 2"),))
    begun = asyncio.Event()

    def heard(said: str) -> None:
        if said.startswith("step 1"):
            begun.set()

    first = asyncio.create_task(build(client, recipe, progress=heard))
    await begun.wait()
    async with barchan.connect_async(state_dir=client.endpoint.state_dir) as other:
        watched = asyncio.Event()
        second = asyncio.create_task(
            build(other, recipe, progress=lambda said: watched.set() if said.startswith("another") else None)
        )
        await watched.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        image = await second
    assert await left(client) == [image]


@pytest.mark.parametrize("asked", ["before", "after"])
async def test_a_builder_that_is_killed(client: AsyncClient, node: NodeProcess, asked: str) -> None:
    """Whoever waited for it, and whoever asks after its death, begins anew and gets a whole image."""
    recipe = Recipe(
        base="debian", steps=(Put(path="/first", data=b"1"), Run(command="sleep 2"), Run(command=f"echo {asked} > /x"))
    )
    builder = start(node, recipe)
    await asyncio.to_thread(wait_for, builder, "step 2")
    waiter = asyncio.create_task(build(client, recipe)) if asked == "before" else None
    if waiter is not None:
        await asyncio.sleep(0.5)
    os.kill(builder.pid, signal.SIGKILL)
    await asyncio.to_thread(builder.communicate, timeout=DEADLINE_S)
    image = await (waiter or build(client, recipe))
    assert await read(client, image, "cat /first /x") == f"1{asked}"
    first = await build(client, replace(recipe, steps=recipe.steps[:2]))
    assert await left(client) == sorted([first, image])


async def test_an_image_step_by_step(client: AsyncClient, tmp_path: Path) -> None:
    """The builder makes a named image of its base, the layers of others, files and commands; each call is a new one."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "main.py").write_text("print('main')\n")
    await client.template("debian").run("echo tool > /tool").env(TOOL="t").build("toolkit")
    begun = (
        client.template("debian").layer("toolkit").run("cp /tool /copy").copy(tmp_path / "src", "/app", user="agent")
    )
    image = await begun.env(A="1").workdir("/app").user("agent").run("echo $A > a; pwd >> a").build("mine")
    other = await begun.build()
    assert (image.name, image.user, image.workdir) == ("mine", "agent", "/app")
    assert (image.env["A"], image.env["TOOL"]) == ("1", "t")
    assert other.name.startswith(PREFIX) and "A" not in other.env
    assert await read(client, "mine", "cat /copy a; id -un; python3 main.py; stat -c %U a") == (
        "tool\n1\n/app\nagent\nmain\nagent"
    )
    assert (image.base_layers, len(image.layers)) == (1, 4)  # the toolkit's, and one of each command
    assert await read(client, "toolkit", "echo /copy* /app* /tool") == "/copy* /app* /tool"


def test_an_image_step_by_step_without_async(node: NodeProcess) -> None:
    """The synchronous face does the same."""
    with barchan.connect(state_dir=node.state_dir) as client:
        image = client.template("debian").run("echo made > /made").build("sync-made")
        with client.create("debian", layers=["sync-made"]) as sandbox:
            assert sandbox.exec("cat /made").text == "made\n"
        assert client.name_image(image.digest, "other-name").digest == image.digest
        assert client.rebase("sync-made", "debian") == []
