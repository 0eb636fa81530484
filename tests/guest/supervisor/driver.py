"""Runs the real `barchan-supervisor` and speaks its protocol over the packet socket, one blocking call at a time."""

import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.guest.init.driver import Connection, Output

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "guest" / "build"
INIT = BUILD / "barchan-init"
# The guest suite also runs on sanitized builds: the supervisor to test lies beside the init that BARCHAN_INIT names.
_BESIDE = Path(os.environ.get("BARCHAN_INIT", INIT)).with_name("barchan-supervisor")
SUPERVISOR = _BESIDE if _BESIDE.exists() else BUILD / "barchan-supervisor"
CGROUPS = Path("/sys/fs/cgroup")
UID_FIRST, UIDS_PER_SLOT, INIT_UID = 1048576, 65536, 65535
TIMEOUT_S = 30.0
GUEST_ROOT = "0:0"
SPEC: dict[str, str | int] = {
    "layers": "base",
    "upper_bytes": 64 << 20,
    "memory_bytes": 256 << 20,
    "pids": 64,
    "cpu_us": 200_000,
    "shm_bytes": 1 << 20,
    "hostname": "box",
    "network": "none",
}


class RefusedError(Exception):
    """The supervisor answered `error`."""

    def __init__(self, stage: str, errno: int, message: str) -> None:
        super().__init__(f"{stage}: {message}")
        self.stage = stage
        self.errno = errno


@dataclass
class Reply:
    word: str
    pairs: list[tuple[str, str]]
    fds: list[int] = field(default_factory=list)

    def __getitem__(self, key: str) -> str:
        return dict(self.pairs)[key]

    def all(self, key: str) -> list[str]:
        return [value for name, value in self.pairs if name == key]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []


class InitConnection(Connection):
    """A connection that the supervisor made and greeted on."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self.ack = True
        self.tag = 0
        self.outputs = {}
        self.replies = {}
        self.frames = 0
        self._buffer = bytearray()
        kind, _ = self.wait_reply(0xFFFFFFFF)
        assert kind == 0x81


class Sandbox:
    """One running sandbox as its creator sees it."""

    def __init__(self, sandbox_id: str, reply: Reply) -> None:
        self.id = sandbox_id
        self.pid = int(reply["pid"])
        self.start_time = int(reply["start_time"])
        self.uid_base = int(reply["uid_base"])
        init_fd, self.pidfd, *self.extra = reply.fds
        self.connection = InitConnection(init_fd)

    def close(self) -> None:
        self.connection.close()
        for fd in (self.pidfd, *self.extra):
            os.close(fd)
        self.extra = []

    def sh(self, script: str, user: str = GUEST_ROOT) -> Output:
        return self.connection.sh(script, user=user, env={"PATH": "/bin"})

    def text(self, script: str, user: str = GUEST_ROOT) -> str:
        """What a script prints; it must succeed."""
        output = self.sh(script, user)
        assert (output.code, output.err) == (0, b"")
        return output.out.decode().strip()

    def probe(self, *arguments: int | str) -> int:
        return int(self.text("probe " + " ".join(map(str, arguments))))


class Client:
    """One node connection."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(os.fspath(path))
        self.tag = 0
        self.events: list[Reply] = []
        self.replies: dict[str, Reply] = {}
        self.sandboxes: list[Sandbox] = []

    def close(self) -> None:
        for sandbox in self.sandboxes:
            sandbox.close()
        for reply in self.replies.values():
            reply.close()
        self.socket.close()

    def send(self, op: str, **keys: str | int) -> str:
        self.tag += 1
        packet = "".join([f"{op}\0", *(f"{key}={value}\0" for key, value in {"tag": self.tag, **keys}.items())])
        self.socket.send(packet.encode())
        return str(self.tag)

    def receive(self) -> None:
        """Take one packet."""
        data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 8)
        if not data:
            raise ConnectionResetError("the supervisor closed the connection")
        word, *pairs = data.decode().split("\0")[:-1]
        reply = Reply(word, [(key, value) for key, _, value in (pair.partition("=") for pair in pairs)], list(fds))
        if word in ("exit", "slot"):
            self.events.append(reply)
        else:
            self.replies[reply["tag"]] = reply

    def wait(self, tag: str) -> Reply:
        while tag not in self.replies:
            self.receive()
        reply = self.replies.pop(tag)
        if reply.word == "error":
            raise RefusedError(reply["stage"], int(reply["errno"]), reply["message"])
        return reply

    def request(self, op: str, **keys: str | int) -> Reply:
        return self.wait(self.send(op, **keys))

    def hello(self) -> Reply:
        return self.request("hello", version=1)

    def send_create(self, sandbox_id: str, **changes: str | int) -> str:
        return self.send("create", id=sandbox_id, **{**SPEC, **changes})

    def take(self, sandbox_id: str, tag: str) -> Sandbox:
        self.sandboxes.append(Sandbox(sandbox_id, self.wait(tag)))
        return self.sandboxes[-1]

    def create(self, sandbox_id: str = "one", **changes: str | int) -> Sandbox:
        return self.take(sandbox_id, self.send_create(sandbox_id, **changes))

    def attach(self, sandbox_id: str, op: str = "attach") -> Sandbox:
        return self.take(sandbox_id, self.send(op, id=sandbox_id))

    def destroy(self, sandbox_id: str) -> Mapping[str, int]:
        return {key: int(value) for key, value in self.request("destroy", id=sandbox_id).pairs if key != "tag"}

    def listed(self) -> list[str]:
        """Ids, of every page."""
        found: list[str] = []
        keys: dict[str, str] = {}
        while True:
            reply = self.request("list", **keys)
            found += [value.split(":")[0] for value in reply.all("sandbox")]
            if not reply.all("next"):
                return found
            keys = {"from": reply["next"]}

    def event(self) -> Reply:
        while not self.events:
            self.receive()
        return self.events.pop(0)


class Supervisor:
    """One supervisor with its own directory; `name` is its cgroup's."""

    def __init__(self, directory: Path, layer: Path) -> None:
        self.directory = directory
        self.layer = layer
        self.name = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.path = directory / "socket"
        self.clients: list[Client] = []
        self.pid = 0

    def start(self, *switches: str, init: Path = INIT, grace_s: int = 60) -> str:
        """Run it; returns the line it says, and the exit code of what stayed in the foreground must agree."""
        done = subprocess.run(
            [
                SUPERVISOR,
                *("--socket", self.path, "--pool", self.directory / "pool", "--pool-mib", "2048"),
                *("--cgroup", self.name, "--init", init, "--log", self.directory / "log"),
                *("--orphan-grace-s", str(grace_s)),
                *switches,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        )
        assert done.stdout.count("\n") == 1
        assert done.returncode == (0 if done.stdout == "ready\n" else 1)
        return done.stdout.strip()

    def connect(self) -> Client:
        """A connection on which hello was said and the layer `base` is known."""
        client = Client(self.path)
        self.clients.append(client)
        self.pid = int(client.hello()["pid"])
        client.request("layer", digest="base", type="dir", path=os.fspath(self.layer)).close()
        return client

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_gone(self, timeout_s: float = TIMEOUT_S) -> float:
        """Until the process has ended; how long that took."""
        began = time.monotonic()
        pidfd = os.pidfd_open(self.pid)
        try:
            assert select.select([pidfd], [], [], timeout_s)[0], "the supervisor still runs"
        finally:
            os.close(pidfd)
        return time.monotonic() - began

    def end(self) -> list[str]:
        """End it if it runs; what is left on the host then."""
        if self.pid and self.pid in self.processes():
            self.kill(signal.SIGTERM)
            self.wait_gone()
        for client in self.clients:
            client.close()
        return self.settle()

    def processes(self) -> list[int]:
        """The supervisor and its launch children: they name its directory in their arguments."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{self.directory}/" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
        return found

    def cgroups(self) -> list[Path]:
        """Its directory in each hierarchy. A guest's process would keep one from being removed."""
        roots = (CGROUPS, *(path for path in CGROUPS.iterdir() if path.is_dir()))
        tops = [root / top for root in roots for top in ("barchan", "barchan-batch")]
        return [path for top in tops if (path := top / self.name).exists()]

    def cgroup_leaves(self) -> set[str]:
        """Directories of sandboxes, in any hierarchy."""
        return {path.name for base in self.cgroups() for path in base.iterdir() if path.is_dir()} - {"init"}

    def loop_devices(self) -> list[str]:
        found = []
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                target = backing.read_text()
            except OSError:  # detached meanwhile
                continue
            if target.startswith(f"{self.directory}/"):
                found.append(backing.parts[3])
        return found

    def remains(self) -> list[str]:
        """Everything of it on the host, but for its log. Its mounts are in no other namespace and end with it."""
        files = [path for path in self.directory.iterdir() if path.name != "log"]
        log = (self.directory / "log").read_text() if (self.directory / "log").exists() else ""
        return [
            *(f"log: {line}" for line in log.splitlines() if "Sanitizer" in line),
            *(f"process {pid}" for pid in self.processes()),
            *(f"cgroup {path}" for path in self.cgroups()),
            *(f"loop device {name}" for name in self.loop_devices()),
            *(f"file {path}" for path in files),
            *(
                f"mount {line}"
                for line in Path("/proc/self/mountinfo").read_text().splitlines()
                if str(self.directory) in line
            ),
        ]

    def settle(self, timeout_s: float = 10) -> list[str]:
        """Wait until nothing remains; what still does after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (found := self.remains()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


PROGRAMS = (
    "bash",
    "cat",
    "ls",
    "id",
    "dd",
    "rm",
    "mkdir",
    "touch",
    "stat",
    "sleep",
    "grep",
    "hostname",
    "mknod",
    "chown",
)


def make_layer(root: Path) -> None:
    """A small root file system: some of this machine's programs with their libraries, and the probe."""
    for name in ("bin", "proc", "dev", "sys", "tmp", "etc"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for program in PROGRAMS:
        source = shutil.which(program, path="/usr/bin:/bin:/usr/sbin:/sbin")
        assert source is not None
        shutil.copy(source, root / "bin" / program)
        listing = subprocess.run(["ldd", source], check=True, capture_output=True, text=True).stdout
        for library in (Path(word) for word in listing.split() if word.startswith("/")):
            target = root / library.relative_to("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    (root / "bin" / "sh").symlink_to("bash")
    probe = Path(__file__).with_name("probe.c")
    subprocess.run(["cc", "-O2", "-static", "-o", root / "bin" / "probe", probe], check=True)


def pids_in(leaf: Path) -> set[int]:
    return {int(pid) for path in leaf.glob("**/cgroup.procs") for pid in path.read_text().split()}


def wait_members(leaf: Path) -> int:
    """How many processes a cgroup and those below it have; a program moves there soon after its start is told."""
    deadline = time.monotonic() + 10
    while not (pids := pids_in(leaf)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(pids)
