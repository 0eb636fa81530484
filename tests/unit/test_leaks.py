"""The leak checker sees each kind of remains; a checker that sees nothing would pass every suite."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.leaks import CGROUPS, Watch

pytestmark = pytest.mark.requires("root")

WAIT = "import sys; print('up', flush=True); sys.stdin.read()"


def start(*argv: str) -> subprocess.Popen[bytes]:
    """A process that carries `argv`, runs by the time of the return, and lives until its stdin is closed."""
    return running([sys.executable, "-c", WAIT, *argv])


def running(command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.communicate()


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def test_the_supervisor_is_found(watch: Watch) -> None:
    """It is found by its arguments while it runs, and refused if it uses other cgroups than the watch looks for."""
    assert watch.supervisor_pid() is None
    socket = f"{watch.state_dir}/supervisor.sock"
    supervisor = start("--socket", socket, "--cgroup", watch.cgroup)
    assert watch.supervisor_pid() == supervisor.pid
    end(supervisor)
    stranger = start("--socket", socket, "--cgroup", "another")
    with pytest.raises(AssertionError):
        watch.supervisor_pid()
    end(stranger)


def test_nothing_left_is_an_empty_list(watch: Watch) -> None:
    """Where no node ever ran, nothing is reported."""
    assert watch.settle(files=frozenset()) == []


def test_a_process_is_seen(watch: Watch) -> None:
    """A live process that works on the state directory is named by pid, and only while it lives."""
    process = start("--state-dir", str(watch.state_dir))
    try:
        (line,) = watch.remains()
        assert line.startswith(f"process {process.pid}: ")
    finally:
        end(process)
    assert watch.remains() == []


def test_a_cgroup_is_seen(watch: Watch) -> None:
    """An empty cgroup under barchan/NAME is reported in whichever hierarchy it is."""
    root = next(path for path in (CGROUPS / "pids", CGROUPS / "unified", CGROUPS) if (path / "cgroup.procs").exists())
    leaf = root / "barchan" / watch.cgroup
    made = [path for path in (leaf.parent, leaf) if not path.exists()]
    leaf.mkdir(parents=True)
    try:
        assert watch.remains() == [f"cgroup: {leaf}"]
    finally:
        for path in reversed(made):
            path.rmdir()


def test_a_mount_in_another_namespace_is_seen(watch: Watch) -> None:
    """A mount below the state directory counts although this process's own mount namespace lacks it."""
    target = watch.state_dir / "layers"
    target.mkdir()
    shell = f"mount -t tmpfs none {target} && echo up && read -r line"
    process = running(["unshare", "-m", "--propagation", "private", "sh", "-c", shell])
    try:
        mounts = [line for line in watch.remains() if line.startswith("mount: ")]
        assert len(mounts) == 1
        assert str(target) in mounts[0]
    finally:
        end(process)


def test_a_loop_device_is_seen(watch: Watch) -> None:
    """A loop device whose file lies in the state directory is reported, also after the file was unlinked."""
    pool = watch.state_dir / "pool.img"
    pool.write_bytes(bytes(1 << 20))
    device = subprocess.run(
        ["losetup", "-f", "--show", str(pool)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    try:
        pool.unlink()
        (line,) = watch.remains()
        assert line.startswith(f"loop device: {Path(device).name} of {pool}")
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


def test_a_file_is_seen(watch: Watch) -> None:
    """A file that is not among the known ones is reported; a known one is not."""
    (watch.state_dir / "journal.db").touch()
    (watch.state_dir / "forgotten").touch()
    assert watch.remains(files=frozenset({"journal.db"})) == [f"file: {watch.state_dir}/forgotten"]
