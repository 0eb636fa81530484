"""Images of live sandboxes: the same tree again, to any depth; and nothing left of one that did not come to be."""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient, AsyncSandbox
from barchan.image.store import ImageStore
from tests.leaks import CGROUPS, processes
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(300)]

WAIT_S = 60.0

# Prints what can be seen of every entry: a line each, and the groups of names of one file.
LISTING = r"""
import hashlib, os, stat
links, root = {}, os.lstat("/").st_dev
for top, dirs, files in os.walk(b"/"):
    dirs[:] = [name for name in dirs if os.lstat(os.path.join(top, name)).st_dev == root]
    for name in [b".", *dirs, *files]:
        path = os.path.normpath(os.path.join(top, name))
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            continue
        is_file, is_dir = stat.S_ISREG(found.st_mode), stat.S_ISDIR(found.st_mode)
        if not is_dir and found.st_nlink > 1:
            links.setdefault((found.st_dev, found.st_ino), set()).add(path)
        digest = target = None
        try:
            digest = hashlib.file_digest(open(path, "rb"), "sha256").hexdigest() if is_file else None
        except PermissionError:
            digest = "unreadable"
        target = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None
        try:
            named = sorted((key, os.getxattr(path, key)) for key in os.listxattr(path)) if is_file or is_dir else []
        except PermissionError:
            named = "unreadable"
        size = None if is_dir else (found.st_size, found.st_nlink)
        print(path, oct(found.st_mode), found.st_uid, found.st_gid, found.st_mtime_ns, size, named, digest, target)
print(sorted(map(sorted, links.values())))
"""

# What a guest can do to its files, over two rounds: `$1` tells them apart.
CHANGES = r"""
set -e
umask 022
mkdir -p /srv/$1 && cd /srv/$1
mkdir made && echo one > made/file && ln made/file made/hard && ln -s ../nowhere made/link && mkfifo made/pipe
python3 - "$1" << 'PYTHON'
import os, random, socket, sys
open(b"not \xff text", "w").write("x")
open("n" * 255, "w").write(sys.argv[1])
socket.socket(socket.AF_UNIX).bind("made/socket")
with open("sparse", "wb") as file:
    file.truncate(1 << 27)
    file.seek(1 << 26)
    file.write(b"island")
open("big", "wb").write(random.Random(sys.argv[1]).randbytes(100 << 20))
os.setxattr("made/file", "user.note", sys.argv[1].encode())
os.setxattr("made", "user.note", b"of a directory")
os.utime("made/file", ns=(1, 1234567890123456789))
for number in range(500):
    open(f"made/{number}-{'x' * (number % 200)}", "w").write(str(number))
PYTHON
chmod 6711 made/file
rm /etc/motd /usr/share/doc -rf
rm -r /usr/share/perl5 && mkdir /usr/share/perl5 && echo new > /usr/share/perl5/only
mv /usr/share/misc /usr/share/misc-$1 2>/dev/null || mv /usr/share/misc-* /usr/share/misc-$1
echo $1 > /usr/share/misc-$1/in && mv /usr/share/misc-$1/in /usr/share/misc-$1/magic
echo over > /srv/$1/over && mv /srv/$1/over /etc/hostname
echo more >> /etc/services && chmod 600 /etc/networks && touch -d 2011-11-11 /etc/networks
mkdir /opt/deep && mv /opt/deep /opt/deeper-$1 && touch /opt/deeper-$1/in
"""


def copy_store(images: Path, root: Path) -> None:
    """A store with the base image and nothing else, in which no other test makes images meanwhile."""
    for folder in ("templates", "layers", "doubtful", "tmp"):
        (root / folder).mkdir(parents=True)
    shutil.copy(images / "templates" / "debian.json", root / "templates")
    for layer in ImageStore(images).resolve("debian").layers:
        shutil.copy(ImageStore(images).layer_path(layer), root / "layers")


def make_with(make_node: Callable[[], NodeProcess], store: Path) -> NodeProcess:
    """A node, not yet started, with an image store of its own."""
    node = make_node()
    (node.state_dir / "images").unlink()
    (node.state_dir / "images").symlink_to(store)
    return node


@pytest.fixture(scope="module")
def store(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    copy_store(images, root)
    return root


@pytest.fixture(scope="module")
def node(make_node: Callable[[], NodeProcess], store: Path) -> Iterator[NodeProcess]:
    node = make_with(make_node, store)
    node.start()
    yield node
    assert node.end() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def sh(sandbox: AsyncSandbox, script: str) -> str:
    """What a script prints, run as guest root; it must succeed."""
    return (await sandbox.exec(script, user="root", timeout_s=WAIT_S, max_output_bytes=64 << 20)).check().text


async def listing(sandbox: AsyncSandbox) -> list[str]:
    result = await sandbox.exec(
        ["python3", "-"], stdin=LISTING, user="root", timeout_s=WAIT_S, max_output_bytes=64 << 20
    )
    return sorted(result.check().text.splitlines())


def remains(node: NodeProcess, before: set[str]) -> list[str]:
    """What half a snapshot could have left: templates, layers, workspaces, packers, cuts, stopped guests."""
    assert node.process is not None
    images = node.state_dir / "images"
    found = [f"file {name}" for name in sorted(names_in(images) - before)]
    found += [f"workspace {path.name}" for path in (images / "tmp").iterdir()]
    own = f"{images}/tmp/"
    found += [f"process {pid}" for pid, argv in processes() if any(own in arg for arg in argv)]
    found += [f"cut {name}" for name in cuts(node.process.pid)]
    for root in (CGROUPS, CGROUPS / "unified"):
        for freeze in (root / "barchan" / node.watch.cgroup).glob("*/guest/cgroup.freeze"):
            found += [f"stopped {freeze}"] if freeze.read_text() != "0\n" else []
    return found


def cuts(pid: int) -> list[str]:
    """What lies in the pool's directory of cuts, seen through the node's descriptor of it."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(fd) == "/cut":
                return os.listdir(fd)
        except FileNotFoundError:  # closed meanwhile
            continue
    return []


def names_in(images: Path) -> set[str]:
    return {path.name for folder in ("templates", "layers", "doubtful") for path in (images / folder).iterdir()}


async def nothing_remains(node: NodeProcess, before: set[str]) -> list[str]:
    """Wait until nothing remains; what still does after a while."""
    deadline = time.monotonic() + WAIT_S
    while (found := remains(node, before)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return found


async def until_packing(node: NodeProcess) -> int:
    """Wait until a packer of this node runs; its pid."""
    deadline = time.monotonic() + WAIT_S
    own = f"{node.state_dir}/images/tmp/"
    while time.monotonic() < deadline:
        for pid, argv in processes():
            if argv and argv[0].endswith("/barchan-pack") and any(arg.startswith(own) for arg in argv):
                return pid
        await asyncio.sleep(0.001)
    raise AssertionError("no packer came")


async def test_a_sandbox_of_an_image_shows_the_same_tree_to_any_depth(client: AsyncClient) -> None:
    """Three times over: change what can be changed, make an image, start from it, and find every entry the same."""
    made: list[str] = []
    template = "debian"
    for depth in ("one", "two", "three"):
        async with await client.create(template, disk_mib=4096) as sandbox:
            await sh(sandbox, f"set -- {depth}\n{CHANGES}")
            expected = await listing(sandbox)
            image = await sandbox.snapshot()
        made.append(image.name)
        assert len(image.layers) == 1 + len(made)
        async with await client.create(image.name) as again:
            assert await listing(again) == expected
        template = image.name
    assert len(expected) > 3000
    for name in made:
        await client.remove_image(name)


async def test_an_image_starts_as_its_sandbox_was_made_unless_told(client: AsyncClient) -> None:
    """User, directory and environment are those of the image below, or what was given; not the sandbox's own."""
    (below,) = [image for image in await client.images() if image.name == "debian"]
    async with await client.create("debian", env={"SECRET": "1"}, user="root", workdir="/tmp") as sandbox:
        plain = await sandbox.snapshot("test/plain:1")
        assert (plain.user, plain.workdir, plain.env) == (below.user, below.workdir, below.env)
        env = {"PATH": "/usr/bin:/bin", "A": "b"}
        told = await sandbox.snapshot("test/told", env=env, user="daemon", workdir="/srv")
    assert (told.user, told.workdir, told.env) == ("daemon", "/srv", env)
    async with await client.create("test/told") as started:
        assert (await started.exec("id -un; pwd; echo $A$SECRET")).text == "daemon\n/srv\nb\n"
    assert {image.name for image in await client.images()} >= {"test/plain:1", "test/told"}
    for name in ("test/plain:1", "test/told"):
        assert (await client.remove_image(name)).name == name
        with pytest.raises(barchan.NotFound):
            await client.remove_image(name)


async def test_programs_go_on_and_their_later_writes_are_not_in_the_image(client: AsyncClient) -> None:
    """A program that counts in a file is stopped for a moment only; the image holds one whole state of its file."""
    async with await client.create("debian") as sandbox:
        counter = await sandbox.start("cd /tmp; i=0; while :; do i=$((i+1)); echo $i > next; mv next count; done")
        while not (await sandbox.exec("cat /tmp/count 2>/dev/null")).text:
            await asyncio.sleep(0.05)
        image = await sandbox.snapshot()
        then = int((await sandbox.exec("cat /tmp/count")).check().text)
        while int((await sandbox.exec("cat /tmp/count")).check().text) == then:
            await asyncio.sleep(0.05)
        assert (await counter.info()).running
        async with await client.create(image.name) as again:
            assert 0 < int((await again.exec("cat /tmp/count")).check().text) <= then
            assert counter.id not in [process.process_id for process in await again.processes()]
    await client.remove_image(image.name)


async def test_siblings_and_their_parent_are_apart(client: AsyncClient) -> None:
    """Sandboxes of one image start from the same files; what each writes is its own."""
    async with await client.create("debian") as parent:
        await parent.exec("echo same > /tmp/state")
        image = await parent.snapshot()
        siblings = [item async for item in client.create_many(image.name, n=4, memory_mib=64)]
        for number, sibling in enumerate(siblings):
            assert isinstance(sibling, AsyncSandbox)
            assert (await sibling.exec(f"cat /tmp/state; echo {number} > /tmp/state")).text == "same\n"
        for number, sibling in enumerate(siblings):
            assert isinstance(sibling, AsyncSandbox)
            assert (await sibling.exec("cat /tmp/state")).text == f"{number}\n"
            await sibling.kill()
        assert (await parent.exec("cat /tmp/state")).text == "same\n"
    await client.remove_image(image.name)


async def test_a_name_is_given_to_the_newest(client: AsyncClient) -> None:
    """An image of that name gives way; two snapshots of a sandbox at once are both made."""
    async with await client.create("debian") as sandbox:
        for content in ("old", "new"):
            await sandbox.exec(f"echo {content} > /tmp/content")
            await sandbox.snapshot("test-newest")
        pair = await asyncio.gather(sandbox.snapshot("test-left"), sandbox.snapshot("test-right"))
    for name in ("test-newest", *(image.name for image in pair)):
        async with await client.create(name) as started:
            assert (await started.exec("cat /tmp/content")).text == "new\n"
        await client.remove_image(name)


async def test_the_same_changes_again_are_a_layer_of_their_own(client: AsyncClient, store: Path) -> None:
    """A layer that holds, to the byte, what one below it holds differs in its identity: no stack names one twice."""
    names: list[str] = []
    template = "debian"
    for _ in range(3):
        async with await client.create(template, memory_mib=64) as sandbox:
            await sh(sandbox, "rm -f /tmp/same; echo same > /tmp/same; touch -d 2020-01-01 /tmp/same /tmp /")
            image = await sandbox.snapshot()
        names.append(image.name)
        template = image.name
    assert len(set(image.layers)) == 4
    files = [(store / "layers" / f"{digest}.erofs").read_bytes() for digest in image.layers[:3]]
    assert len({file[:1072] + file[1088:] for file in files}) == 1  # all but the identity in the superblock
    async with await client.create(template, memory_mib=64) as last:
        assert (await last.exec("cat /tmp/same")).text == "same\n"
    for name in names:
        await client.remove_image(name)


async def test_a_wrong_wish_is_refused_and_leaves_nothing(client: AsyncClient, node: NodeProcess) -> None:
    """Names, users, directories and variables that no image can have; and a sandbox that is not there any more."""
    before = names_in(node.state_dir / "images")
    async with await client.create("debian") as sandbox:
        for options in (
            {"name": "../up"},
            {"name": "0123456789ab"},
            {"user": "a b"},
            {"workdir": "relative"},
            {"env": {"A=B": "c"}},
            {"env": {"A": "\0"}},
        ):
            with pytest.raises(barchan.InvalidSpec):
                await sandbox.snapshot(**options)  # type: ignore[arg-type]
    with pytest.raises(barchan.SandboxExpired):
        await sandbox.snapshot()
    assert remains(node, before) == []


async def test_what_a_guest_makes_that_no_layer_can_hold_is_its_own_fault(
    client: AsyncClient, node: NodeProcess
) -> None:
    """Directories deeper than any path, and a sparse file of exabytes: told with the policy's fault, at once."""
    before = names_in(node.state_dir / "images")
    deep = "import os\nos.chdir('/tmp')\nfor _ in range(2100):\n    os.mkdir('d')\n    os.chdir('d')\n"
    sparse = "file = open('/tmp/s', 'wb')\nfor n in range(60):\n    file.seek(n << 57)\n    file.write(b'x')\n"
    for program in (deep, sparse):
        async with await client.create("debian") as sandbox:
            (await sandbox.exec(["python3", "-c", program])).check()
            with pytest.raises(barchan.GuestWrecked) as caught:
                await sandbox.snapshot()
            assert caught.value.fault == "policy"
            assert (await sandbox.exec("echo alive")).text == "alive\n"
    assert remains(node, before) == []


async def fill(sandbox: AsyncSandbox) -> None:
    """Enough to pack that the packing can be met."""
    program = "import os\nfor n in range(6):\n    open(f'/tmp/{n}', 'wb').write(os.urandom(64 << 20))\n"
    (await sandbox.exec(["python3", "-c", program], timeout_s=WAIT_S)).check()


async def test_a_sandbox_that_ends_while_it_is_packed_leaves_its_image(client: AsyncClient, node: NodeProcess) -> None:
    """What is packed was cut off before: the end of the sandbox does not take it along."""
    before = names_in(node.state_dir / "images")
    sandbox = await client.create("debian")
    await fill(sandbox)
    task = asyncio.create_task(sandbox.snapshot())
    await until_packing(node)
    assert await sandbox.kill()
    image = await task
    async with await client.create(image.name) as again:
        assert (await again.exec("stat -c %s /tmp/5")).text == f"{64 << 20}\n"
    await client.remove_image(image.name)
    assert await nothing_remains(node, before) == []


@pytest.mark.parametrize("how", ["kill", "init"])
async def test_a_sandbox_that_ends_at_any_time_gives_an_image_or_says_why_not(
    client: AsyncClient, node: NodeProcess, how: str
) -> None:
    """Ended by its owner or by the death of its init: a whole image or the end's own error, and no other."""
    before = names_in(node.state_dir / "images")
    for delay_s in (0.0, 0.001, 0.002, 0.004, 0.008, 0.016):
        sandbox = await client.create("debian", memory_mib=64)
        (init,) = [int(pid) for path in _groups(node, sandbox) for pid in path.read_text().split()]
        task = asyncio.create_task(sandbox.snapshot())
        await asyncio.sleep(delay_s)
        if how == "kill":
            await sandbox.kill()
        else:
            os.kill(init, 9)
        try:
            image = await task
        except (barchan.SandboxExpired, barchan.SandboxLost) as error:
            assert error.details.get("cause", "").startswith("killed" if how == "kill" else "init_died")  # type: ignore[union-attr]
        else:
            await client.remove_image(image.name)
        assert await nothing_remains(node, before) == []


def _groups(node: NodeProcess, sandbox: AsyncSandbox) -> list[Path]:
    """Where the sandbox's init is listed, in the version 2 hierarchy."""
    roots = [root / "barchan" / node.watch.cgroup / sandbox.id for root in (CGROUPS / "unified", CGROUPS)]
    paths = [path for root in roots for path in (root / "cgroup.procs", root / "init" / "cgroup.procs")]
    return [path for path in paths if path.exists()]


async def test_a_packer_that_dies_is_told_and_leaves_nothing(client: AsyncClient, node: NodeProcess) -> None:
    """The platform's fault; the sandbox goes on, and the next snapshot succeeds."""
    before = names_in(node.state_dir / "images")
    async with await client.create("debian") as sandbox:
        await fill(sandbox)
        task = asyncio.create_task(sandbox.snapshot())
        os.kill(await until_packing(node), 9)
        with pytest.raises(barchan.BackendError, match="exit code -9"):
            await task
        assert await nothing_remains(node, before) == []
        image = await sandbox.snapshot()
    await client.remove_image(image.name)
    assert await nothing_remains(node, before) == []


async def test_a_client_that_goes_leaves_nothing(client: AsyncClient, node: NodeProcess) -> None:
    """A snapshot without a name that nobody waits for any more is given up, wherever it was."""
    before = names_in(node.state_dir / "images")
    async with await client.create("debian") as sandbox:
        await fill(sandbox)
        for delay_s in (0.0, 0.01, 0.05, 0.2, 0.4):
            task = asyncio.create_task(sandbox.snapshot())
            if delay_s:
                await asyncio.sleep(delay_s)
            else:
                await until_packing(node)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await nothing_remains(node, before) == []
        assert (await sandbox.exec("echo alive")).text == "alive\n"


async def test_a_node_killed_meanwhile_leaves_nothing(make_node: Callable[[], NodeProcess], store: Path) -> None:
    """The packer dies with it; the next node lets the guest go on and removes the cut, the next build the workspace."""
    node = make_with(make_node, store)
    node.start()
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        before = names_in(node.state_dir / "images")
        sandbox = await client.create("debian")
        await fill(sandbox)
        task = asyncio.create_task(sandbox.snapshot())
        packer = await until_packing(node)
        for root in (CGROUPS, CGROUPS / "unified"):  # as if it had been killed a moment earlier
            for freeze in (root / "barchan" / node.watch.cgroup).glob("*/guest/cgroup.freeze"):
                freeze.write_text("1")
        node.kill()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while Path(f"/proc/{packer}/stat").exists() and "Z" not in Path(f"/proc/{packer}/stat").read_text().split()[2]:
            await asyncio.sleep(0.01)
        node.start()
        assert (await sandbox.exec("echo alive")).text == "alive\n"
        image = await sandbox.snapshot()
        async with await client.create(image.name) as again:
            assert (await again.exec("stat -c %s /tmp/5")).text == f"{64 << 20}\n"
        await client.remove_image(image.name)
        await sandbox.kill()
        assert await nothing_remains(node, before) == []
    assert node.end() == []


@pytest.fixture
def small_store(images: Path, tmp_path: Path) -> Iterator[Path]:
    """An image store with the base image, on a disk with 32 MiB to spare."""
    layers = ImageStore(images).resolve("debian").layers
    size = sum(ImageStore(images).layer_path(layer).stat().st_size for layer in layers)
    root = tmp_path / "store"
    root.mkdir()
    disk = tmp_path / "disk"
    disk.touch()
    os.truncate(disk, size + (36 << 20))
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-N", "256", "-O", "^has_journal", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk, root], check=True)
    try:
        copy_store(images, root)
        yield root
    finally:
        subprocess.run(["umount", "-l", root], check=True)


async def test_the_room_of_layers_comes_back(make_node: Callable[[], NodeProcess], small_store: Path) -> None:
    """A full disk is a capacity error that leaves nothing; a removed image's room is free once no sandbox uses it."""
    node = make_with(make_node, small_store)
    node.start()

    def free() -> int:
        return shutil.disk_usage(small_store).free >> 20

    async with barchan.connect_async(f"unix://{node.socket}") as client:
        before = names_in(small_store)
        spare = free()
        async with await client.create("debian") as sandbox:
            await sandbox.exec(["python3", "-c", "import os; open('/tmp/x', 'wb').write(os.urandom(20 << 20))"])
            image = await sandbox.snapshot()
            with pytest.raises(barchan.CapacityError) as caught:
                await sandbox.snapshot()
            assert int(caught.value.details["retry_after_ms"]) > 0
            assert remains(node, {*before, *names_in(small_store)}) == []
        user = await client.create(image.name)
        await client.remove_image(image.name)
        assert free() < spare - 16  # still mounted: the sandbox reads it
        assert (await user.exec("stat -c %s /tmp/x; cksum < /tmp/x > /dev/null")).text == f"{20 << 20}\n"
        again = await user.snapshot()
        assert set(image.layers) < set(again.layers)
        await client.remove_image(again.name)
        await user.kill()
        deadline = time.monotonic() + WAIT_S
        while free() < spare - 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert free() >= spare - 1
        assert remains(node, before) == []
    assert node.end() == []
