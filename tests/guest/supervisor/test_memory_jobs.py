"""The supervisor's part of memory snapshots, with any program in CRIU's place: time limits, ends, what is left."""

import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest.supervisor.driver import SPEC, Client, RefusedError, Supervisor

pytestmark = pytest.mark.requires("root", "cgroup", "userns", "static-libc", "mkfs.btrfs")
RESTORE = {"mounts": "/dev:/sys", "spools": 0, "monotonic_ns": 10**9, "boottime_ns": 10**9, "seconds": 20}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[int]:
    """A node's directory for one run, open; `run` says what runs."""
    (tmp_path / "places").write_text("7 p1\n8 .\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "init").touch(0o755)
    (tmp_path / "userns-8.img").write_bytes(struct.pack("<II", 0x54564319, 0x55474906) + bytes(20))
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def _run(job: int, *words: str) -> None:
    path = Path(f"/proc/self/fd/{job}").resolve()
    lines = ["", os.fspath(path / "userns-8.img"), *words]
    (path / "args").write_bytes(b"".join(line.encode() + b"\0" for line in lines))


def _ask(client: Client, op: str, fd: int | None, **keys: str | int) -> str:
    client.tag += 1
    packet = "".join([f"{op}\0", *(f"{key}={value}\0" for key, value in {"tag": client.tag, **keys}.items())])
    socket.send_fds(client.socket, [packet.encode()], [] if fd is None else [fd])
    return str(client.tag)


def _log(job: int) -> str:
    return Path(f"/proc/self/fd/{job}/log").read_text()


def test_a_dump_tells_how_it_ended_and_what_was_said(client: Client, supervisor: Supervisor, job: int) -> None:
    """The program runs on the host, in a group of its own and in the sandbox's network; its words are in the log."""
    sandbox = client.create()
    _run(
        job,
        "/bin/sh",
        "-c",
        "readlink /proc/self/ns/net /proc/self/ns/uts; grep -c /one.criu /proc/self/cgroup; ls /run; exit 3",
    )
    reply = client.wait(_ask(client, "dump", job, id="one", seconds=20))
    assert os.waitstatus_to_exitcode(int(reply["wstatus"])) == 3
    net, uts, groups, *run = _log(job).split()
    assert [net, uts] == [os.readlink(f"/proc/{sandbox.pid}/ns/{name}") for name in ("net", "uts")]
    assert int(groups) >= 1
    assert run == ["job"]
    assert supervisor.cgroup_leaves() == {"one"}
    assert sandbox.text("echo alive") == "alive"


def test_a_dump_that_takes_too_long_is_ended_whole(client: Client, supervisor: Supervisor, job: int) -> None:
    """With its children; until then nobody else may come near the sandbox."""
    client.create()
    _run(job, "/bin/sh", "-c", "sleep 1000 & echo $!; exec sleep 1000")
    tag = _ask(client, "dump", job, id="one", seconds=1)
    with pytest.raises(RefusedError) as busy:
        client.request("attach", id="one")
    assert (busy.value.stage, busy.value.errno) == ("attach", errno.EBUSY)
    with pytest.raises(RefusedError) as late:
        client.wait(tag)
    assert (late.value.stage, late.value.errno) == ("dump", errno.ETIMEDOUT)
    child = int(_log(job))
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{child}")
    client.attach("one")
    assert supervisor.cgroup_leaves() == {"one"}


def test_a_sandbox_may_be_destroyed_under_a_dump(client: Client, supervisor: Supervisor, job: int) -> None:
    """Both are answered, and nothing is left."""
    client.create()
    _run(job, "/bin/sleep", "2")
    tag = _ask(client, "dump", job, id="one", seconds=20)
    client.destroy("one")
    assert client.wait(tag)["wstatus"] == "0"
    assert supervisor.cgroup_leaves() == set()


def test_the_end_of_the_supervisor_is_the_end_of_a_dump(client: Client, supervisor: Supervisor, job: int) -> None:
    """At once; the fixture sees that nothing is left."""
    client.create()
    _run(job, "/bin/sleep", "1000")
    _ask(client, "dump", job, id="one", seconds=1000)
    while not supervisor.cgroup_leaves() >= {"one", "one.criu"}:
        time.sleep(0.001)
    supervisor.kill(signal.SIGTERM)
    supervisor.wait_gone(10)


@pytest.mark.parametrize(
    ("words", "seconds", "number"), [(("/bin/false",), 20, errno.EIO), (("/bin/sleep", "1000"), 1, errno.ETIMEDOUT)]
)
def test_a_restore_that_fails_leaves_nothing(
    client: Client, supervisor: Supervisor, job: int, words: tuple[str, ...], seconds: int, number: int
) -> None:
    """One whose program fails, and one whose program does not end."""
    _run(job, *words)
    with pytest.raises(RefusedError) as failed:
        client.wait(_ask(client, "restore", job, id="one", **{**SPEC, **RESTORE, "seconds": seconds}))
    assert (failed.value.stage, failed.value.errno) == ("restore", number)
    assert supervisor.cgroup_leaves() == set()
    assert client.listed() == []
    assert client.create().text("echo alive") == "alive"


def test_a_restore_is_prepared_as_a_start_is(client: Client, job: int) -> None:
    """Groups by the places, the root with its files, the mounts, the clocks, and the descriptors for the shim."""
    _run(
        job, "/bin/sh", "-c",
        "ls /run/job/root/bin/bash; ls -d /run/job/0/null /run/job/1/devices; cat /proc/sys/kernel/hostname;"
        " cat /proc/self/fd/6/guest/p1/cgroup.freeze; stat -L -c %u /proc/self/fd/6/guest/p1 /proc/self/fd/13;"
        " cut -d. -f1 /proc/uptime; echo $BARCHAN_RESTORE; exit 1",
    )  # fmt: skip
    with pytest.raises(RefusedError):
        client.wait(_ask(client, "restore", job, id="one", **{**SPEC, **RESTORE, "boottime_ns": 5000 * 10**9}))
    lines = _log(job).splitlines()
    assert lines[:5] == ["/run/job/root/bin/bash", "/run/job/0/null", "/run/job/1/devices", "box", "0"]
    owner = int(lines[9 - 1])
    assert [int(line) - owner for line in lines[5:7]] == [65535, 65535]
    assert 5000 <= int(lines[7]) < 5060


@pytest.mark.parametrize(
    ("op", "keys"),
    [("dump", {"seconds": 1}), ("restore", {**SPEC, **RESTORE})],
)  # fmt: skip
def test_a_request_without_its_directory_is_refused(client: Client, op: str, keys: dict[str, str | int]) -> None:
    """Before anything is made."""
    client.create("two")
    with pytest.raises(RefusedError) as refused:
        client.wait(_ask(client, op, None, id="two" if op == "dump" else "one", **keys))
    assert (refused.value.stage, refused.value.errno) == ("request", errno.EINVAL)
