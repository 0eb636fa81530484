"""A node without isolation for tests of the SDK: the routes of the table over a unix socket, programs run as they are.

It lives on a thread with its own event loop. `drop` makes it end connections, before or after it did what was asked;
`hold` makes it keep requests waiting; `calls` is what arrived.
"""

import asyncio
import fcntl
import os
import pty
import signal
import struct
import termios
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from barchan.errors import BarchanError, Conflict, Denied, InvalidSpec, NotFound
from barchan.model.node import Killed, LeaseInfo, LeaseRequest, NodeInfo
from barchan.model.sandbox import (
    ExecRequest,
    ExecResult,
    FileChange,
    FileInfo,
    OutputChunk,
    ProcessInfo,
    SandboxInfo,
    SandboxSpec,
    StartRequest,
)
from barchan.wire.api import (
    MSGPACK,
    ROUTES,
    Awake,
    Empty,
    ResizeRequest,
    Signalled,
    SignalRequest,
    StdinWritten,
    error_body,
    http_status,
)

Handler = Callable[[web.Request], Awaitable[Any]]


class FakeProcess:
    """A real program on the host, its output kept from offset 0."""

    def __init__(self, request: StartRequest | ExecRequest) -> None:
        self.request = request
        self.buffers = {"stdout": bytearray(), "stderr": bytearray()}
        self.changed = asyncio.Condition()
        self.stdin_offset = 0
        self.ended = False
        self.readers: list[asyncio.Task[None]] = []
        self.watcher: asyncio.Task[None] | None = None
        self.master: int | None = None
        self.child: asyncio.subprocess.Process

    async def start(self, workdir: Path) -> None:
        request = self.request
        argv = request.argv if request.argv is not None else ("/bin/sh", "-c", request.shell or "")
        wants_pty = isinstance(request, StartRequest) and request.pty
        keeps_stdin = isinstance(request, StartRequest) and request.stdin_open
        pipe: int = asyncio.subprocess.PIPE
        if wants_pty:
            self.master, pipe = pty.openpty()
            self.resize(request.rows, request.cols)  # type: ignore[union-attr]
        self.child = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=workdir, env={**os.environ, **request.env},
            start_new_session=True, preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if wants_pty else None,
        )  # fmt: skip
        if self.master is not None:
            os.close(pipe)
            self.readers = [asyncio.create_task(self._read_pty(self.master))]
        else:
            assert self.child.stdin and self.child.stdout and self.child.stderr
            self.readers = [
                asyncio.create_task(self._read("stdout", self.child.stdout)),
                asyncio.create_task(self._read("stderr", self.child.stderr)),
            ]
            if not keeps_stdin:
                self.child.stdin.write(request.stdin)
                self.child.stdin.close()
        self.watcher = asyncio.create_task(self._watch())

    async def _read(self, stream: str, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            await self.grow(stream, data)

    async def _read_pty(self, master: int) -> None:
        while True:
            try:
                data = await asyncio.to_thread(os.read, master, 65536)
            except OSError:
                return
            await self.grow("stdout", data)

    async def grow(self, stream: str, data: bytes) -> None:
        async with self.changed:
            self.buffers[stream] += data
            self.changed.notify_all()

    async def _watch(self) -> None:
        while self.child.returncode is None:  # wait() would wait for the pipes, which a grandchild may hold
            await asyncio.sleep(0.01)
        await asyncio.wait(self.readers, timeout=0.3)
        async with self.changed:
            self.ended = True
            self.changed.notify_all()

    def resize(self, rows: int, cols: int) -> None:
        assert self.master is not None
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def pids(self) -> list[int]:
        """Every process of its session, the main one first."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(fields[3]) == self.child.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return sorted(found, key=lambda pid: pid != self.child.pid)

    def are_gone(self) -> bool:
        """Whether nothing of it runs; what was killed has a moment to die."""
        deadline = time.monotonic() + 2
        while (running := self.pids()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return not running

    def signal(self, number: int, scope: str) -> int:
        pids = self.pids()
        chosen = {"process": pids[:1], "children": pids[1:] if pids[:1] == [self.child.pid] else pids}.get(scope, pids)
        for pid in chosen:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        return len(chosen)

    def info(self) -> ProcessInfo:
        code = self.child.returncode
        exit_code = (128 - code if code < 0 else code) if self.ended and code is not None else None
        return ProcessInfo(
            process_id=self.request.process_id or "", pid=self.child.pid, running=not self.ended, exit_code=exit_code,
            signal=-code if self.ended and code is not None and code < 0 else None,
        )  # fmt: skip


class FakeNode:
    """`start()` and `stop()` block; a stopped one may be started again and knows its state."""

    def __init__(self, folder: Path, token: str | None = None) -> None:
        self.folder = folder
        self.socket = folder / "node.sock"
        self.url = f"unix://{self.socket}"
        self.token = token
        self.calls: Counter[str] = Counter()
        self.drop_before: Counter[str] = Counter()
        self.drop_after: Counter[str] = Counter()
        self.hold: dict[str, threading.Event] = {}
        self.start_s_max: dict[str, float] = {}
        self.errors: dict[str, BarchanError] = {}
        self.sandboxes: dict[str, SandboxInfo] = {}
        self.killed: list[str] = []
        self.leases: dict[str, int] = {}
        self.leases_ended: list[str] = []
        self.lease_writers: set[web.StreamResponse] = set()
        self.processes: dict[tuple[str, str], FakeProcess] = {}
        self.output_cut_bytes: int | None = None
        self.files: dict[str, bytes] = {}
        self.entries: dict[str, FileInfo] = {}
        self.watches: list[list[str]] = []
        self._thread: threading.Thread | None = None
        self._up = threading.Event()
        self._starting: asyncio.Lock
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def start(self) -> None:
        self._up.clear()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake-node")
        self._thread.start()
        assert self._up.wait(10)

    def stop(self) -> None:
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._starting = asyncio.Lock()
        app = web.Application(client_max_size=100 << 20)
        for route in ROUTES:
            if handler := getattr(self, f"on_{route.name}", None):
                app.router.add_route(route.method, route.path, self._wrapped(route.name, handler))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self.socket.unlink(missing_ok=True)
        await web.UnixSite(runner, str(self.socket)).start()
        self._up.set()
        await self._stop.wait()
        self.socket.unlink(missing_ok=True)
        for process in self.processes.values():
            process.signal(signal.SIGKILL, "all")
            if process.watcher is not None:
                await process.watcher
        await runner.cleanup()

    def _wrapped(self, name: str, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def wrapped(request: web.Request) -> web.StreamResponse:
            self.calls[name] += 1
            assert request.transport is not None
            if self.drop_before[name]:
                self.drop_before[name] -= 1
                request.transport.abort()
                return web.Response()
            try:
                if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
                    raise Denied("wrong token")
                while name in self.hold and not self.hold[name].is_set():
                    await asyncio.sleep(0.005)
                if name in self.errors:
                    raise self.errors[name]
                reply = await handler(request)
            except BarchanError as error:
                body = msgspec.msgpack.encode(error_body(error))
                return web.Response(status=http_status(error), body=body, content_type=MSGPACK)
            if self.drop_after[name]:
                self.drop_after[name] -= 1
                request.transport.abort()
            if isinstance(reply, web.StreamResponse):
                return reply
            if isinstance(reply, bytes):
                return web.Response(body=reply)
            return web.Response(body=msgspec.msgpack.encode(reply), content_type=MSGPACK)

        return wrapped

    def drop_leases(self) -> None:
        """End the connections that hold leases, as a restart of the node does."""

        def drop() -> None:
            for response in self.lease_writers:
                transport = response._req.transport if response._req is not None else None
                if transport is not None:
                    transport.abort()

        self._loop.call_soon_threadsafe(drop)

    async def on_node_info(self, request: web.Request) -> NodeInfo:
        return NodeInfo(
            node_id="fake", version="0", pid=os.getpid(), uptime_s=1, sandboxes_running=len(self.sandboxes),
            sandboxes_starting=0, sandboxes_queued=0, running_max=10, starting_max=10, leases=len(self.leases),
            creates_total=0, create_failures_total=0, memory_available_mib=1, backends=("container",),
            start_s_max=self.start_s_max,
        )  # fmt: skip

    async def on_lease_hold(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.msgpack.decode(await request.read(), type=LeaseRequest)
        lease_id = asked.lease_id or f"lease_{len(self.leases)}"
        self.leases[lease_id] = self.leases.get(lease_id, 0) + 1
        response = web.StreamResponse()
        await response.prepare(request)
        self.lease_writers.add(response)
        try:
            while lease_id not in self.leases_ended and not self._stop.is_set():
                await response.write(record(LeaseInfo(lease_id=lease_id, grace_s=asked.grace_s)))
                await asyncio.sleep(0.05)
        except ConnectionError:
            pass
        finally:
            self.lease_writers.discard(response)
        return response

    async def on_awake(self, request: web.Request) -> web.StreamResponse:
        self._sandbox(request)
        response = web.StreamResponse()
        await response.prepare(request)
        while not self._stop.is_set():
            await response.write(record(Awake(is_awake=True, slept_s=0.0)))
            await asyncio.sleep(0.05)
        return response

    async def on_lease_end(self, request: web.Request) -> Killed:
        self.leases_ended.append(request.match_info["lease_id"])
        mine = [key for key, info in self.sandboxes.items() if info.spec.lease_id == request.match_info["lease_id"]]
        return self._kill(mine)

    async def on_create(self, request: web.Request) -> SandboxInfo:
        spec = msgspec.msgpack.decode(await request.read(), type=SandboxSpec)
        for info in self.sandboxes.values():
            if info.spec.create_id == spec.create_id:
                return info
        info = SandboxInfo(
            sandbox_id=f"sb_{len(self.sandboxes) + len(self.killed)}", node_id="fake", phase="ready",
            template=spec.template, template_digest="0", spec=spec, created_unix_s=0, age_s=0, idle_s=0, create_ms=1,
            processes_running=0,
        )  # fmt: skip
        self.sandboxes[info.sandbox_id] = info
        return info

    def _kill(self, keys: list[str]) -> Killed:
        for key in keys:
            self.killed.append(key)
            del self.sandboxes[key]
        return Killed(killed=len(keys))

    def _matching(self, request: web.Request) -> list[str]:
        wanted = dict(label.split("=", 1) for label in request.query.getall("label", []))
        create_id = request.query.get("create_id")
        return [
            key
            for key, info in self.sandboxes.items()
            if wanted.items() <= info.spec.labels.items() and create_id in (None, info.spec.create_id)
        ]

    async def on_list(self, request: web.Request) -> list[SandboxInfo]:
        return [self.sandboxes[key] for key in self._matching(request)]

    async def on_kill_many(self, request: web.Request) -> Killed:
        return self._kill(self._matching(request))

    def _sandbox(self, request: web.Request) -> str:
        sandbox_id = request.match_info["sandbox_id"]
        if sandbox_id not in self.sandboxes:
            raise NotFound(f"no sandbox {sandbox_id}")
        return sandbox_id

    async def on_info(self, request: web.Request) -> SandboxInfo:
        return self.sandboxes[self._sandbox(request)]

    async def on_kill(self, request: web.Request) -> Killed:
        return self._kill([self._sandbox(request)])

    async def _started(self, request: web.Request, kind: type[StartRequest] | type[ExecRequest]) -> FakeProcess:
        asked = msgspec.msgpack.decode(await request.read(), type=kind)
        key = (self._sandbox(request), asked.process_id or "")
        async with self._starting:
            if key not in self.processes:
                process = FakeProcess(asked)
                await process.start(self.folder)
                self.processes[key] = process
            if self.processes[key].request != asked:
                raise Conflict("another program has this id")
            return self.processes[key]

    def _process(self, request: web.Request) -> FakeProcess:
        key = (self._sandbox(request), request.match_info["process_id"])
        if key not in self.processes:
            raise NotFound(f"no process {key[1]}")
        return self.processes[key]

    async def on_exec(self, request: web.Request) -> ExecResult:
        process = await self._started(request, ExecRequest)
        async with process.changed:
            await process.changed.wait_for(lambda: process.ended)
        info = process.info()
        return ExecResult(
            process_id=info.process_id, exit_code=info.exit_code or 0, signal=info.signal,
            stdout=bytes(process.buffers["stdout"]), stderr=bytes(process.buffers["stderr"]),
        )  # fmt: skip

    async def on_start(self, request: web.Request) -> ProcessInfo:
        return (await self._started(request, StartRequest)).info()

    async def on_process_info(self, request: web.Request) -> ProcessInfo:
        process = self._process(request)
        try:
            async with asyncio.timeout(float(request.query.get("wait_s", "0"))), process.changed:
                await process.changed.wait_for(lambda: process.ended)
        except TimeoutError:
            pass
        return process.info()

    async def on_output(self, request: web.Request) -> web.StreamResponse:
        process = self._process(request)
        reached = {name: int(request.query.get(name, "0")) for name in ("stdout", "stderr")}
        follow = request.query.get("follow", "true") == "true"
        response = web.StreamResponse()
        await response.prepare(request)
        written = 0
        while True:
            for name, buffer in process.buffers.items():
                while reached[name] < len(buffer):
                    data = bytes(buffer[reached[name] : reached[name] + 1000])
                    await response.write(record(OutputChunk(name, reached[name], data)))  # type: ignore[arg-type]
                    reached[name] += len(data)
                    written += len(data)
                    if self.output_cut_bytes is not None and written >= self.output_cut_bytes:
                        assert request.transport is not None
                        request.transport.abort()
                        return response
            if process.ended and all(reached[name] == len(buffer) for name, buffer in process.buffers.items()):
                await response.write(record(OutputChunk("exit", 0, msgspec.json.encode(process.info()))))
                await response.write(record(OutputChunk("end", 0, b"")))
                return response
            if not follow:
                return response
            async with process.changed:
                try:
                    await asyncio.wait_for(process.changed.wait(), 0.05)
                except TimeoutError:
                    pass

    async def on_stdin(self, request: web.Request) -> StdinWritten:
        process = self._process(request)
        data = (await request.read())[max(0, process.stdin_offset - int(request.query["offset"])) :]
        if process.master is not None:
            os.write(process.master, data)
        else:
            assert process.child.stdin is not None
            process.child.stdin.write(data)
            if request.query.get("eof") == "true":
                process.child.stdin.close()
            else:
                try:
                    await process.child.stdin.drain()
                except ConnectionError as error:
                    raise InvalidSpec("takes no more input: Broken pipe") from error
        process.stdin_offset += len(data)
        return StdinWritten(offset=process.stdin_offset)

    async def on_signal(self, request: web.Request) -> Signalled:
        asked = msgspec.msgpack.decode(await request.read(), type=SignalRequest)
        number = asked.signal if isinstance(asked.signal, int) else signal.Signals[f"SIG{asked.signal}"]
        return Signalled(signalled=self._process(request).signal(number, asked.scope))

    async def on_resize(self, request: web.Request) -> Empty:
        asked = msgspec.msgpack.decode(await request.read(), type=ResizeRequest)
        self._process(request).resize(asked.rows, asked.cols)
        return Empty()

    async def on_file_watch(self, request: web.Request) -> web.StreamResponse:
        """Tells the changes of the next entry of `watches`, and breaks off, or ends if there is no other entry."""
        response = web.StreamResponse()
        await response.prepare(request)
        if not self.watches:
            await self._stop.wait()
            return response
        for name in self.watches.pop(0):
            await response.write(record(FileChange(kind="created", path=name)))
        if self.watches:
            await response.write(b"\x01")
            assert request.transport is not None
            request.transport.abort()
        return response

    async def on_file_write(self, request: web.Request) -> Empty:
        self.files[request.query["path"]] = await request.read()
        return Empty()

    async def on_file_stat(self, request: web.Request) -> FileInfo:
        if request.query["path"] not in self.entries:
            raise NotFound("no such file")
        return self.entries[request.query["path"]]

    async def on_file_read(self, request: web.Request) -> bytes:
        if request.query["path"] not in self.files:
            raise NotFound("no such file")
        start = int(request.query.get("offset", "0"))
        return self.files[request.query["path"]][start : start + int(request.query.get("length", str(1 << 40)))]


def record(value: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "little") + body
