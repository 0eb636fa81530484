"""Creating, listing, attaching and destroying; what is wrong with a request; starts that fail half way."""

import errno
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guest.init.driver import PLATFORM
from tests.guest.supervisor.driver import (
    BUILD,
    SPEC,
    UID_FIRST,
    UIDS_PER_SLOT,
    Client,
    RefusedError,
    Sandbox,
    Supervisor,
    pids_in,
    wait_members,
)

pytestmark = [pytest.mark.requires("root", "static-libc", "mkfs.btrfs", "cgroup"), pytest.mark.timeout(120)]


def test_a_sandbox_lives_and_leaves(supervisor: Supervisor, client: Client) -> None:
    """Create gives a greeted connection and a pidfd of the init; destroy tells the counters and leaves nothing."""
    sandbox = client.create("one")
    assert sandbox.text("echo hello") == "hello"
    assert sandbox.uid_base == UID_FIRST
    assert int(Path(f"/proc/{sandbox.pid}/stat").read_text().rpartition(")")[2].split()[19]) == sandbox.start_time
    assert client.request("list").all("sandbox") == [f"one:{sandbox.pid}:{sandbox.start_time}:{UID_FIRST}"]
    counters = client.destroy("one")
    assert counters.keys() == {"oom_kills", "cpu_ns", "memory_peak_bytes"}
    assert counters["oom_kills"] == 0 and counters["cpu_ns"] > 0 and counters["memory_peak_bytes"] > 0
    assert select.select([sandbox.pidfd], [], [], 0)[0] == [sandbox.pidfd]
    assert client.listed() == []
    assert supervisor.cgroup_leaves() == set()


def test_two_hundred_at_once(supervisor: Supervisor, client: Client) -> None:
    """Two hundred creates in flight all succeed, each with its own uid range; destroyed at once, nothing is left."""
    tags = {f"box{number}": client.send_create(f"box{number}") for number in range(200)}
    sandboxes = [client.take(sandbox_id, tag) for sandbox_id, tag in tags.items()]
    assert {sandbox.uid_base for sandbox in sandboxes} == {UID_FIRST + n * UIDS_PER_SLOT for n in range(200)}
    assert all(sandbox.connection.ping()["running"] == 0 for sandbox in sandboxes)
    assert sorted(client.listed()) == sorted(tags)
    for tag in [client.send("destroy", id=sandbox_id) for sandbox_id in tags]:
        client.wait(tag)
    assert client.listed() == []
    assert supervisor.cgroup_leaves() == set()


def test_what_starts_or_goes_is_listed(client: Client, supervisor: Supervisor) -> None:
    """The next node must wait for it: its id is taken until nothing of it is left."""
    client.send_create("one")
    assert client.listed() == ["one"]
    client.close()
    later = supervisor.connect()
    assert later.listed() == ["one"]
    later.destroy("one")
    assert later.listed() == []
    later.create("one")


def test_a_long_list_comes_in_pages(client: Client) -> None:
    """A list that doesn't fit one packet goes on at `next`."""
    ids = [f"{number:064d}" for number in range(700)]
    for start in range(0, len(ids), 50):
        tags = [client.send_create(sandbox_id) for sandbox_id in ids[start : start + 50]]
        for tag in tags:
            client.wait(tag).close()
    assert client.request("list").all("next") != []
    assert client.listed() == ids
    assert client.request("list", **{"from": 700}).pairs[1:] == []


def test_the_lowest_free_range_is_used_again(client: Client) -> None:
    """A uid range returns with its sandbox, and its next user can't tell."""
    for sandbox_id in ("a", "b", "c"):
        client.create(sandbox_id)
    client.destroy("b")
    again = client.create("d")
    assert again.uid_base == UID_FIRST + UIDS_PER_SLOT
    assert again.text("id -u; stat -c %u /; cat /proc/self/uid_map").split() == [
        "0",
        "0",
        "0",
        str(again.uid_base),
        "65536",
    ]


def test_events_tell_an_end_that_nobody_asked_for(client: Client) -> None:
    """An init that dies is told with its status, stays listed, and can be destroyed but not attached to."""
    sandbox = client.create("one")
    os.kill(sandbox.pid, signal.SIGKILL)
    event = client.event()
    assert (event["id"], int(event["wstatus"]), event["oom_kills"]) == ("one", signal.SIGKILL, "0")
    assert client.listed() == ["one"]
    with pytest.raises(RefusedError) as refused:
        client.attach("one")
    assert refused.value.errno == errno.ESRCH
    client.destroy("one")
    assert client.listed() == []


def test_out_of_memory_is_counted(client: Client) -> None:
    """Memory beyond the limit kills in the guest, and the kernel's counter comes with destroy; the init survives."""
    sandbox = client.create("one", memory_bytes=32 << 20)
    output = sandbox.sh("exec probe eat 100")
    assert output.code == -signal.SIGKILL
    assert sandbox.text("echo alive") == "alive"
    assert client.destroy("one")["oom_kills"] >= 1


def test_attach_makes_a_new_connection(client: Client) -> None:
    """Attach greets the init anew; what was started before is still known."""
    first = client.create("one")
    first.connection.run(["true"], "job", user="0:0")
    second = client.attach("one")
    assert second.pid == first.pid
    assert second.connection.lookup("job")[2] is True


def test_the_platform_leaf_is_outside_the_guests_limits(supervisor: Supervisor, client: Client) -> None:
    """A program in the platform leaf runs when the guest's pids are used up, and the leaf goes with the sandbox."""
    client.create("one", pids=8)
    sandbox = client.attach("one", "leaf")
    sandbox.connection.start("bomb", ["probe", "fork", "100"], user="0:0", env={"PATH": "/bin"})
    output = sandbox.connection.run(["echo", "in"], flags=16 | PLATFORM, user="0:0", env={"PATH": "/bin"})
    assert (output.code, output.out) == (127, b"")  # `echo` is no program of the layer: it was looked up, so it ran
    assert (
        client.attach("one").connection.run(["probe", "39"], flags=16 | PLATFORM, user="0:0", env={"PATH": "/bin"}).code
        == 0
    )
    assert "one.platform" in supervisor.cgroup_leaves() or (supervisor.cgroup_leaves() == {"one"})
    client.destroy("one")
    assert supervisor.cgroup_leaves() == set()


def test_destroy_while_creating(supervisor: Supervisor, client: Client) -> None:
    """A destroy that overtakes its create ends both, at any moment of the start; nothing is left."""
    for number in range(40):
        create = client.send_create("one")
        if number % 2:
            select.select([client.socket], [], [], number / 20000)
        destroy = client.send("destroy", id="one")
        try:
            client.wait(create).close()
        except RefusedError as refused:
            assert (refused.stage, refused.errno) == ("destroyed", errno.ECANCELED)
        client.wait(destroy)
        assert client.listed() == []
    assert supervisor.cgroup_leaves() == set()


def test_every_destroy_is_answered(client: Client) -> None:
    """Several destroys of one sandbox are all answered; one of an unknown id is refused."""
    client.create("one")
    for tag in [client.send("destroy", id="one") for _ in range(3)]:
        try:
            client.wait(tag)
        except RefusedError as refused:
            assert refused.stage == "unknown_id"
    with pytest.raises(RefusedError) as unknown:
        client.destroy("one")
    assert (unknown.value.stage, unknown.value.errno) == ("unknown_id", errno.ENOENT)


@pytest.mark.parametrize(
    ("changes", "stage", "number"),
    [
        ({"layers": "none"}, "layers", errno.ENOENT),
        ({"layers": ""}, "layers", errno.EINVAL),
        ({"layers": ":".join(["base"] * 65)}, "layers", errno.E2BIG),
        ({"memory_bytes": "much"}, "request", errno.EINVAL),
        ({"memory_bytes": -1}, "request", errno.EINVAL),
        ({"pids": 1 << 64}, "request", errno.EINVAL),
        ({"shm_bytes": 0}, "request", errno.EINVAL),
        ({"network": "all"}, "request", errno.EINVAL),
        ({"hostname": "a" * 65}, "request", errno.EINVAL),
        ({"hostname": "../x"}, "request", errno.EINVAL),
        ({"cpu_us": 5}, "cgroup", errno.EINVAL),
        ({"pids": 1 << 63}, "cgroup", errno.ERANGE),
    ],
)
def test_a_wrong_spec_is_refused(
    supervisor: Supervisor, client: Client, changes: dict[str, str | int], stage: str, number: int
) -> None:
    """Each wrong value names the stage that refused it; afterwards nothing is left, and a right one works."""
    with pytest.raises(RefusedError) as refused:
        client.create("one", **changes)
    assert (refused.value.stage, refused.value.errno) == (stage, number)
    assert client.listed() == []
    assert supervisor.cgroup_leaves() == set()
    assert client.create("one").text("echo ok") == "ok"


@pytest.mark.parametrize("sandbox_id", ["", "init", "a.platform", "../up", "a/b", "a" * 65, ".."])
def test_a_wrong_id_is_refused(client: Client, sandbox_id: str) -> None:
    """An id is one harmless name."""
    with pytest.raises(RefusedError) as refused:
        client.create(sandbox_id)
    assert (refused.value.stage, refused.value.errno) == ("request", errno.EINVAL)


def test_an_id_is_taken_once(client: Client) -> None:
    """A second create of the same id is refused and harms nothing."""
    sandbox = client.create("one")
    with pytest.raises(RefusedError) as refused:
        client.create("one")
    assert refused.value.errno == errno.EEXIST
    assert sandbox.text("echo alive") == "alive"


def image_with(layer: Path, root: Path, name: str, make: Callable[[Path], None]) -> Path:
    """A copy of the layer in which one entry is something else."""
    shutil.copytree(layer, root / "image", symlinks=True)
    (root / "image" / name).rmdir()
    make(root / "image" / name)
    return root / "image"


@pytest.mark.parametrize("name", ["proc", "dev", "sys"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_an_image_cant_redirect_the_mounts(
    supervisor: Supervisor, client: Client, tmp_path: Path, name: str, kind: str
) -> None:
    """An image whose /proc, /dev or /sys is no directory doesn't start, and leaves nothing."""
    image = image_with(
        supervisor.layer, tmp_path, name, lambda at: at.symlink_to("/tmp") if kind == "link" else at.touch()
    )
    client.request("layer", digest="bad", type="dir", path=os.fspath(image))
    with pytest.raises(RefusedError) as refused:
        client.create("one", layers="bad")
    assert refused.value.stage == name
    assert supervisor.cgroup_leaves() == set()


def test_mount_points_that_an_image_lacks_are_made(supervisor: Supervisor, client: Client, tmp_path: Path) -> None:
    """An image without /proc, /dev and /sys runs; they are guest root's."""
    shutil.copytree(supervisor.layer, tmp_path / "image", symlinks=True)
    for name in ("proc", "dev", "sys"):
        (tmp_path / "image" / name).rmdir()
    client.request("layer", digest="bare", type="dir", path=os.fspath(tmp_path / "image"))
    assert client.create("one", layers="bare").text("cat /proc/self/comm; ls /sys").split() == ["cat", "devices"]


def test_an_init_that_cant_be_executed(make_supervisor: Callable[[], Supervisor], tmp_path: Path) -> None:
    """The create is refused, or answered and followed by an exit event, as exec came late; destroy leaves nothing."""
    program = tmp_path / "init"
    program.write_bytes(b"no program")
    program.chmod(0o755)
    supervisor = make_supervisor()
    assert supervisor.start(init=program) == "ready"
    client = supervisor.connect()
    try:
        client.wait(client.send_create("one")).close()
    except RefusedError as refused:
        assert refused.stage in ("exec", "connect")
    else:
        assert client.event()["wstatus"] == str(1 << 8)
        client.destroy("one")
    assert supervisor.cgroup_leaves() == set()


class TestLayers:
    """What can be mounted, and for how long."""

    def test_erofs(self, supervisor: Supervisor, client: Client, tmp_path: Path) -> None:
        """An EROFS file is mounted without a loop device, below or above directories; the topmost layer wins."""
        (tmp_path / "top" / "etc").mkdir(parents=True)
        (tmp_path / "top" / "etc" / "which").write_text("top")
        image = tmp_path / "top.erofs"
        subprocess.run(["make", "-s", "-C", BUILD.parent, "build/barchan-pack"], check=True)
        subprocess.run([BUILD / "barchan-pack", tmp_path / "top", image, str(1 << 20)], check=True)
        client.request("layer", digest="top", type="erofs", path=os.fspath(image))
        assert client.create("one", layers="top:base").text("cat /etc/which; stat -c %u /etc/which").split() == ["top0"]

    @pytest.mark.parametrize(
        ("kind", "path", "number"),
        [("dir", "/nowhere/at/all", errno.ENOENT), ("erofs", "/nowhere", errno.ENOENT), ("erofs", "/dev/null", None)],
    )
    def test_a_bad_layer_is_refused(self, client: Client, kind: str, path: str, number: int | None) -> None:
        """What can't be mounted is an error with its errno, and the digest stays free."""
        with pytest.raises(RefusedError) as refused:
            client.request("layer", digest="bad", type=kind, path=path)
        assert refused.value.stage == "layer"
        assert number in (None, refused.value.errno)
        with pytest.raises(RefusedError):
            client.create("one", layers="bad")

    def test_a_layer_in_use_stays(self, supervisor: Supervisor, client: Client) -> None:
        """`unlayer` is refused while a sandbox uses the layer, and then frees the directory below it."""
        client.create("one")
        with pytest.raises(RefusedError) as refused:
            client.request("unlayer", digest="base")
        assert refused.value.errno == errno.EBUSY
        client.destroy("one")
        client.request("unlayer", digest="base")
        client.request("unlayer", digest="base")
        with pytest.raises(RefusedError) as gone:
            client.create("two")
        assert gone.value.stage == "layers"
        client.request("layer", digest="base", type="dir", path=os.fspath(supervisor.layer))
        assert client.create("two").text("echo back") == "back"

    def test_layers_dont_change(self, supervisor: Supervisor, client: Client) -> None:
        """What a guest writes, replaces or removes stays in its own upper."""
        one, two = client.create("one"), client.create("two")
        one.text("echo changed > /bin/new; rm /bin/hostname; echo x >> /bin/probe")
        assert two.sh("ls /bin/new").code != 0
        assert two.text("hostname") == "box"
        assert not (supervisor.layer / "bin" / "new").exists()


class TestPackets:
    """What isn't a request."""

    @pytest.mark.parametrize(
        "packet",
        [
            b"list\0tag=1",
            b"list\0tag=x\0",
            b"list\0",
            b"list\0tag=1\0word\0",
            b"list\0tag=1\0more=1\0",
            b"list\0tag=1\0tag=1\0",
            b"nothing\0tag=1\0",
            b"attach\0tag=1\0",
            b"\0tag=1\0",
            b"\0",
            b"x" * 65536,
            b"list\0tag=1\0" + b"".join(b"k%d=\0" % number for number in range(40)),
        ],
    )
    def test_is_refused(self, client: Client, packet: bytes) -> None:
        """A malformed packet is answered with an error; the connection and the sandboxes live on."""
        client.socket.send(packet)
        client.receive()
        ((_, reply),) = client.replies.items()
        client.replies.clear()
        assert (reply.word, reply["stage"]) == ("error", "request")
        assert client.listed() == []

    def test_too_large_ends_the_connection(self, supervisor: Supervisor, client: Client) -> None:
        """A packet beyond the limit ends the connection, and nothing else."""
        client.create("one")
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        client.socket.send(b"x" * 65537)
        with pytest.raises(ConnectionResetError):
            client.receive()
        assert supervisor.connect().listed() == ["one"]

    def test_hello_comes_first(self, supervisor: Supervisor) -> None:
        """Before hello, and after one of another version, every operation is refused."""
        client = Client(supervisor.path)
        supervisor.clients.append(client)
        for send in ({"version": 1 + 1}, {"version": "one"}):
            with pytest.raises(RefusedError) as refused:
                client.request("hello", **send)
            assert (refused.value.stage, refused.value.errno) == ("hello", errno.EPROTO)
        with pytest.raises(RefusedError) as early:
            client.listed()
        assert early.value.stage == "hello"

    def test_another_user_is_turned_away(self, supervisor: Supervisor, client: Client) -> None:
        """A connection of another user is closed, and the node's stays."""
        supervisor.path.chmod(0o666)
        supervisor.directory.chmod(0o755)
        pid = os.fork()
        if pid == 0:
            try:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                os.chdir(supervisor.directory)
                os.setresuid(65534, 65534, 65534)
                sock.connect("socket")
                sock.settimeout(10)
                os._exit(0 if sock.recv(10) == b"" else 1)
            except BaseException:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert client.listed() == []


def test_a_slow_node_gets_everything(client: Client) -> None:
    """Replies beyond what the socket holds wait; none is lost, none is mixed up."""
    tags = [client.send("list") for _ in range(20)]
    client.socket.setblocking(False)
    sent = 0
    try:
        while sent < 20000:
            tags.append(client.send("list"))
            sent += 1
    except BlockingIOError:
        pass
    client.socket.settimeout(30)
    assert sent < 20000  # the supervisor stopped reading
    for tag in tags:
        assert client.wait(tag).word == "ok"


def test_limits_are_in_the_kernels_files(supervisor: Supervisor, client: Client) -> None:
    """The limits asked for are those of the guest's cgroups, and its programs are in them; the init is not."""
    sandbox = client.create("one")
    sandbox.connection.start("sleeper", ["sleep", "60"], user="0:0", env={"PATH": "/bin"})
    if client.hello()["cgroup"] == "v2":
        guest = Path("/sys/fs/cgroup/barchan") / supervisor.name / "one" / "guest"
        files = {guest / "memory.max": SPEC["memory_bytes"], guest / "pids.max": SPEC["pids"]}
        members = [guest]
    else:
        leaves = {
            kind: Path(f"/sys/fs/cgroup/{kind}/barchan") / supervisor.name / "one" for kind in ("memory", "pids", "cpu")
        }
        files = {
            leaves["memory"] / "memory.limit_in_bytes": SPEC["memory_bytes"],
            leaves["pids"] / "pids.max": SPEC["pids"],
            leaves["cpu"] / "cpu.cfs_quota_us": SPEC["cpu_us"],
        }
        members = [*leaves.values()]
    assert {path: int(path.read_text()) for path in files} == files
    for leaf in members:
        assert wait_members(leaf) == 1
        assert sandbox.pid not in pids_in(leaf)


def call_through(sandbox: Sandbox) -> None:
    """A program in the sandbox reaches the socket that its creator holds."""
    with socket.socket(fileno=os.dup(sandbox.extra[0])) as listener:
        assert listener.getsockname() == ("127.0.0.1", 3128)
        listener.settimeout(10)
        call = ["bash", "-c", "echo hi > /dev/tcp/127.0.0.1/3128"]
        handle, _, _ = sandbox.connection.start(f"call-{id(sandbox)}", call, user="0:0", env={"PATH": "/bin"})
        with listener.accept()[0] as connection:
            assert connection.recv(10) == b"hi\n"
        assert sandbox.connection.wait_exit(handle).code == 0


def test_the_network_descriptor(client: Client) -> None:
    """`proxy` gives a socket that listens inside the sandbox, on attach too; `open` gives its network namespace."""
    proxied, opened = client.create("proxied", network="proxy"), client.create("opened", network="open")
    call_through(proxied)
    call_through(client.attach("proxied"))
    assert os.fstat(opened.extra[0]).st_ino == os.stat(f"/proc/{opened.pid}/ns/net").st_ino
    assert os.fstat(opened.extra[0]).st_ino != os.stat("/proc/self/ns/net").st_ino
    _, uid, _ = struct.unpack("iII", proxied.connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    assert uid == proxied.uid_base + 65535  # bound as the init's own user, whom nobody in the guest can become
