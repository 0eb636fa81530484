"""Slots: made ahead, handed out once, fitted at the claim as a cold start would have been, and gone with their node."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from barchan.backends.container.cut import make_snapshot, remove_snapshot
from tests.guest.supervisor.driver import CGROUPS, Client, RefusedError, Sandbox, Supervisor, wait_members

pytestmark = [pytest.mark.requires("root", "static-libc", "mkfs.btrfs", "cgroup"), pytest.mark.timeout(120)]
PREFIX = "warm-"
LIMITS: dict[str, str | int] = {
    "upper_bytes": 16 << 20,
    "memory_bytes": 96 << 20,
    "pids": 33,
    "cpu_us": 150_000,
    "shm_bytes": 2 << 20,
    "hostname": "named",
}


def ready(client: Client, count: int) -> list[str]:
    """Ask for slots and wait for them; their ids, in the order they came."""
    client.request("slots", count=count, prefix=PREFIX).close()
    found: list[str] = []
    while len(found) < count:
        event = client.event()
        assert (event.word, event["ready"]) == ("slot", "1")
        found.append(event["id"])
    return found


def statistics(client: Client, count: int = 0) -> dict[str, int]:
    reply = client.request("slots", count=count, prefix=PREFIX)
    return {key: int(value) for key, value in reply.pairs}


def claim(client: Client, slot: str, **changes: str | int) -> Sandbox:
    tag = client.send_create(slot, **changes)
    reply = client.wait(tag)
    assert reply["warm"] == "1"
    client.sandboxes.append(Sandbox(slot, reply))
    return client.sandboxes[-1]


def inits(supervisor: Supervisor, slot: str) -> list[int]:
    path = next(path for path in supervisor.cgroups() if (path / slot / "guest").exists()) / slot / "cgroup.procs"
    return [int(line) for line in path.read_text().split()]


def seen(sandbox: Sandbox) -> list[str]:
    """What a guest sees of itself that a start decides: mounts in their order, names, rights, devices."""
    mounts = [
        line.split()[4:6] + line.partition(" - ")[2].split()[::2]
        for line in sandbox.text("cat /proc/self/mountinfo").splitlines()
    ]
    rest = sandbox.text(
        "hostname; grep -E '^(Cap|NoNew|Seccomp|Uid|Gid|Groups)' /proc/self/status; ls / /dev /dev/shm;"
        "stat -c '%u %g %a' / /proc /sys /dev /dev/null; stat -f -c '%b %t' / /dev/shm; grep -c . /proc/self/cgroup"
    )
    ids = re.compile(r"\bgid=|\buid=")
    options = [
        ",".join(item for item in words[-1].split(",") if not ids.match(item)) for words in mounts
    ]  # each has its own
    return (
        sorted(" ".join([*words[:-1], option]) for words, option in zip(mounts, options, strict=True))
        + rest.splitlines()
    )


def test_a_warm_sandbox_is_like_a_cold_one(client: Client) -> None:
    """Root, mounts and their options, names, rights and devices are the same; files written are seen by itself only."""
    (slot,) = ready(client, 1)
    warm, cold = claim(client, slot, hostname="same"), client.create("cold", hostname="same")
    warm.text("touch /written")
    cold.text("touch /written")
    assert seen(cold) == seen(warm)
    assert warm.uid_base != cold.uid_base


@pytest.mark.parametrize("factor", [0, 1, 2, 0.5])
def test_limits_are_those_of_the_claim(supervisor: Supervisor, client: Client, factor: float) -> None:
    """Memory, processes, processor time, disk, shared memory and name: what was asked for, not what a slot has, be that
    nothing or what the claim before (if any) was given.
    """
    (slot,) = ready(client, 1)
    if factor:
        numbers = ("upper_bytes", "memory_bytes", "pids", "cpu_us")
        claim(client, slot, **LIMITS | {name: int(int(LIMITS[name]) * factor) for name in numbers})
        slot = client.event()["id"]
    sandbox = claim(client, slot, **LIMITS)
    assert sandbox.text("hostname") == "named"
    assert sandbox.text("stat -f -c '%b %S' /dev/shm") == f"{(2 << 20) // 4096} 4096"
    assert sandbox.sh("dd if=/dev/zero of=/big bs=1M count=64").code != 0  # EDQUOT
    client.create("cold", **LIMITS)
    for hierarchy, name in (
        ("memory", "memory.limit_in_bytes"),
        ("memory", "memory.memsw.limit_in_bytes"),
        ("pids", "pids.max"),
        ("cpu", "cpu.cfs_quota_us"),
    ):
        files = [CGROUPS / hierarchy / "barchan" / supervisor.name / group / name for group in (slot, "cold")]
        if files[0].exists():  # cgroup version 1, with swap accounting
            assert files[0].read_text() == files[1].read_text()


def test_a_batch_sandbox_runs_beside_all_else(supervisor: Supervisor, client: Client) -> None:
    """Its programs are in a group that runs when nothing else of the host wants to; its init and slots are not."""
    (slot,) = ready(client, 1)
    claim(client, slot, cpu="latency")
    batch = client.create("batch", cpu="batch")
    if not (CGROUPS / "cpu" / "cpu.idle").exists():
        assert (CGROUPS / "barchan" / supervisor.name / "batch/guest/cpu.idle").read_text() == "1\n"
        return
    assert (CGROUPS / "cpu/barchan-batch/cpu.idle").read_text() == "1\n"
    handle, _, _ = batch.connection.start("job", ["sleep", "60"], user="0:0", env={"PATH": "/bin"})
    assert handle
    assert wait_members(CGROUPS / "cpu/barchan-batch" / supervisor.name / "batch")
    assert not (CGROUPS / "cpu/barchan" / supervisor.name / "batch").exists()
    assert (CGROUPS / "cpu/barchan" / supervisor.name / slot / "cpu.idle").read_text() == "0\n"
    init = Path(f"/proc/{batch.pid}/cgroup").read_text()
    assert f"/barchan/{supervisor.name}/init" in init
    assert "barchan-batch" not in init


def test_networks(client: Client) -> None:
    """A slot can have any network: the proxy's listener and the namespace come with the claim."""
    first, second, third = ready(client, 3)
    assert claim(client, first, network="none").extra == []
    assert claim(client, second, network="open").extra != []
    proxy = claim(client, third, network="proxy")
    assert "0C38" in proxy.text("cat /proc/net/tcp")  # 3128


def test_a_burst_hands_every_slot_out_once_and_clean(client: Client) -> None:
    """Many claims at once: no slot twice, each as empty as a fresh one; those that find none are cold."""
    slots = ready(client, 12)
    tags = {slot: client.send_create(slot) for slot in slots} | {
        f"cold{number}": client.send_create(f"cold{number}") for number in range(6)
    }
    again = [client.send_create(slot) for slot in slots]
    made = [client.take(name, tag) for name, tag in tags.items()]
    for tag in again:
        with pytest.raises(RefusedError, match="exists"):
            client.wait(tag)
    assert len({sandbox.pid for sandbox in made}) == len({sandbox.uid_base for sandbox in made}) == 18
    for number, sandbox in enumerate(made):
        assert sandbox.text(f"ls /mark 2>/dev/null; echo {number} > /mark; cat /mark") == str(number)
    counted = statistics(client)
    assert (counted["claimed"], counted["cold"], counted["died"]) == (12, 6, 0)


def test_slots_are_filled_again(client: Client) -> None:
    """A claimed one is replaced by another; the pool asked for is there again, and no used one comes back."""
    slots = ready(client, 2)
    claim(client, slots[0])
    event = client.event()
    assert event["ready"] == "1"
    assert event["id"] not in slots
    client.destroy(slots[0])
    assert statistics(client, 2)["ready"] == 2


@pytest.mark.parametrize("victim", ["init", "keeper"])
def test_a_slot_that_died_is_not_handed_out(supervisor: Supervisor, client: Client, victim: str) -> None:
    """It is told, or the claim that comes first fails at stage `slot`; after a destroy its name can be used cold."""
    (slot,) = ready(client, 1)
    init = inits(supervisor, slot)[0]
    keepers = [pid for pid in supervisor.processes() if pid not in (supervisor.pid, init)]
    assert len(keepers) == 1
    os.kill(init if victim == "init" else keepers[0], signal.SIGKILL)
    tag = client.send_create(slot)
    try:
        client.take(slot, tag)
    except RefusedError as refused:
        assert refused.stage == "slot"
        with suppress(RefusedError):  # nothing of it may be left by now
            client.destroy(slot)
        client.create(slot)
    assert client.sandboxes[-1].text("echo alive") == "alive"


@pytest.mark.parametrize("changes", [{"root": "capable"}, {"cpu": "batch"}])
def test_what_a_slot_cant_be_is_refused(client: Client, changes: dict[str, str]) -> None:
    """The slot stays what it is."""
    (slot,) = ready(client, 1)
    with pytest.raises(RefusedError) as refused:
        client.create(slot, **changes)
    assert refused.value.stage == "slot"
    assert claim(client, slot).text("echo alive") == "alive"


def test_a_claim_that_cant_be_met_leaves_nothing(supervisor: Supervisor, client: Client) -> None:
    """A broken wish says `slot`, and where it broke; nothing of it stays, and cold it fails for its own reason."""
    (slot,) = ready(client, 1)
    with pytest.raises(RefusedError, match="overlay") as refused:
        client.create(slot, layers="base:base")  # an overlay takes no layer twice
    assert refused.value.stage == "slot"
    assert slot not in supervisor.cgroup_leaves()
    with pytest.raises(RefusedError) as refused:
        client.create(slot, layers="base:base")
    assert refused.value.stage == "overlay"


def test_destroy_ends_a_slot(supervisor: Supervisor, client: Client) -> None:
    """A node may let one go; the pool makes another."""
    slots = ready(client, 2)
    client.destroy(slots[0])
    assert [client.event()["ready"] for _ in range(2)] in (["0", "1"], ["1", "0"])
    assert statistics(client)["ready"] == 0


def test_slots_go_with_their_node(supervisor: Supervisor) -> None:
    """Its connection closed: the sandboxes stay, the slots go, and the next node finds only the former."""
    old = supervisor.connect()
    kept, *rest = ready(old, 3)
    claim(old, kept)
    old.socket.close()
    deadline = time.monotonic() + 10
    while supervisor.cgroup_leaves() != {kept} and time.monotonic() < deadline:
        time.sleep(0.02)
    assert supervisor.cgroup_leaves() == {kept}
    new = supervisor.connect()
    assert new.listed() == [kept]
    assert new.attach(kept).text("echo alive") == "alive"
    assert statistics(new)["ready"] == 0
    assert rest


def test_a_supervisor_with_slots_alone_ends_soon(supervisor: Supervisor) -> None:
    """They hold nobody's state: without a node it does not wait for one."""
    client = supervisor.connect()
    ready(client, 3)
    client.socket.close()
    assert supervisor.wait_gone(20) < 15


def test_killed_it_takes_its_slots_along(supervisor: Supervisor, make_supervisor: Callable[[], Supervisor]) -> None:
    """Inits and keepers die with it; the next supervisor of the name clears what is left of their groups."""
    client = supervisor.connect()
    slots = ready(client, 3)
    pids = [pid for slot in slots for pid in inits(supervisor, slot)] + supervisor.processes()
    supervisor.kill(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while [pid for pid in pids if _runs(pid)] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if _runs(pid)] == []
    client.close()
    supervisor.clients.clear()
    supervisor.pid = 0
    assert supervisor.start() == "ready"
    assert supervisor.connect().listed() == []


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in (Path("/proc") / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_shutdown_leaves_no_slot(supervisor: Supervisor, client: Client) -> None:
    """Answered when nothing is left, even while one is being filled."""
    ready(client, 2)
    client.request("slots", count=9, prefix=PREFIX).close()
    client.request("shutdown").close()
    supervisor.wait_gone()


@pytest.mark.parametrize(
    "switch", ["--no-userns", "--no-netns", "--no-pidns", "--no-masks", "--no-caps-drop", "--no-seccomp"]
)
def test_weakened_supervisors_have_slots_too(make_supervisor: Callable[[], Supervisor], switch: str) -> None:
    """What a switch takes away is taken from warm ones too; they start."""
    supervisor = make_supervisor()
    assert supervisor.start(switch) == "ready"
    client = supervisor.connect()
    (slot,) = ready(client, 1)
    sandbox = claim(client, slot, network="proxy")
    assert seen(sandbox) == seen(client.create("cold", network="proxy", hostname="box"))


def test_a_slot_takes_the_files_of_a_cut(client: Client) -> None:
    """A fork's child can be warm: it has what its parent wrote, and a quota of its own."""
    (slot,) = ready(client, 1)
    client.create("parent").text("echo kept > /file; rm /bin/hostname")
    with closing(client.request("pool")) as pool:
        fds = pool.fds
        source = os.open("parent", os.O_RDONLY, dir_fd=fds[0])
        make_snapshot(source, fds[1], "cut-1")
        os.close(source)
        child = claim(client, slot, cut="cut-1", upper_bytes=16 << 20)
        remove_snapshot(fds[1], "cut-1")
    assert child.text("cat /file; ls /bin/hostname 2>/dev/null || echo none") == "kept\nnone"
    assert child.sh("dd if=/dev/zero of=/big bs=1M count=64").code != 0
