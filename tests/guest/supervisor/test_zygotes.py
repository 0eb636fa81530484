"""Sandboxes inside the namespaces of another one, a zygote's, whose forks may enter them."""

import errno
import os
import signal
import socket

import pytest

from tests.guest.supervisor.driver import UID_FIRST, UIDS_PER_SLOT, Client, RefusedError, Sandbox, Supervisor

pytestmark = [pytest.mark.requires("root", "static-libc", "mkfs.btrfs", "cgroup", "userns"), pytest.mark.timeout(120)]


@pytest.fixture
def zygote(client: Client) -> Sandbox:
    return client.create("zy", zygote="self")


def mounts(sandbox: Sandbox) -> list[list[str]]:
    """Type, place and options of each, without the ids in them."""
    lines = [line.split() for line in sandbox.text("cat /proc/mounts").splitlines()]
    return [[words[1], words[2], *(word for word in words[3].split(",") if "id=" not in word)] for words in lines]


def numbers(sandbox: Sandbox) -> list[str]:
    """The processes it sees."""
    return sandbox.text("echo /proc/[0-9]*").split()


def test_one_inside_is_a_sandbox_like_any(client: Client, zygote: Sandbox) -> None:
    """Rights, mounts and limits are those of an ordinary one; ids and name its own."""
    inner = client.create("inner", zygote="zy", hostname="within", memory_bytes=64 << 20)
    plain = client.create("plain", hostname="within", memory_bytes=64 << 20)
    status = "grep -e Cap -e Seccomp -e NoNew -e Uid /proc/self/status; hostname; ls -l /proc/1/stat"
    assert [line.split()[:4] for line in inner.text(status).splitlines()] == [
        line.split()[:4] for line in plain.text(status).splitlines()
    ]
    files = "ls -l / /dev"  # without the number of links, which for /proc is that of all processes of the host
    assert [[*line.split()[:1], *line.split()[2:4]] for line in inner.text(files).splitlines()] == [
        [*line.split()[:1], *line.split()[2:4]] for line in plain.text(files).splitlines()
    ]
    assert mounts(inner) == mounts(plain)
    assert len(numbers(inner)) == len(numbers(plain))
    assert inner.text("cat /proc/self/uid_map").split() == ["0", str(inner.uid_base), str(UIDS_PER_SLOT)]
    assert inner.uid_base == UID_FIRST + UIDS_PER_SLOT
    assert set(client.destroy("inner")) == {"oom_kills", "cpu_ns", "memory_peak_bytes"}


def test_the_zygote_sees_those_inside_and_they_see_nothing_of_it(client: Client, zygote: Sandbox) -> None:
    """Process numbers go one way only, and no namespace is shared."""
    before = len(numbers(zygote))
    inner = client.create("inner", zygote="zy")
    assert (len(numbers(zygote)), len(numbers(inner))) == (before + 1, before)
    for name in ("user", "pid", "net", "uts", "cgroup", "time", "ipc", "mnt"):
        assert os.readlink(f"/proc/{inner.pid}/ns/{name}") != os.readlink(f"/proc/{zygote.pid}/ns/{name}")


def test_those_inside_end_with_their_zygote(client: Client, zygote: Sandbox) -> None:
    """Both ends are told, and both can be removed in any order."""
    inner = client.create("inner", zygote="zy")
    os.kill(zygote.pid, signal.SIGKILL)
    assert {client.event()["id"], client.event()["id"]} == {"zy", "inner"}
    client.destroy("zy")
    client.destroy("inner")
    assert inner.id not in client.listed()


def test_slots_of_those_inside_are_used_again(client: Client, zygote: Sandbox) -> None:
    """What was made for a nested namespace serves no ordinary sandbox, and the other way round."""
    for number in range(3):
        inner = client.create(f"inner{number}", zygote="zy")
        slot = inner.uid_base
        client.destroy(inner.id)
        plain = client.create(f"plain{number}")
        assert slot == plain.uid_base
        assert plain.text("cat /proc/self/uid_map").split() == ["0", str(slot), str(UIDS_PER_SLOT)]
        client.destroy(plain.id)


def test_many_starts_and_ends_at_once_leave_nothing(client: Client, zygote: Sandbox) -> None:
    """Some are destroyed while they start; the fixture looks for what is left."""
    tags = [client.send_create(f"many{number}", zygote="zy") for number in range(24)]
    ends = [client.send("destroy", id=f"many{number}") for number in range(0, 24, 2)]
    for number, tag in enumerate(tags):
        try:
            client.take(f"many{number}", tag)
        except RefusedError as error:
            assert (number % 2, error.errno) == (0, errno.ECANCELED)
    for tag in ends:
        client.wait(tag)
    assert {f"many{number}" for number in range(1, 24, 2)} == set(client.listed()) - {"zy"}


@pytest.mark.parametrize("zygote", ["plain", "missing", ""])
def test_only_a_live_zygote_has_sandboxes(client: Client, zygote: str) -> None:
    """An ordinary sandbox, or none, is refused by name."""
    client.create("plain")
    with pytest.raises(RefusedError) as caught:
        client.create("inner", zygote=zygote)
    assert (caught.value.errno, str(caught.value)) == (errno.EINVAL, "request: zygote")


def test_a_start_that_fails_inside_leaves_nothing(client: Client, zygote: Sandbox, supervisor: Supervisor) -> None:
    """The helper's failure is the answer, with its stage."""
    with pytest.raises(RefusedError) as caught:
        client.create("inner", zygote="zy", upper_bytes=1)
    assert caught.value.stage in {"pool", "overlay", "spool"}
    client.create("inner", zygote="zy")


def test_entering_needs_a_zygote_that_listens(client: Client, zygote: Sandbox) -> None:
    """Without one it is refused at once; so is a sandbox that is none of a zygote's."""
    client.create("inner", zygote="zy")
    client.create("plain")
    for sandbox_id, number in (("inner", errno.ECONNREFUSED), ("plain", errno.ESRCH)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            client.tag += 1
            packet = f"enter\0tag={client.tag}\0id={sandbox_id}\0text=hello\0".encode()
            socket.send_fds(client.socket, [packet], [theirs.fileno()])
            with pytest.raises(RefusedError) as caught:
                client.wait(str(client.tag))
            assert (caught.value.stage, caught.value.errno) == ("enter", number)
