"""What the platform does on a guest's files and output for a client, however the guest has prepared them."""

import os
import stat
from pathlib import Path

import pytest

from barchan.errors import BarchanError, Denied, InvalidSpec, RemoteProtocolError
from barchan.sdk.sandbox import Sandbox
from tests.nodes import NodeProcess
from tests.security.lab import Lab

MIB = 1 << 20
TRAPS = """
import os, stat
os.makedirs("/tmp/traps", exist_ok=True)
os.chdir("/tmp/traps")
os.symlink("/etc", "etc"); os.symlink("/root/secret", "secret"); os.symlink("/proc/1/environ", "environ")
os.symlink("loop", "loop"); os.mkfifo("fifo")
import socket
socket.socket(socket.AF_UNIX).bind("socket")
"""


@pytest.fixture(scope="module")
def trapped(lab: Lab) -> Sandbox:
    """A sandbox whose agent has laid traps, with a secret of guest root's."""
    sandbox = lab.create()
    sandbox.files.as_user("root").write("/root/secret", b"secret", mode=0o600)
    assert sandbox.exec(["python3", "-c", TRAPS]).ok
    return sandbox


ATTACK = """
import os, signal
tried = []
for pid in os.listdir("/proc"):
    if pid.isdecimal() and pid not in ("1", str(os.getpid())):
        for attack in (
            lambda: os.kill(int(pid), signal.SIGSTOP),
            lambda: os.sched_setaffinity(int(pid), {0}),
            lambda: os.setpriority(os.PRIO_PROCESS, int(pid), 19),
            lambda: os.kill(int(pid), signal.SIGKILL),
        ):
            try:
                attack(); tried.append("done")
            except OSError as error:
                tried.append(error.strerror)
print(sorted(set(tried)))
"""


class TestAsTheAskingUser:
    """File operations have the rights of the user they are asked for, and meet only regular files."""

    @pytest.mark.parametrize("path", ["/root/secret", "/tmp/traps/secret", "/tmp/traps/environ"])
    def test_reads_need_the_users_rights(self, trapped: Sandbox, path: str) -> None:
        """By name or through a link: what the agent can't read, an operation for the agent can't."""
        with pytest.raises(Denied):
            trapped.files.read(path)

    def test_guest_root_can_read_its_own(self, trapped: Sandbox) -> None:
        """The same path is read by the same operation for the user who may."""
        assert trapped.files.as_user("root").read("/tmp/traps/secret") == b"secret"

    def test_no_other_user_reads_the_init(self, trapped: Sandbox) -> None:
        """Not even guest root, through the operations that the init carries out."""
        with pytest.raises(Denied):
            trapped.files.as_user("root").read("/proc/1/environ")
        with pytest.raises(BarchanError):
            trapped.files.as_user("65535").read("/etc/passwd")

    @pytest.mark.parametrize("user", ["agent", "root"])
    def test_who_asks_can_not_touch_the_operation(self, lab: Lab, user: str) -> None:
        """A program of the same user can't end, stop or slow down an operation, so that none can be made to fail."""
        with lab.create() as sandbox, sandbox.files.as_user(user).watch("/tmp") as watch:
            assert sandbox.exec(["python3", "-c", ATTACK], user=user).text == "['Operation not permitted']\n"
            sandbox.files.write("/tmp/new", b"")
            assert "new" in next(iter(watch)).path
            with pytest.raises(BarchanError):
                sandbox.files.as_user("65533").read("/etc/passwd")

    def test_without_an_id_of_its_own_it_can_be_touched(self, lab: Lab) -> None:
        """With the init's own id, the operations lose theirs, and the same program ends one."""
        with lab.create("init-as-guest-root") as sandbox, sandbox.files.as_user("agent").watch("/tmp"):
            assert "done" in sandbox.exec(["python3", "-c", ATTACK], user="agent").text

    @pytest.mark.parametrize("operation", ["write", "remove", "move", "mkdir"])
    def test_changes_need_the_users_rights(self, trapped: Sandbox, operation: str) -> None:
        """Through a link of the agent's into /etc nothing is written, made, moved or removed."""
        files = trapped.files
        with pytest.raises(Denied):
            match operation:
                case "write":
                    files.write("/tmp/traps/etc/passwd", b"agent::0:0::/:/bin/sh\n")
                case "remove":
                    files.remove("/tmp/traps/etc/passwd")
                case "move":
                    files.move("/tmp/traps/etc/passwd", "/tmp/traps/taken")
                case _:
                    files.mkdir("/tmp/traps/etc/made")

    @pytest.mark.parametrize("name", ["fifo", "socket", "/dev/zero", "/dev/tty"])
    def test_reads_never_wait(self, trapped: Sandbox, name: str) -> None:
        """What is no regular file is refused at once, or can't be opened at all."""
        with pytest.raises(BarchanError) as caught:
            trapped.files.read(os.path.join("/tmp/traps", name), timeout_s=5)
        assert isinstance(caught.value, InvalidSpec | Denied) or caught.value.fault == "caller"

    def test_loops_of_links_are_refused(self, trapped: Sandbox) -> None:
        """A link to itself is an error of the caller's."""
        with pytest.raises(BarchanError) as caught:
            trapped.files.read("/tmp/traps/loop", timeout_s=5)
        assert caught.value.fault == "caller"


class TestDownload:
    """What a guest sends is not trusted: nothing is written outside the target."""

    @pytest.mark.parametrize("target", ["/etc", "../../../../../../etc", "a/../../outside"])
    def test_links_that_lead_out_are_refused(self, lab: Lab, tmp_path: Path, target: str) -> None:
        """Absolute ones, and those that climb."""
        with lab.create() as sandbox:
            assert sandbox.exec(f"mkdir -p /tmp/tree/a && ln -s {target} /tmp/tree/link && echo x > /tmp/tree/a/x").ok
            with pytest.raises(RemoteProtocolError):
                sandbox.files.download("/tmp/tree", tmp_path / "target")
            assert not (tmp_path / "outside").exists()

    def test_set_id_bits_and_special_files_stay_behind(self, lab: Lab, tmp_path: Path) -> None:
        """A set-id program arrives as an ordinary one; a FIFO is refused or left out."""
        with lab.create() as sandbox:
            assert sandbox.exec("mkdir /tmp/tree; cp /bin/true /tmp/tree/x; chmod 6777 /tmp/tree/x", user="root").ok
            sandbox.files.as_user("root").download("/tmp/tree", tmp_path / "target")
            assert stat.S_IMODE((tmp_path / "target/x").stat().st_mode) == 0o755
            assert (tmp_path / "target/x").stat().st_uid == os.getuid()
            assert sandbox.exec("mkfifo /tmp/tree/fifo", user="root").ok
            try:
                sandbox.files.as_user("root").download("/tmp/tree", tmp_path / "again")
            except RemoteProtocolError:
                return
            assert not (tmp_path / "again/fifo").exists()

    def test_a_tree_without_end_is_cut_off(self, lab: Lab, tmp_path: Path) -> None:
        """A sparse file of a TiB costs the client no more than it has agreed to."""
        with lab.create() as sandbox:
            assert sandbox.exec("mkdir /tmp/tree; truncate -s 1T /tmp/tree/huge").ok
            with pytest.raises(BarchanError):
                sandbox.files.download("/tmp/tree", tmp_path / "target", max_bytes=8 * MIB)
            assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file()) <= 16 * MIB


def node_bytes(node: NodeProcess) -> int:
    """Resident memory of the node's process."""
    assert node.process is not None
    lines = Path(f"/proc/{node.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


class TestOutput:
    """Output without end is bounded wherever it lies."""

    def test_an_execs_output_is_cut(self, lab: Lab) -> None:
        """Head and tail of what was asked for, and the node's memory does not grow with the rest."""
        with lab.create() as sandbox:
            sandbox.exec(["true"])
            before = node_bytes(lab.node())
            result = sandbox.exec(["yes"], timeout_s=3, max_output_bytes=10_000)
            assert result.timed_out and result.truncated
            assert len(result.stdout) <= 10_000
            assert result.stdout_bytes > 100 * MIB
            assert node_bytes(lab.node()) - before < 64 * MIB

    def test_output_that_nobody_reads_stays_in_its_spool(self, lab: Lab) -> None:
        """The newest bytes are kept, and the sandbox's memory and disk are not charged with more."""
        with lab.create(memory_mib=64, disk_mib=32) as sandbox:
            before = node_bytes(lab.node())
            process = sandbox.start(["yes"], timeout_s=3, spool_bytes=1 * MIB)
            assert process.wait(20).timed_out
            kept = sum(len(data) for _, _, data in process.output(follow=False))
            assert 0 < kept <= 2 * MIB
            assert sandbox.stats().oom_kills == 0
            assert node_bytes(lab.node()) - before < 32 * MIB
