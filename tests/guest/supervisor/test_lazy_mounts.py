"""The FUSE file system that the supervisor holds and never waits for, and mounts that others made."""

import errno
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.fuse import open_erofs
from tests.guest.supervisor.driver import Client, RefusedError, Reply, Supervisor

pytestmark = [
    pytest.mark.requires("root", "static-libc", "mkfs.btrfs", "mkfs.erofs", "cgroup", "fuse"),
    pytest.mark.timeout(120),
]


def send(client: Client, op: str, fds: list[int], **keys: str) -> Reply:
    """A request with descriptors."""
    client.tag += 1
    packet = "".join([f"{op}\0", *(f"{key}={value}\0" for key, value in {"tag": str(client.tag), **keys}.items())])
    socket.send_fds(client.socket, [packet.encode()], fds)
    return client.wait(str(client.tag))


def mount_id(fd: int) -> str:
    """Asked of the descriptor: anything that asks the file system would wait for who serves it."""
    (line,) = [line for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines() if line.startswith("mnt_id")]
    return line


@pytest.fixture
def erofs(tmp_path: Path) -> int:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "here").write_text("from the mount\n")
    subprocess.run(["mkfs.erofs", "--quiet", tmp_path / "layer", tmp_path / "tree"], check=True)
    return open_erofs(tmp_path / "layer")


def test_the_file_system_that_nobody_serves_stops_nothing(supervisor: Supervisor, client: Client) -> None:
    """It is one however often it is asked for, and sandboxes live and end beside it; the fixture finds nothing left."""
    first, second = client.request("fuse"), client.request("fuse")
    assert len(first.fds) == len(second.fds) == 2
    assert mount_id(first.fds[1]) == mount_id(second.fds[1])
    assert os.fstat(first.fds[0]).st_rdev == os.stat("/dev/fuse").st_rdev
    assert client.create("one").text("echo hello") == "hello"
    client.destroy("one")
    first.close()
    second.close()


def test_a_mount_that_others_made_is_a_layer(supervisor: Supervisor, client: Client, erofs: int) -> None:
    """Whoever made it may let go of it; the layer is used, unmounted and gone as others are."""
    send(client, "layer", [erofs], digest="lazy", type="mount").close()
    os.close(erofs)
    assert "lazy" in client.request("layers").all("layer")
    sandbox = client.create("one", layers="lazy:base")
    assert sandbox.text("read line < /here; echo $line") == "from the mount"
    assert sandbox.text("echo more > /here; read line < /here; echo $line") == "more"
    with pytest.raises(RefusedError, match="busy"):
        client.request("unlayer", digest="lazy")
    client.destroy("one")
    client.request("unlayer", digest="lazy").close()
    assert "lazy" not in client.request("layers").all("layer")


def test_what_is_wrong_with_a_mount_is_told(supervisor: Supervisor, client: Client, erofs: int) -> None:
    """No descriptor, one that is no mount, a path too many or too few; and nothing of it stays with the supervisor."""
    before = len(os.listdir(f"/proc/{supervisor.pid}/fd"))
    with open("/dev/null", "rb") as null:
        for fds, keys in (
            ([], {"type": "mount"}),
            ([null.fileno()], {"type": "mount"}),
            ([erofs], {"type": "mount", "path": "/tmp"}),
            ([erofs], {"type": "dir"}),
            ([], {"type": "erofs"}),
        ):
            with pytest.raises(RefusedError) as caught:
                send(client, "layer", fds, digest="wrong", **keys)
            assert caught.value.errno == errno.EINVAL
        for _ in range(20):
            send(client, "list", [erofs, null.fileno()]).close()
    assert client.request("layers").all("layer") == ["base"]
    assert len(os.listdir(f"/proc/{supervisor.pid}/fd")) == before
    os.close(erofs)


def test_a_sandbox_that_cannot_be_removed_does_not_stop_the_end(supervisor: Supervisor, client: Client) -> None:
    """Another's process keeps its cgroup; who waits for a file that nobody serves is let go first, then all ends."""
    client.create("one")
    first = client.request("fuse")
    device, directory = first.fds
    os.close(device)
    with subprocess.Popen(["sleep", "600"]) as foreign:
        waiting = subprocess.Popen(
            ["stat", f"/proc/self/fd/{directory}/file"], pass_fds=[directory], stderr=subprocess.DEVNULL
        )
        os.close(directory)
        leaf = next(
            path for root in supervisor.cgroups() for path in (root / "one", root / "one" / "guest") if path.is_dir()
        )
        (leaf / "cgroup.procs").write_text(str(foreign.pid))
        supervisor.kill(signal.SIGTERM)
        assert waiting.wait(15) != 0
        assert supervisor.processes()
        supervisor.wait_gone(60)
        foreign.kill()
    assert supervisor.start() == "ready"  # it removes the cgroup
    assert supervisor.cgroup_leaves() == set()
    supervisor.connect()
