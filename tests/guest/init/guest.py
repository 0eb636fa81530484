"""Runs the real `barchan-init` as process 1 of a pid namespace of its own.

The init gets what the supervisor gives it: a listening socket as descriptor 3, a spool directory as 4, a user id of its
own and a few ambient capabilities. The file system is the machine's, with private /proc and, if asked, private account
files.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.guest.init.driver import Connection

ROOT = Path(__file__).resolve().parents[3]
INIT = Path(os.environ.get("BARCHAN_INIT", ROOT / "guest" / "build" / "barchan-init"))
INIT_UID = 65535
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
_PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 38, 47, 2
_CAPS = (0, 5, 6, 7, 8)  # CHOWN KILL SETGID SETUID SETPCAP
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _mount(source: str, target: str, fstype: str | None, flags: int, data: str | None = None) -> None:
    _check(
        _libc.mount(
            source.encode(),
            target.encode(),
            fstype.encode() if fstype else None,
            flags,
            data.encode() if data else None,
        )
    )


def _become_init_user(caps: Sequence[int]) -> None:
    os.setgroups([])
    os.setresgid(INIT_UID, INIT_UID, INIT_UID)
    _check(_libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setresuid(INIT_UID, INIT_UID, INIT_UID)
    mask = sum(1 << cap for cap in caps)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    _check(_libc.capset(header, data))
    for cap in caps:
        _check(_libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, cap, 0, 0))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _exec_init(
    listen_fd: int, spool_fd: int, spool_max: int, binds: Mapping[str, Path], root_caps: Sequence[int]
) -> None:
    """In the namespaces' first process."""
    _mount("proc", "/proc", "proc", 0)
    for target, source in binds.items():
        _mount(str(source), target, None, _MS_BIND)
    high_listen, high_spool = os.dup(listen_fd), os.dup(spool_fd)
    os.dup2(high_listen, 3)
    os.dup2(high_spool, 4)
    os.chdir("/")
    _become_init_user(sorted({*_CAPS, *root_caps}))
    env = {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1"}
    args = ["barchan-init", "--listen-fd", "3", "--spool-fd", "4", "--spool-max-bytes", str(spool_max)]
    if root_caps:
        args += ["--root-capabilities", str(sum(1 << cap for cap in root_caps))]
    os.execve(INIT, args, env)


class Guest:
    """A running init. `pid` is its number outside."""

    def __init__(
        self,
        *,
        spool_max: int = 64 << 20,
        binds: Mapping[str, Path] | None = None,
        cgroup: Path | None = None,
        spool_disk_bytes: int | None = None,
        first_uid: int | None = None,
        nofile: int | None = None,
        root_caps: Sequence[int] = (),
    ) -> None:
        """`first_uid`: run in a user namespace whose ids start there. `root_caps`: what its root is to have."""
        self.directory = Path(tempfile.mkdtemp(prefix="barchan-init-"))
        self.directory.chmod(0o755)
        self.work = self.directory / "work"  # where guest programs may write
        self.work.mkdir()
        self.work.chmod(0o777)
        private = self.directory / "private"
        private.mkdir(mode=0o700)
        self.spool = private / "spool"
        self.spool.mkdir()
        self.first_uid, self.nofile, self.root_caps = first_uid, nofile, root_caps
        os.chown(self.spool, INIT_UID + (first_uid or 0), INIT_UID + (first_uid or 0))
        self.path = str(private / "socket")
        self.log = private / "log"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.path)
        listener.listen(16)
        self.connections: list[Connection] = []
        self.closed = False
        read_end, write_end = os.pipe()
        self.watcher = os.fork()
        if self.watcher == 0:
            self._watch(listener.fileno(), spool_max, binds or {}, cgroup, spool_disk_bytes, write_end)
        os.close(write_end)
        listener.close()
        self.pid = int(os.read(read_end, 32) or b"0")
        os.close(read_end)
        assert self.pid > 0, self.log.read_text()

    def _watch(
        self,
        listen_fd: int,
        spool_max: int,
        binds: Mapping[str, Path],
        cgroup: Path | None,
        disk: int | None,
        tell: int,
    ) -> None:
        """The init's parent: enters the namespaces, forks it, ends with it."""
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT, 0o666)
            os.dup2(log, 2)
            spool_fd = os.open(self.spool, os.O_RDONLY | os.O_DIRECTORY)
            if cgroup is not None:
                (cgroup / "cgroup.procs").write_text("0")
            self._unshare()
            _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
            if disk is not None:
                _mount("tmpfs", str(self.spool), "tmpfs", 0, f"size={disk},mode=777")
                spool_fd = os.open(self.spool, os.O_RDONLY | os.O_DIRECTORY)
            if self.nofile is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (self.nofile, self.nofile))
            pid = os.fork()
            if pid == 0:
                try:
                    _exec_init(listen_fd, spool_fd, spool_max, binds, self.root_caps)
                except BaseException as error:
                    os.write(2, repr(error).encode())
                os._exit(3)
            os.write(tell, str(pid).encode())
            os.close(tell)
            _, status = os.waitpid(pid, 0)
            os._exit(0 if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else 1)
        except BaseException as error:
            os.write(2, repr(error).encode())
        os._exit(4)

    def _unshare(self) -> None:
        """A child that stays outside writes the id maps, when there are any."""
        if self.first_uid is None:
            _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID))
            return
        parent, (go_read, go_write) = os.getpid(), os.pipe()
        mapper = os.fork()
        if mapper == 0:
            os.read(go_read, 1)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{parent}/{name}").write_text(f"0 {self.first_uid} {INIT_UID + 1}")
            os._exit(0)
        _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID))
        os.write(go_write, b"x")
        os.waitpid(mapper, 0)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)

    def connect(self, *, ack: bool = True) -> Connection:
        connection = Connection(self.path, ack=ack)
        self.connections.append(connection)
        return connection

    def processes(self) -> list[int]:
        """What lives in the guest, beside the init: processes outside see it by their numbers here."""
        namespace = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") == namespace and int(name) != self.pid:
                    found.append(int(name))
        return found

    def descriptors(self) -> list[str]:
        """What the init holds open, by number."""
        return [os.readlink(f"/proc/{self.pid}/fd/{fd}") for fd in sorted(map(int, os.listdir(f"/proc/{self.pid}/fd")))]

    def expect_killed(self) -> None:
        """The watcher was killed by the test itself."""
        _, status = os.waitpid(self.watcher, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        self._clean_up()

    def close(self) -> None:
        """Kill the init; that it was still alive and complained of nothing is part of every test."""
        if self.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.watcher, 0)
        log = self.log.read_text(errors="replace")
        self._clean_up()
        assert status == 0, f"the init ended by itself: {status} {log}"
        assert log == "", log

    def _clean_up(self) -> None:
        self.closed = True
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.directory)


CGROUPS = Path("/sys/fs/cgroup")
V1 = ("memory", "pids", "cpu")


@dataclass
class Leaf:
    """A guest leaf in the v2 hierarchy and in three of version 1, owned by the init's user as in a sandbox."""

    name: str

    @property
    def base(self) -> Path:
        return CGROUPS / "unified" / self.name

    @property
    def guest(self) -> Path:
        return self.base / "guest"

    def v1(self, controller: str) -> Path:
        return CGROUPS / controller / self.name

    def create(self) -> None:
        self.guest.mkdir(parents=True)
        os.chown(self.base / "cgroup.procs", -1, INIT_UID)
        (self.base / "cgroup.procs").chmod(0o664)
        for path in (self.guest, self.guest / "cgroup.procs"):
            os.chown(path, INIT_UID, INIT_UID)
        for controller in V1:
            self.v1(controller).mkdir()

    @contextlib.contextmanager
    def descriptors(self) -> Iterator[tuple[list[int], int]]:
        procs = [os.open(self.v1(controller) / "cgroup.procs", os.O_WRONLY) for controller in V1]
        directory = os.open(self.guest, os.O_RDONLY | os.O_DIRECTORY)
        yield procs, directory
        for fd in (*procs, directory):
            os.close(fd)

    def remove(self) -> None:
        """Everything in it has ended; the kernel may need a moment to notice."""
        paths = [*self.guest.glob("*/"), self.guest, self.base, *map(self.v1, V1)]
        for path in paths:
            for _ in range(200):
                try:
                    path.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    time.sleep(0.01)
            else:
                raise AssertionError(f"{path} is still populated")
