"""A microVM from its kernel to a sandbox: what is in it, what holds it, what its init alone can do."""

import io
import signal
import struct
import tarfile
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.guest.boot.machine import BOOT, DISK_MIB, GUEST_MIB, Vm
from tests.guest.init.driver import ALL, HOLD, MAIN, RESEED, SETCLOCK, THAW, GuestReplyError
from tests.guest.init.line import CONFIGURE, COUNTERS, Line

pytestmark = [pytest.mark.requires("qemu", "guest-kernel", "static-libc"), pytest.mark.timeout(180)]

ROOT, PLATFORM, FOLLOWED, BLOCK, MACHINE = "", 8, 16, 4, 3
ATTEMPTS = """
import ctypes, errno, os

def attempt(name, function, *arguments):
    try:
        function(*arguments)
        print(name + "=done")
    except OSError as error:
        print(name + "=" + errno.errorcode[error.errno])

def mount():
    if ctypes.CDLL(None, use_errno=True).mount(b"x", b"/mnt", b"devtmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "")

attempt("kill", os.kill, 1, 9)
attempt("mknod", os.mknod, "/tmp/disk", 0o60600, os.makedev(254, 0))
attempt("chroot", os.chroot, "/tmp")
attempt("mount", mount)
attempt("setuid", os.setuid, 65535)
attempt("environ", open, "/proc/1/environ")
attempt("fds", os.listdir, "/proc/1/fd")
attempt("memory", open, "/proc/1/mem")
attempt("oom_score", open, "/proc/1/oom_score_adj", "w")
attempt("hostname", open, "/proc/sys/kernel/hostname", "w")
attempt("core_pattern", open, "/proc/sys/kernel/core_pattern", "w")
"""
OWN_ADDRESS = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.connect(("192.0.2.1", 9))
print(s.getsockname()[0])
"""
COUNTER_NAMES = ("oom_kills", "memory_bytes", "memory_peak_bytes", "cpu_us", "pids")


@pytest.fixture(scope="module")
def vm() -> Iterator[Vm]:
    vm = Vm()
    yield vm
    said = vm.console
    vm.close()
    assert said == "", "nothing is worth a line on the console"


@pytest.fixture
def line(vm: Vm) -> Iterator[Line]:
    line = vm.connect()
    yield line
    line.close()


def sh(line: Line, script: str, **options: object) -> str:
    ended = line.run(["sh", "-c", script], **{"user": ROOT, **options})
    return (ended.out + ended.err).decode()


def filling(mib: int) -> list[str]:
    """A program that uses so much memory."""
    return ["dd", "if=/dev/zero", "of=/dev/null", f"bs={mib}M", "count=1"]


def counters(line: Line) -> dict[str, int]:
    return dict(zip(COUNTER_NAMES, struct.unpack("<QQQQQ", line.request(COUNTERS)), strict=True))


def test_it_looks_like_any_sandbox(line: Line) -> None:
    """The same devices, the same covered /proc, its own name, no disk, no console and no port of the machine's."""
    assert sh(line, "hostname; id -u; cat /proc/self/cgroup | cut -d/ -f-3") == "tiny\n0\n0::/barchan/guest\n"
    devices = "fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert sh(line, "ls /dev").split() == devices.split()
    mounts = {words[1]: words[3] for words in map(str.split, sh(line, "cat /proc/mounts").splitlines())}
    assert {path for path in mounts if not path.startswith("/proc/")} == {
        *("/", "/dev", "/dev/pts", "/dev/shm", "/proc", "/sys", "/sys/devices/system/cpu"),
        *(path for path in mounts if path == "/sys/devices/system/node"),
    }
    assert all("ro," in mounts[path] for path in ("/dev", "/sys", "/proc/sys", "/sys/devices/system/cpu"))
    assert sh(line, "ls /sys/devices/system; cat /proc/kmsg | wc -c").split()[-1] == "0"


def test_guest_root_can_t_reach_what_holds_it(line: Line) -> None:
    """It has no capability, sees nothing of the init, and can neither signal it nor change its limits or the kernel."""
    found = dict(word.split("=") for word in line.run(["python3", "-c", ATTEMPTS], user=ROOT).out.decode().split())
    assert found == {
        **dict.fromkeys(("kill", "mknod", "chroot", "mount", "setuid"), "EPERM"),
        **dict.fromkeys(("environ", "fds", "memory", "oom_score"), "EACCES"),
        **dict.fromkeys(("hostname", "core_pattern"), "EROFS"),
    }
    assert sh(line, "grep Cap /proc/self/status | tr -d '0\\n\\t'") == "CapInh:CapPrm:CapEff:CapBnd:CapAmb:"
    assert line.ping()["running"] == 0


def test_memory_limit(line: Line) -> None:
    """Reaching it kills inside the guest, and the guest's kernel counts it; what the host asks for still works."""
    before = counters(line)["oom_kills"]
    grown = line.run(filling(GUEST_MIB), user=ROOT)
    assert grown.code == -signal.SIGKILL
    after = counters(line)
    assert after["oom_kills"] == before + 1
    beyond = 64 << 10  # charges that a kernel can't refuse, such as a page of a page table
    assert GUEST_MIB << 19 < after["memory_peak_bytes"] <= (GUEST_MIB << 20) + beyond


def test_process_limit(line: Line) -> None:
    """With all processes used up, the init answers, reads files, runs the platform's programs and kills the rest."""
    bomb, _, _ = line.start("bomb", ["sh", "-c", "while :; do sleep 100 & done 2>/dev/null"], user=ROOT)
    deadline = time.monotonic() + 30
    while counters(line)["pids"] < BOOT.pids:
        assert time.monotonic() < deadline
    assert line.sh("true | echo no", user=ROOT).code != 0
    assert line.sh("echo platform", user=ROOT, flags=FOLLOWED | PLATFORM).out == b"platform\n"
    assert line.applet("read", "/etc/hostname", "0", "-1", user=ROOT).code == 0
    assert line.signal(bomb, signal.SIGKILL, ALL) >= BOOT.pids - 1
    line.wait_exit(bomb)
    assert line.sh("echo again", user=ROOT).out == b"again\n"


def test_full_disk(line: Line) -> None:
    """A guest that fills its disk gets ENOSPC at its size; what programs say is kept all the same."""
    filled = line.sh("cat /dev/zero > /root/full; stat -c %s /root/full", user=ROOT)
    assert b"No space left" in filled.err
    assert (DISK_MIB - 12) << 20 < int(filled.out) <= DISK_MIB << 20
    handle, _, _ = line.start(
        "loud", ["sh", "-c", "head -c 4000000 /dev/zero; rm /root/full"], user=ROOT, flags=0, spool_bytes=8 << 20
    )
    line.follow(handle)
    assert len(line.wait_exit(handle).out) == 4_000_000


def test_hold(line: Line) -> None:
    """While held, no program of the guest runs, and the init goes on answering; a thaw lets them go on."""
    handle, _, _ = line.start("busy", ["sh", "-c", "while :; do :; done"], user=ROOT)
    line.request(HOLD)
    used = counters(line)["cpu_us"]
    assert line.applet("stat", "/", user=ROOT).code == 0
    time.sleep(0.3)
    assert counters(line)["cpu_us"] == used
    line.request(HOLD)
    line.request(THAW, bytes(8))
    deadline = time.monotonic() + 20
    while counters(line)["cpu_us"] == used:
        assert time.monotonic() < deadline
    line.signal(handle, signal.SIGKILL, MAIN)


def test_what_a_copy_of_a_machine_is_given(line: Line) -> None:
    """Its time, other random numbers at once, a name of its own and its guest's limits."""
    line.request(SETCLOCK, struct.pack("<q", 1_900_000_000 * 10**9))
    assert 1_900_000_000 <= int(sh(line, "date +%s")) < 1_900_000_100
    line.request(RESEED, struct.pack("<I", 64) + bytes(64))
    line.request(CONFIGURE, struct.pack("<I", 5) + b"other" + struct.pack("<QQ", 24 << 20, 0))
    assert sh(line, "hostname") == "other\n"
    assert line.run(filling(24), user=ROOT).code == -signal.SIGKILL
    line.request(CONFIGURE, struct.pack("<I", 0) + struct.pack("<QQ", BOOT.memory_bytes, 0))
    with pytest.raises(GuestReplyError):
        line.request(CONFIGURE, struct.pack("<I", 64) + b"x" * 64 + bytes(16))


def test_what_was_written_as_a_layer(line: Line) -> None:
    """New, changed, removed, renamed and linked, with owners, times and attributes; nothing of what only lies below."""
    script = """
        umask 022; cd /srv; mkdir -p made/deep; echo text > made/file; ln made/file made/same; ln -s file made/link
        mkfifo made/pipe; rm /etc/hostname; mv /etc/skel /etc/moved; rm -r /usr/share/zoneinfo 2>/dev/null
        python3 -c "import os; os.setxattr('made/deep', 'user.k', b'v'); os.utime('made/file', ns=(5, 1234567891))"
    """
    assert sh(line, script) == ""
    written = line.run(["layer"], kind=MACHINE, flags=FOLLOWED | BLOCK | PLATFORM)
    assert (written.code, written.err) == (0, b"")
    with tarfile.open(fileobj=io.BytesIO(written.out)) as archive:
        members = {member.name: member for member in archive}
    of_made = {name: (member.type, member.size, member.linkname) for name, member in members.items() if "made" in name}
    first, second = ("file", "same") if members["srv/made/file"].isreg() else ("same", "file")
    assert of_made == {
        "srv/made": (b"5", 0, ""),
        "srv/made/.wh..wh..opq": (b"0", 0, ""),
        "srv/made/deep": (b"5", 0, ""),
        f"srv/made/{first}": (b"0", 5, ""),
        f"srv/made/{second}": (b"1", 0, f"srv/made/{first}"),
        "srv/made/link": (b"2", 0, "file"),
        "srv/made/pipe": (b"6", 0, ""),
    }
    assert members["srv/made/deep"].pax_headers["SCHILY.xattr.user.k"] == "v"
    assert members[f"srv/made/{first}"].pax_headers["mtime"] == "1.234567891"
    assert {"etc/.wh.hostname", "etc/.wh.skel", "etc/moved/.wh..wh..opq", "etc/moved/.bashrc"} <= set(members)
    assert "etc/passwd" not in members and "bin" not in members
    assert line.run(["sync"], kind=MACHINE).code == 0


def test_connections_follow_each_other(vm: Vm) -> None:
    """After one that was closed, at once or later, idle or in the middle of a frame or of output, comes the next."""
    line = vm.connect()
    yes, _, _ = line.start("yes", ["yes"], user=ROOT, flags=0)
    for step in range(6):
        if step % 3 == 1:
            line.socket.sendall(struct.pack("<IBBHI", 1 << 20, 3, 0, 0, 9) + bytes(200_000))
        elif step % 3 == 2:
            line.follow(yes)
        line.close()
        if step > 2:
            time.sleep(0.1)
        line = vm.connect()
        assert line.sh("echo here", user=ROOT).out == b"here\n"
    assert line.signal(yes, signal.SIGKILL, MAIN) == 1
    assert line.run(["head", "-c", "8000000", "/dev/zero"], user=ROOT, flags=FOLLOWED | BLOCK).out == bytes(8_000_000)
    line.close()


def test_a_capable_root_and_a_network() -> None:
    """Root has power over the guest's files and ids and none over the init; eth0 has its address and its way out."""
    vm = Vm(command=msgspec.structs.replace(BOOT, root_capable=True, net=("10.0.2.15/24", "10.0.2.2")), network=True)
    try:
        line = vm.connect()
        assert sh(line, "touch /srv/x && chown 1000:1000 /srv/x && stat -c %u /srv/x") == "1000\n"
        assert "not permitted" in sh(line, "kill -9 1; python3 -c 'import os; os.setuid(65535)'")
        assert line.ping()["running"] == 0
        assert line.run(["python3", "-c", OWN_ADDRESS], user=ROOT).out == b"10.0.2.15\n"
        line.close()
    finally:
        vm.close()


def test_a_machine_that_can_t_be_made_ends() -> None:
    """And its last words say why."""
    vm = Vm(command=msgspec.structs.replace(BOOT, layers=0))
    try:
        vm.process.wait(timeout=60)
        assert vm.console.splitlines()[0] == "barchan-boot: barchan.layers: Invalid argument"
    finally:
        vm.close()
