"""What the node needs to make images of sandboxes: the pool's directories, the list of layers, their unmounting."""

import asyncio
import errno
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from barchan.backends.container.cgroup import Counters
from barchan.backends.container.cut import Cutter, make_snapshot, remove_snapshot
from tests.guest.supervisor.driver import BUILD, CGROUPS, UID_FIRST, Client, RefusedError, Sandbox, Supervisor

pytestmark = [pytest.mark.requires("root", "static-libc", "mkfs.btrfs", "cgroup"), pytest.mark.timeout(120)]

PACK = BUILD / "barchan-pack"
BYTES_MAX = 1 << 30


@contextmanager
def pool_of(client: Client) -> Iterator[list[int]]:
    reply = client.request("pool")
    try:
        yield reply.fds
    finally:
        reply.close()


def cuts_in(directory: int) -> list[str]:
    """Opened anew: btrfs lists to a descriptor what was there when it was opened."""
    return os.listdir(f"/proc/self/fd/{directory}")


def guest_group(supervisor: Supervisor, sandbox: Sandbox) -> Path:
    (group,) = (
        path
        for root in (CGROUPS, CGROUPS / "unified")
        if (path := root / "barchan" / supervisor.name / sandbox.id / "guest").exists()
    )
    return group


def by_cutter(client: Client, work: Callable[[Cutter], Coroutine[None, None, None]]) -> list[str]:
    """As the node does it; what is in the directory of cuts then."""

    async def run() -> list[str]:
        with pool_of(client) as fds:
            cutter = Cutter(os.dup(fds[0]), os.dup(fds[1]), PACK)
            try:
                await work(cutter)
            finally:
                await cutter.close()
            return cuts_in(fds[1])

    return asyncio.run(run())


def counters_of(supervisor: Supervisor, sandbox: Sandbox) -> Counters:
    return Counters(supervisor.name, sandbox.id, "v1" if (CGROUPS / "unified").exists() else "v2")


def pack(supervisor: Supervisor, client: Client, sandbox: Sandbox, target: Path) -> None:
    counters = counters_of(supervisor, sandbox)
    left = by_cutter(client, lambda cutter: cutter.pack(sandbox.id, counters, asyncio.Lock(), target, BYTES_MAX))
    assert left == []


@pytest.fixture(autouse=True)
def _packer(layer: Path) -> None:
    subprocess.run(["make", "-s", "-C", BUILD.parent, "build/barchan-pack"], check=True)


def test_a_layer_of_a_sandbox_starts_another(supervisor: Supervisor, client: Client, tmp_path: Path) -> None:
    """What one wrote and removed is what the next one finds; the first goes on, and its later writes are its own."""
    one = client.create("one")
    one.text("echo kept > /etc/kept; rm /bin/hostname; while :; do echo; sleep 0.01; done > /dev/null &")
    pack(supervisor, client, one, tmp_path / "cut")
    assert (guest_group(supervisor, one) / "cgroup.freeze").read_text() == "0\n"
    one.text("echo later > /etc/kept")
    client.request("layer", digest="cut", type="erofs", path=str(tmp_path / "cut"))
    two = client.create("two", layers="cut:base")
    assert two.text("cat /etc/kept; ls /bin/hostname 2>/dev/null || echo none") == "kept\nnone"


def test_the_root_directory_is_as_in_the_topmost_layer(client: Client, tmp_path: Path) -> None:
    """Its mode and time; but everybody may enter it, whatever the directory that an image was made of allowed."""
    (tmp_path / "top").mkdir()
    (tmp_path / "top").chmod(0o1720)
    os.utime(tmp_path / "top", (0, 981_173_106))
    client.request("layer", digest="top", type="dir", path=str(tmp_path / "top"))
    assert client.create("one", layers="top:base").text("stat -c '%a %Y' /") == "1775 981173106"


def test_cuts_of_a_dead_node_are_removed_when_the_next_one_says_hello(supervisor: Supervisor, client: Client) -> None:
    """Whatever lies there then belongs to nobody."""
    one = client.create("one")
    cut(client, one, "gone-left")
    counters = counters_of(supervisor, one)
    left = by_cutter(client, lambda cutter: cutter.cut("one", counters, asyncio.Lock(), "one-left", copies=2))
    assert sorted(left) == ["gone-left", "one-left", "one-left.copies"]
    client.create("two", cut="one-left")
    with pool_of(client) as fds:
        supervisor.connect()
        assert cuts_in(fds[1]) == []


def test_layers_are_listed_in_pages_and_unmounted_when_unused(client: Client, supervisor: Supervisor) -> None:
    """Every mounted layer is told once; one that a sandbox uses is EBUSY until its end."""
    names = {f"{number:0128x}" for number in range(700)}
    for name in names:
        client.request("layer", digest=name, type="dir", path=str(supervisor.layer)).close()
    found: list[str] = []
    page = client.request("layers")
    while page.all("next"):
        found += page.all("layer")
        page = client.request("layers", **{"from": page["next"]})
    found += page.all("layer")
    assert (len(found), set(found)) == (701, {*names, "base"})
    client.create("one")
    with pytest.raises(RefusedError) as caught:
        client.request("unlayer", digest="base")
    assert (caught.value.stage, caught.value.errno) == ("unlayer", errno.EBUSY)
    client.destroy("one")
    for name in (*names, "base"):
        client.request("unlayer", digest=name)
    assert client.request("layers").all("layer") == []
    client.request("unlayer", digest="base")


@pytest.mark.parametrize("keys", [{"from": "x"}, {"to": "1"}])
def test_a_wrong_list_of_layers_is_refused(client: Client, keys: dict[str, str]) -> None:
    """Like every other request."""
    with pytest.raises(RefusedError) as caught:
        client.request("layers", **keys)
    assert caught.value.errno == errno.EINVAL


def test_a_held_pool_does_not_keep_the_supervisor(make_supervisor: Callable[[], Supervisor]) -> None:
    """It ends while a node still holds the directories; the loop device goes with the last of them."""
    supervisor = make_supervisor()
    supervisor.start()
    client = supervisor.connect()
    with pool_of(client):
        client.request("shutdown")
        supervisor.wait_gone()
        assert supervisor.loop_devices() != []
    assert supervisor.settle() == []


def cut(client: Client, sandbox: Sandbox, name: str) -> None:
    with pool_of(client) as fds:
        source = os.open(sandbox.id, os.O_RDONLY, dir_fd=fds[0])
        make_snapshot(source, fds[1], name)
        os.close(source)


def remove_cut(client: Client, name: str) -> None:
    with pool_of(client) as fds:
        remove_snapshot(fds[1], name)


def test_a_writable_layer_starts_as_a_cut_to_any_depth(client: Client) -> None:
    """Files, whiteouts and opaque directories are there; each writes its own, whoever of them has ended."""
    parent = client.create("d0")
    parent.text("mkdir /srv /srv/a; echo 0 > /srv/a/depth; rm /bin/hostname; rm -r /etc; mkdir /etc")
    for depth in range(1, 6):
        cut(client, parent, f"cut-{depth}")
        child = client.create(f"d{depth}", cut=f"cut-{depth}")
        remove_cut(client, f"cut-{depth}")
        client.destroy(parent.id)
        assert child.uid_base != UID_FIRST or depth % 2 == 0
        assert child.text("cat /srv/a/depth; ls /bin/hostname 2>/dev/null || echo none") == (f"{depth - 1}\nnone")
        child.text(f"echo {depth} > /srv/a/depth; mkdir /srv/made; rm -r /srv/made")
        parent = child


def test_children_of_one_cut_are_apart_and_have_quotas_of_their_own(supervisor: Supervisor, client: Client) -> None:
    """What the parent wrote before counts against no child; what a child writes does, and no other one sees it: whether
    it has one of the copies that were made ahead, or comes when they are gone.
    """
    parent = client.create("parent", upper_bytes=64 << 20)
    parent.text("dd if=/dev/zero of=/big bs=1M count=32 2>/dev/null; echo then > /said")
    counters = counters_of(supervisor, parent)
    by_cutter(client, lambda cutter: cutter.cut(parent.id, counters, asyncio.Lock(), "cut", copies=2))
    parent.text("echo now > /said")
    children = [client.create(f"child-{number}", cut="cut", upper_bytes=16 << 20) for number in range(3)]
    for number, child in enumerate(children):
        assert child.text("cat /said; stat -c %s /big") == f"then\n{32 << 20}"
        child.text(f"echo {number} > /said; dd if=/dev/zero of=/own bs=1M count=8 2>/dev/null")
        assert child.sh("dd if=/dev/zero of=/more bs=1M count=16; sync").code != 0
    assert [child.text("cat /said") for child in children] == ["0", "1", "2"]
    assert parent.text("cat /said") == "now"
    assert by_cutter(client, lambda cutter: cutter.remove("cut")) == []


@pytest.mark.parametrize("name", ["none", "../upper/parent", ""])
def test_a_cut_that_is_not_there_is_refused_and_leaves_nothing(client: Client, name: str) -> None:
    """Nor can its name lead anywhere else."""
    client.create("parent")
    with pytest.raises(RefusedError) as caught:
        client.create("child", cut=name)
    assert (caught.value.stage, caught.value.errno) in (("pool", errno.ENOENT), ("request", errno.EINVAL))
    assert client.listed() == ["parent"]
    with pool_of(client) as fds:
        assert cuts_in(fds[0]) == ["parent"]
