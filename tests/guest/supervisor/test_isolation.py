"""What a guest, as its root, can see and do; and that each protection is what prevents the rest."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guest.supervisor.driver import INIT_UID, UID_FIRST, Client, RefusedError, Sandbox, Supervisor

pytestmark = [
    pytest.mark.requires("root", "static-libc", "mkfs.btrfs", "cgroup"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the system call numbers here are x86_64's"),
]

NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "cgroup", "user", "time")
MASKED = (
    "keys",
    "key-users",
    "timer_list",
    "kpagecount",
    "kpageflags",
    "kallsyms",
    "slabinfo",
    "vmallocinfo",
    "interrupts",
)


@pytest.fixture
def sandbox(client: Client) -> Sandbox:
    return client.create("one")


def weak(make_supervisor: Callable[[], Supervisor], switch: str) -> Sandbox:
    """A sandbox of a supervisor with one protection switched off."""
    supervisor = make_supervisor()
    assert supervisor.start(switch) == "ready"
    client = supervisor.connect()
    assert switch.removeprefix("--") in client.hello()["features"].split(",")
    return client.create("one")


def started(sandbox: Sandbox) -> int:
    """The host's number of a program that runs as guest root."""
    handle, _, _ = sandbox.connection.start(
        "job", ["bash", "-c", "echo up; exec sleep 60"], user="0:0", env={"PATH": "/bin"}
    )
    sandbox.connection.wait_until(handle, b"up")
    (child,) = Path(f"/proc/{sandbox.pid}/task/{sandbox.pid}/children").read_text().split()
    return int(child)


def test_namespaces_are_its_own(sandbox: Sandbox) -> None:
    """Every namespace differs from the host's."""
    differing = {
        name
        for name in NAMESPACES
        if os.readlink(f"/proc/{sandbox.pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
    }
    assert differing == set(NAMESPACES)


def test_guest_root_is_nobody_on_the_host(client: Client, sandbox: Sandbox) -> None:
    """Guest root and the init are ids of the sandbox's range; files belong to guest root inside."""
    child = started(sandbox)
    status = Path(f"/proc/{sandbox.pid}/status").read_text()
    assert re.search(rf"^Uid:(\s+{UID_FIRST + INIT_UID}){{4}}$", status, re.M)
    assert os.stat(f"/proc/{child}").st_uid == UID_FIRST
    assert sandbox.text("touch /tmp/mine; stat -c %u:%g /tmp/mine /bin/cat").split() == ["0:0", "0:0"]
    assert os.stat(f"/proc/{child}/root/tmp/mine").st_uid == UID_FIRST


def test_no_capability_and_no_way_to_one(sandbox: Sandbox) -> None:
    """Guest root has no capability in any set, can't gain one, and is filtered."""
    status = dict(re.findall(r"^(\w+):\s+(\S+)$", sandbox.text("cat /proc/self/status"), re.M))
    assert [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == ["0" * 16] * 5
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_a_capable_root_is_asked_for(client: Client) -> None:
    """By its word; another word is an error that names the key."""
    sandbox = client.create("b", root="capable")
    status = dict(re.findall(r"^(\w+):\s+(\S+)$", sandbox.text("cat /proc/self/status"), re.M))
    assert [status[name] for name in ("CapPrm", "CapEff", "CapBnd")] == ["00000000800400db"] * 3
    assert (status["CapAmb"], status["NoNewPrivs"], status["Seccomp"]) == ("0" * 16, "1", "2")
    assert b"Read-only" in sandbox.sh("rm /dev/.barchan/init.sock").err
    with pytest.raises(RefusedError, match="request: root"):
        client.create("c", root="all")


def test_only_its_own_processes(sandbox: Sandbox) -> None:
    """/proc shows the init, the shell and what it runs."""
    assert sandbox.text("cd /proc; n=0; for p in [0-9]*; do n=$((n+1)); done; echo $n") == "2"


def test_proc_is_masked(sandbox: Sandbox) -> None:
    """What tells about the host is empty, and nothing of the kernel's settings can be written."""
    for name in MASKED:
        if os.path.exists(f"/proc/{name}"):
            assert sandbox.text(f"cat /proc/{name}") == ""
    for path in ("/proc/sys/kernel/domainname", "/proc/sys/vm/swappiness", "/proc/irq/default_smp_affinity"):
        assert b"Read-only" in sandbox.sh(f"echo 1 > {path}").err
    assert sandbox.sh("echo b > /proc/sysrq-trigger").code != 0


def test_dev_and_sys_are_minimal(sandbox: Sandbox) -> None:
    """Harmless nodes only, none can be made, nothing can be added; /sys counts processors and no more."""
    assert sandbox.text("cd /dev; for n in *; do test -c $n && ! test -L $n && echo $n; done").split() == [
        *("full", "null", "random", "tty", "urandom", "zero")
    ]
    assert b"Read-only" in sandbox.sh("touch /dev/new").err
    assert sandbox.sh("mknod /tmp/mem c 1 1").code != 0
    assert sandbox.sh("ls /dev/.barchan").code != 0
    assert sandbox.text("ls /sys /sys/devices /sys/devices/system").split() == [
        *("/sys:", "devices", "/sys/devices:", "system", "/sys/devices/system:", "cpu", "node")
    ]
    assert (
        sandbox.text("cat /sys/devices/system/cpu/online") == Path("/sys/devices/system/cpu/online").read_text().strip()
    )
    assert sandbox.text("echo x > /dev/null; test -t 0 || ls /dev/pts") == "ptmx"


def test_the_mount_table_tells_nothing_of_the_host(supervisor: Supervisor, sandbox: Sandbox) -> None:
    """No path of the host shows in the guest's mounts."""
    mounts = sandbox.text("cat /proc/self/mountinfo")
    assert str(supervisor.directory) not in mounts and "barchan/" not in mounts and "/dev/loop" not in mounts


ALLOWED = {
    "getpid": (39,),
    "ptrace TRACEME": (101, 0),
    "unshare(FILES)": (272, 0x400),
    "socket(UNIX)": (41, 1, 1, 0),
    "socket(INET)": (41, 2, 1, 0),
    "socket(INET6)": (41, 10, 1, 0),
    "socket(NETLINK, ROUTE)": (41, 16, 3, 0),
    "personality(query)": (135, 0xFFFFFFFF),
    "personality(ADDR_NO_RANDOMIZE)": (135, 0x40000),
}
REFUSED = {
    "unshare(NEWUSER)": (errno.EPERM, 272, 0x10000000),
    "unshare(NEWNS)": (errno.EPERM, 272, 0x20000),
    "unshare(NEWTIME)": (errno.EPERM, 272, 0x80),
    "clone(NEWUSER)": (errno.EPERM, 56, 0x10000011),
    "clone3": (errno.ENOSYS, 435, 0, 0),
    "setns": (errno.EPERM, 308, 0, 0),
    "mount": (errno.EPERM, 165, 0, 0, 0, 0, 0),
    "umount2": (errno.EPERM, 166, 0, 0),
    "pivot_root": (errno.EPERM, 155, 0, 0),
    "fsopen": (errno.EPERM, 430, 0, 0),
    "open_tree": (errno.EPERM, 428, 0, 0, 0),
    "move_mount": (errno.EPERM, 429, 0, 0, 0, 0, 0),
    "mount_setattr": (errno.EPERM, 442, 0, 0, 0, 0, 0),
    "bpf": (errno.EPERM, 321, 0, 0, 0),
    "perf_event_open": (errno.EPERM, 298, 0, 0, 0, 0, 0),
    "userfaultfd": (errno.EPERM, 323, 0),
    "io_uring_setup": (errno.EPERM, 425, 0, 0),
    "keyctl": (errno.EPERM, 250, 0, 0),
    "add_key": (errno.EPERM, 248, 0, 0, 0, 0, 0),
    "open_by_handle_at": (errno.EPERM, 304, 0, 0, 0),
    "init_module": (errno.EPERM, 175, 0, 0, 0),
    "finit_module": (errno.EPERM, 313, 0, 0, 0),
    "kexec_load": (errno.EPERM, 246, 0, 0, 0, 0),
    "reboot": (errno.EPERM, 169, 0, 0, 0, 0),
    "swapon": (errno.EPERM, 167, 0, 0),
    "acct": (errno.EPERM, 163, 0),
    "syslog": (errno.EPERM, 103, 0, 0, 0),
    "settimeofday": (errno.EPERM, 164, 0, 0),
    "clock_settime": (errno.EPERM, 227, 0, 0),
    "iopl": (errno.EPERM, 172, 3),
    "fanotify_init": (errno.EPERM, 300, 0, 0),
    "modify_ldt": (errno.EPERM, 154, 0, 0, 0),
    "ioctl(TIOCSTI)": (errno.EPERM, 16, 0, 0x5412, 0),
    "ioctl(TIOCLINUX)": (errno.EPERM, 16, 0, 0x541C, 0),
    "ioctl(TIOCSTI) with high bits": (errno.EPERM, 16, 0, 0x100005412, 0),
    "socket(PACKET)": (errno.EAFNOSUPPORT, 41, 17, 3, 0),
    "socket(VSOCK)": (errno.EAFNOSUPPORT, 41, 40, 1, 0),
    "socket(ALG)": (errno.EAFNOSUPPORT, 41, 38, 5, 0),
    "socket(NETLINK, NETFILTER)": (errno.EAFNOSUPPORT, 41, 16, 3, 12),
    "personality(READ_IMPLIES_EXEC)": (errno.EPERM, 135, 0x400000),
    "mseal": (errno.ENOSYS, 462, 0, 0, 0),
    "prctl(SET_MDWE)": (errno.EINVAL, 157, 65, 1, 0, 0, 0),
    "a number from the future": (errno.ENOSYS, 500),
}


def test_system_calls_of_ordinary_programs_work(sandbox: Sandbox) -> None:
    """What is allowed reaches the kernel and succeeds."""
    results = {name: sandbox.probe(*call) for name, call in ALLOWED.items()}
    assert {name for name, result in results.items() if result < 0} == set()


def test_system_calls_that_reach_the_host_are_refused(sandbox: Sandbox) -> None:
    """What is not allowed fails with the errno that a program knows how to take."""
    results = {name: sandbox.probe(*call) for name, (_, *call) in REFUSED.items()}
    assert results == {name: -number for name, (number, *_) in REFUSED.items()}


def test_calls_of_another_architecture_kill(sandbox: Sandbox) -> None:
    """A number of the x32 kind ends the program."""
    assert sandbox.sh("exec probe 0x40000027").code == -31


def test_the_writable_layer_has_a_size(client: Client) -> None:
    """Beyond it the guest gets EDQUOT; the file's bytes cost it no memory, and removing makes room again."""
    sandbox = client.create("one", upper_bytes=32 << 20, memory_bytes=24 << 20)
    output = sandbox.sh("dd if=/dev/zero of=/tmp/big bs=1M count=64")
    assert output.code != 0
    assert b"Disk quota exceeded" in output.err
    assert 16 << 20 < os.stat(f"/proc/{sandbox.pid}/root/tmp/big").st_size <= 32 << 20
    sandbox.text("rm /tmp/big; echo room > /tmp/small; cat /tmp/small")
    assert client.destroy("one")["oom_kills"] == 0


def test_shared_memory_has_a_size(sandbox: Sandbox) -> None:
    """/dev/shm ends with ENOSPC."""
    output = sandbox.sh("dd if=/dev/zero of=/dev/shm/big bs=64k count=32")
    assert b"No space left" in output.err


def test_a_fork_bomb_stays_in_its_limit(client: Client) -> None:
    """No more processes than asked for, of which the bomb itself is one."""
    sandbox = client.create("one", pids=20)
    assert int(sandbox.sh("exec probe fork 100").out) == 19


def test_loopback_and_nothing_else(sandbox: Sandbox) -> None:
    """One interface, up; low ports are open to everybody inside."""
    assert sandbox.text("cat /proc/net/dev").count(":") == 1
    assert sandbox.text("cat /proc/sys/net/ipv4/ip_unprivileged_port_start") == "0"
    output = sandbox.sh("exec 3<>/dev/tcp/127.0.0.1/9")
    assert b"Connection refused" in output.err


def test_the_whole_tree_can_be_read(sandbox: Sandbox) -> None:
    """Reading every file of /proc (but processes' own), /sys and /dev/shm as guest root ends and harms nothing."""
    output = sandbox.sh(
        "grep -rsa -m1 xyzzy-not-there /sys /proc/[a-z]* /dev/shm --exclude-dir=self --exclude-dir=thread-self"
    )
    assert output.code in (1, 2)


class TestEachProtectionMatters:
    """With its switch, what the test above promises no longer holds."""

    def test_userns(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """Guest root is the host's."""
        sandbox = weak(make_supervisor, "--no-userns")
        sandbox.text("touch /tmp/mine")
        assert os.stat(f"/proc/{sandbox.pid}/root/tmp/mine").st_uid == 0

    def test_seccomp(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """A user namespace can be made."""
        assert weak(make_supervisor, "--no-seccomp").probe(272, 0x10000000) == 0

    def test_masks(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """The host's entries can be read."""
        assert weak(make_supervisor, "--no-masks").text("cat /proc/key-users /proc/interrupts") != ""

    def test_quota(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """The writable layer takes more than its size."""
        assert weak(make_supervisor, "--no-quota").sh("dd if=/dev/zero of=/tmp/big bs=1M count=80").code == 0

    def test_netns(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """The host's interfaces are there."""
        assert (
            weak(make_supervisor, "--no-netns").text("cat /proc/net/dev") == Path("/proc/net/dev").read_text().strip()
        )

    def test_memory_limit(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """More memory than asked for can be had."""
        assert weak(make_supervisor, "--no-memory-limit").text("probe eat 300") == "ate"

    def test_pids_limit(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """More processes than asked for can be made."""
        assert int(weak(make_supervisor, "--no-pids-limit").sh("exec probe fork 100").out) == 100

    def test_pidns(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """/proc shows the host's processes."""
        assert str(os.getpid()) in weak(make_supervisor, "--no-pidns").text("ls /proc").split()

    def test_layers(self, make_supervisor: Callable[[], Supervisor], layer: Path) -> None:
        """A guest's write reaches the layer."""
        weak(make_supervisor, "--writable-layers").text("echo x > /etc/written; rm /etc/written; touch /etc")
        before = layer.stat().st_mtime_ns
        weak(make_supervisor, "--writable-layers").text("mkdir /written")
        (layer / "written").rmdir()
        assert layer.stat().st_mtime_ns > before

    def test_caps(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """Programs may gain privileges by exec."""
        assert "NoNewPrivs:\t0" in weak(make_supervisor, "--no-caps-drop").text("cat /proc/self/status")

    def test_dev(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """A node of the host's kernel is there."""
        assert weak(make_supervisor, "--full-dev").text("ls /dev/kmsg") == "/dev/kmsg"

    def test_init_leaf(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """The init is in the guest's leaf."""
        sandbox = weak(make_supervisor, "--init-in-guest-leaf")
        assert re.search(
            r":(pids:|:)/barchan/[^/]+/one(/guest)?$", Path(f"/proc/{sandbox.pid}/cgroup").read_text(), re.M
        )

    def test_init_uid(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """The init is guest root."""
        sandbox = weak(make_supervisor, "--init-as-guest-root")
        assert re.search(rf"^Uid:(\s+{UID_FIRST}){{4}}$", Path(f"/proc/{sandbox.pid}/status").read_text(), re.M)

    def test_exec_cgroup(self, make_supervisor: Callable[[], Supervisor]) -> None:
        """A start has no cgroup of its own."""
        sandbox = weak(make_supervisor, "--no-exec-cgroup")
        child = started(sandbox)
        assert "/guest/" not in Path(f"/proc/{child}/cgroup").read_text()
