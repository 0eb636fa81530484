"""A container backend of a test's own, without a node, and programs in its sandboxes that are spoken to."""

import ast
import asyncio
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from barchan.backends.base import Backend
from barchan.backends.container.backend import ContainerBackend, ContainerHandle
from barchan.backends.container.lazy import ReaderSettings
from barchan.backends.guest import GuestProcess, Reader
from barchan.errors import InvalidSpec
from barchan.image.store import ImageStore
from barchan.model.sandbox import SandboxSpec
from barchan.model.snapshot import MemoryRecord
from barchan.wire import guest as wire
from tests.leaks import Watch, parent_of

WAIT_S = 20.0
# What a backend without a node leaves in its directory.
FILES = frozenset({"images", "supervisor.log", "cache", "reader.log"})
# Prints the value of each line, an expression, that it reads.
PROGRAM = """
import ctypes, os, queue, socket, sys, tempfile, threading, time
libc, counter = ctypes.CDLL(None, use_errno=True), 0
client, peer = socket.socketpair()
todo, unlinked = queue.Queue(), tempfile.TemporaryFile(dir="/tmp")
unlinked.write(b"unlinked")
unlinked.flush()
def echo():
    while True:
        peer.sendall(todo.get())
threading.Thread(target=echo, daemon=True).start()
server = socket.create_server(("127.0.0.1", 7000))
caller = socket.create_connection(("127.0.0.1", 7000))
served, _ = server.accept()
served.sendall(b"early")
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 7001))
def called():
    caller.sendall(b"over tcp")
    return served.recv(8), caller.recv(5)
def connected():
    todo.put(b"through")
    return client.recv(7)
def dialled():
    with socket.create_connection(("127.0.0.1", 7000)) as one:
        two, _ = server.accept()
        two.sendall(b"new")
        two.close()
        return one.recv(3)
def asked():
    udp.sendto(b"datagram", ("127.0.0.1", 7001))
    return udp.recv(8)
def read_unlinked():
    unlinked.seek(0)
    return unlinked.read()
def denied():
    return libc.unshare(0x10000000), ctypes.get_errno()
def count():
    global counter
    counter += 1
    return counter
def status(*names):
    rows = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [rows[name].strip() for name in names]
def fork_all():
    children = []
    try:
        while True:
            children.append(os.fork())
            if children[-1] == 0:
                time.sleep(60)
                os._exit(0)
    except BlockingIOError:
        return len(children)
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
def wiped(size=8192):
    import mmap
    area = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(18)
    area[:4] = b"seed"
    return area
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(repr(repr(error)), flush=True)
"""


class Taken(Reader):
    """Output as it comes."""

    def __init__(self, *, offset: int = 0) -> None:
        super().__init__(offset, 0)
        self.text = b""
        self.news = asyncio.Event()
        self.ended = asyncio.Event()

    def output(self, stream: int, offset: int, data: bytes) -> None:
        self.text += data
        self.consumed[stream] = offset + len(data)
        self.news.set()

    def finished(self) -> None:
        self.ended.set()
        self.news.set()

    async def line(self) -> str:
        """The next whole line."""
        return (await self.until(b"\n")).decode()

    async def until(self, mark: bytes) -> bytes:
        """What there is up to `mark`, which goes with it."""
        async with asyncio.timeout(WAIT_S):
            while mark not in self.text:
                self.news.clear()
                await self.news.wait()
        found, _, self.text = self.text.partition(mark)
        return found + mark


class Talker:
    """`PROGRAM`, or a shell, in a sandbox, known by its process id: in each sandbox that is restored, too."""

    def __init__(self, process: GuestProcess, reader: Taken, sent: int) -> None:
        self.process, self.reader, self.sent = process, reader, sent

    @property
    def mark(self) -> tuple[int, int]:
        """Bytes that went in and came out."""
        return self.sent, self.reader.next_offset[wire.STDOUT]

    async def say(self, connection: Any, text: str) -> None:
        data = text.encode()
        frame = await connection.request(lambda tag: wire.stdin(tag, self.process.handle, self.sent, data, eof=False))
        assert frame.kind != wire.ERROR
        self.sent += len(data)

    async def ask(self, connection: Any, expression: str) -> Any:
        await self.say(connection, expression + "\n")
        return ast.literal_eval(await self.reader.line())


class LabHost:
    """What a node would be to its only backend."""

    def __init__(self, state_dir: Path, images: ImageStore) -> None:
        self.state_dir = state_dir
        self.images = images
        self.weaken: tuple[str, ...] = ()
        self.reader = ReaderSettings()

    async def backend(self, name: str) -> Backend:
        raise InvalidSpec(f"no backend {name!r} beside this one")


class Lab:
    """One backend. What is made in it is removed at the end, and nothing may remain."""

    def __init__(self, state_dir: Path, images: Path) -> None:
        self.state_dir = state_dir
        self.watch = Watch(state_dir)
        self.images = ImageStore(images)
        self.template = self.images.resolve("debian")
        self.backend = ContainerBackend(LabHost(self.state_dir, self.images))
        self.handles: list[ContainerHandle] = []

    async def open(self) -> None:
        await self.backend.start()
        self.backend.adopted()

    async def close(self) -> list[str]:
        """Destroy all; what is left on the host then."""
        for handle in self.handles:
            await handle.destroy()
        leaves = [path.name for path in self.cgroups()]
        supervisor = self.watch.supervisor_pid()
        await self.backend.shutdown()
        if supervisor is not None:
            await asyncio.to_thread(_wait_gone, supervisor)
        for path in self.state_dir.glob("memory-*"):
            shutil.rmtree(path)
        return leaves + await asyncio.to_thread(self.watch.settle, files=FILES)

    async def reached(self, group: str, mark: bytes) -> int:
        """The pid of CRIU as soon as it runs in that group, with that word; not of one of its children, which has it,
        too.
        """
        path = _unified() / "barchan" / self.watch.cgroup / group / "cgroup.procs"
        async with asyncio.timeout(WAIT_S):
            while True:
                await asyncio.sleep(0)
                pids: list[str] = []
                with suppress(OSError):  # not there yet, or no more
                    pids = path.read_text().split()
                for pid in pids:
                    with suppress(FileNotFoundError, ProcessLookupError):
                        called = Path(f"/proc/{pid}/cmdline").read_bytes()
                        if mark in called and str(parent_of(int(pid))) not in pids:
                            return int(pid)

    async def kill_criu(self, group: str, mark: bytes) -> None:
        os.kill(await self.reached(group, mark), signal.SIGKILL)

    async def restart(self) -> None:
        """As after the death of a node: the supervisor and the sandboxes are there, nothing else of the backend is."""
        await self.backend.close()
        self.handles.clear()
        self.backend = ContainerBackend(LabHost(self.state_dir, self.images))
        await self.open()

    async def adopt(self, name: str) -> ContainerHandle:
        self.handles.append(await self.backend.adopt(name, self.spec(), self.template))
        return self.handles[-1]

    def cgroups(self) -> list[Path]:
        """Of sandboxes and of CRIU, in every hierarchy."""
        roots = Path("/sys/fs/cgroup").glob(f"*/barchan/{self.watch.cgroup}/*")
        return [path for path in roots if path.is_dir() and path.name != "init"]

    def spec(self, **changes: Any) -> SandboxSpec:
        return SandboxSpec(**{"template": "debian", "hostname": "box", "memory_mib": 512, **changes})

    async def create(self, name: str = "sb_one", **changes: Any) -> ContainerHandle:
        self.handles.append(await self.backend.create(name, self.spec(**changes), self.template))
        return self.handles[-1]

    async def dump(self, handle: ContainerHandle, name: str, *, keep: bool = False) -> tuple[Path, MemoryRecord]:
        """Memory and, as the cut `name`, the files of a sandbox."""
        await handle.freeze()
        await handle.cut(name)
        target = self.state_dir / f"memory-{name}"
        record = await handle.dump(target, keep=keep)
        if not keep:
            self.handles.remove(handle)
            await handle.destroy()
        return target, record

    async def restore(
        self, name: str, memory: tuple[Path, MemoryRecord], *, cut: str | None, **changes: Any
    ) -> ContainerHandle:
        handle = await self.backend.restore(name, self.spec(**changes), self.template, memory[0], memory[1], cut=cut)
        self.handles.append(handle)
        await handle.thaw(0.0)
        return handle

    async def start(
        self,
        handle: ContainerHandle,
        process_id: str,
        argv: list[str],
        flags: wire.StartFlag = wire.StartFlag.STDIN,
        user: str = "1000",
    ) -> Talker:
        reader = Taken()
        start = wire.Start(
            process_id=process_id, argv=argv, user=user, cwd="/tmp", flags=flags | wire.StartFlag.FOLLOW,
            env={"PATH": "/usr/bin:/bin", "TERM": "dumb"},
        )  # fmt: skip
        return Talker(await handle.guest.start(start, reader), reader, 0)

    async def program(self, handle: ContainerHandle) -> Talker:
        return await self.start(handle, "program", ["/usr/bin/python3", "-c", PROGRAM])

    async def again(self, handle: ContainerHandle, process_id: str, mark: tuple[int, int]) -> Talker:
        """The same program in a restored sandbox, as it was at the mark."""
        sent, offset = mark
        process = await handle.guest.find(process_id)
        reader = Taken(offset=offset)
        await process.add_reader(reader)
        return Talker(process, reader, sent)

    async def run(self, handle: ContainerHandle, script: str, process_id: str) -> str:
        """What a shell prints."""
        talker = await self.start(handle, process_id, ["/bin/bash", "-c", script], wire.StartFlag(0))
        async with asyncio.timeout(WAIT_S):
            await talker.reader.ended.wait()
        return talker.reader.text.decode()


def _unified() -> Path:
    root = Path("/sys/fs/cgroup")
    return root / "unified" if (root / "unified").exists() else root


def _wait_gone(pid: int) -> None:
    while os.path.exists(f"/proc/{pid}") and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        os.sched_yield()
