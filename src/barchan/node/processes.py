"""Programs in one sandbox: starting, deadlines, stdin, results."""

import asyncio
import os
import resource
import signal as signals
import uuid
from collections.abc import Callable, Iterable
from functools import partial

from barchan.backends.base import Handle
from barchan.backends.guest import GuestProcess
from barchan.errors import BarchanError, ConnectionLost, InvalidSpec, ReadTimeout, SandboxLost, TransportError
from barchan.image.template import GUEST_PATH, Template
from barchan.model.sandbox import ExecRequest, ExecResult, ProcessInfo, SandboxSpec, StartRequest, Usage
from barchan.node.clock import Clock, Timer
from barchan.node.collect import Collector
from barchan.wire import guest as wire
from barchan.wire.guest import Scope, StartFlag

BACKSTOP_MARGIN_S = 5.0
KILL_WAIT_S = 20.0
RECONNECT_WAIT_S = 10.0
RECONNECT_LOOK_S = 0.05
STDIN_WAIT_S = 3600.0  # for a program to read
EXEC_SPOOL_BYTES = 4 << 20
# A reader tells how far it is in steps of a quarter of its window: a spool that is full before holds both up for ever.
BLOCK_SPOOL_BYTES_MIN = wire.WINDOW_BYTES // 2
STDIN_INLINE_MAX = 1 << 20
ARG_BYTES_MAX = 131_000  # the kernel takes 128 KiB per string
SHELL_NAMES = ("/bin/bash", "/bin/sh")
HOST_FULL = "the host was out of memory, and its kernel killed a program of the sandbox"

_RLIMITS = {name[7:].lower(): getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
_UNLIMITED = (1 << 64) - 1


class Defaults:
    """What every start in a sandbox gets unless its request says otherwise."""

    def __init__(self, spec: SandboxSpec, template: Template, extra_env: dict[str, str]) -> None:
        self.env = {"PATH": GUEST_PATH, "LANG": "C.UTF-8", **template.env, **extra_env, **spec.env}
        self.cwd = spec.workdir or template.workdir or "/"
        self.user = spec.user or template.user or "root"
        self.shell = SHELL_NAMES[-1]


class Processes:
    """The programs of one sandbox. Deadlines are the node's; the init's backstop comes a little later."""

    def __init__(self, handle: Handle, defaults: Defaults, clock: Clock, *, is_new: bool) -> None:
        self._handle = handle
        self._clock = clock
        self._guest = handle.guest
        self._defaults = defaults
        self._oom_killed: set[str] = set()
        self._oom_seen = 0 if is_new else handle.oom_kills()
        self._feeders: set[asyncio.Task[None]] = set()
        self.evicted: Callable[[], BarchanError] = lambda: SandboxLost(HOST_FULL)  # the node's ends the sandbox, too
        self._deadlines: list[Timer] = []

    async def move(self, handle: Handle) -> None:
        """Go on in a sandbox that has come back from disk, with the same programs."""
        await self._guest.take_over(handle.guest)
        handle.guest = self._guest
        self._handle = handle
        self._oom_seen = handle.oom_kills()

    # building a START

    def _argv(self, argv: tuple[str, ...] | None, shell: str | None) -> tuple[tuple[str, ...], bytes]:
        """The argument vector, and the script that goes by descriptor when it is too long for an argument."""
        if (argv is None) == (shell is None):
            raise InvalidSpec("give exactly one of argv and shell")
        if argv is not None:
            if not argv:
                raise InvalidSpec("argv is empty: give at least the program")
            longest = max(len(item.encode("utf-8", "surrogateescape")) for item in argv)
            if longest > ARG_BYTES_MAX:
                raise InvalidSpec(
                    f"one argument has {longest} bytes; the kernel takes 128 KiB: pass it by stdin or a file"
                )
            return argv, b""
        assert shell is not None
        raw = shell.encode("utf-8", "surrogateescape")
        if len(raw) <= ARG_BYTES_MAX:
            return (self._defaults.shell, "-c", shell), b""
        return (self._defaults.shell, "/proc/self/fd/3"), raw

    def _limits(self, limits: dict[str, tuple[int, int]]) -> list[tuple[int, int, int]]:
        limits = {name.lower(): pair for name, pair in limits.items()}
        unknown = sorted(set(limits) - set(_RLIMITS))
        if unknown:
            raise InvalidSpec(f"no resource limit {unknown[0]!r}; there are: {', '.join(sorted(_RLIMITS))}")
        return [
            (_RLIMITS[name], *(_UNLIMITED if value < 0 else value for value in pair)) for name, pair in limits.items()
        ]

    def _start(self, request: ExecRequest | StartRequest, flags: StartFlag, spool_bytes: int, warm: str) -> wire.Start:
        argv, script = _python(request, warm) if warm else self._argv(request.argv, request.shell)
        if request.merge_stderr:
            flags |= StartFlag.MERGE
        if request.platform:
            flags |= StartFlag.PLATFORM
        if request.restrained:
            flags |= StartFlag.RESTRAINED
        inline = len(request.stdin) <= STDIN_INLINE_MAX
        if not inline:
            flags |= StartFlag.STDIN
        backstop_s = 0.0 if request.timeout_s is None else request.timeout_s + BACKSTOP_MARGIN_S
        return wire.Start(
            process_id=request.process_id or uuid.uuid4().hex,
            argv=argv,
            warm=bool(warm),
            flags=flags,
            spool_bytes=spool_bytes,
            backstop_ms=min(int(backstop_s * 1000), 0xFFFFFFFF),
            rows=request.rows if isinstance(request, StartRequest) else 24,
            cols=request.cols if isinstance(request, StartRequest) else 80,
            user=self._defaults.user if request.user is None else request.user,
            cwd=self.path(request.cwd or "."),
            env={**self._defaults.env, **request.env} if request.env else self._defaults.env,
            limits=self._limits(request.rlimits) if request.rlimits else (),
            script=script,
            stdin=request.stdin if inline else b"",
        )

    def path(self, path: str) -> str:
        """A guest path made absolute against the sandbox's working directory."""
        if "\0" in path or not path:
            raise InvalidSpec(f"not a path: {path[:60]!r}")
        return self._defaults.cwd if path == "." else os.path.join(self._defaults.cwd, path)

    # running

    async def exec(self, request: ExecRequest) -> ExecResult:
        """Run to the end. Losing the caller changes nothing: the same request finds the same process."""
        if request.platform:
            await self._handle.platform_leaf()
        warm = await self._handle.warm() if request.python is not None else ""
        start = self._start(request, StartFlag.BLOCK | StartFlag.FOLLOW, EXEC_SPOOL_BYTES, warm)
        collector = Collector(request.max_output_bytes)
        process = await self._patient_start(start, collector)
        self._feed(process, request.stdin)
        timer = self._clock.call_later(request.timeout_s, self._deadline, process, request.timeout_s)
        try:
            await collector.done
        finally:
            timer.cancel()
            process.remove_reader(collector)
        return self._result(process, collector)

    async def start(self, request: StartRequest) -> ProcessInfo:
        """Start in the background."""
        if request.platform:
            await self._handle.platform_leaf()
        flags = StartFlag.FOLLOW  # without a reader that means: hear of its end
        spool_bytes = request.spool_bytes
        if request.overflow == "block":
            flags |= StartFlag.BLOCK
            spool_bytes = max(spool_bytes, BLOCK_SPOOL_BYTES_MIN)
        if request.pty:
            flags |= StartFlag.PTY
        if request.stdin_open or request.pty:
            flags |= StartFlag.STDIN
        warm = await self._handle.warm() if request.python is not None else ""
        process = await self._patient_start(self._start(request, flags, spool_bytes, warm), None)
        self._feed(process, request.stdin)
        if request.timeout_s is not None and process.exit is None:
            timer = self._clock.call_later(request.timeout_s, self._deadline, process, request.timeout_s)
            self._deadlines.append(timer)
        return self.info(process)

    async def _patient_start(self, start: wire.Start, collector: Collector | None) -> GuestProcess:
        """Start; if the connection goes at that moment, ask again by the same id, which never runs it twice."""
        until = self._guest.loop.time() + RECONNECT_WAIT_S
        while True:
            try:
                process = await self._guest.start(start, collector)
                self._watch(process)
                return process
            except ConnectionLost:
                if self._guest.loop.time() > until:
                    raise
                await asyncio.sleep(RECONNECT_LOOK_S)

    def found(self) -> None:
        """Programs that an earlier node has started are known by now."""
        for process in self._guest.processes.values():
            self._watch(process)

    def _watch(self, process: GuestProcess) -> None:
        """Count what of its time the platform has it asleep; repeating is harmless."""
        if process.missed_from_s is None:
            process.missed_from_s = self._clock.missed_s
            process.ended.add_done_callback(partial(self._note_end, process))

    def _note_end(self, process: GuestProcess, _ended: "asyncio.Future[wire.Exit]") -> None:
        process.missed_until_s = self._clock.missed_s

    def _missed_s(self, process: GuestProcess) -> float:
        if process.missed_from_s is None:
            return 0.0
        until_s = self._clock.missed_s if process.missed_until_s is None else process.missed_until_s
        return until_s - process.missed_from_s

    def _feed(self, process: GuestProcess, data: bytes) -> None:
        """Write a long stdin piece by piece beside the process."""
        if len(data) <= STDIN_INLINE_MAX or process.exit is not None:
            return
        task = self._guest.loop.create_task(self._write_all(process, data))
        self._feeders.add(task)
        task.add_done_callback(self._feeders.discard)

    async def _write_all(self, process: GuestProcess, data: bytes) -> None:
        try:
            await self.write_stdin(process, 0, data, eof=True)
        except (OSError, BarchanError):
            return  # the process reads no more, or is gone: what it did is in its result

    async def write_stdin(self, process: GuestProcess, offset: int, data: bytes, *, eof: bool) -> int:
        """Write at an offset of the process's stdin; returns the offset reached."""
        view = memoryview(data)
        reached = offset
        while True:
            piece = bytes(view[: wire.STDIN_BYTES_MAX])
            view = view[len(piece) :]
            last = not view
            reached = await self._write_piece(process, reached, piece, eof=eof and last)
            if last:
                return reached

    async def _write_piece(self, process: GuestProcess, offset: int, piece: bytes, *, eof: bool) -> int:
        """Write; if the connection goes meanwhile, as for every dump of memory, say it again on the next one: the init
        takes what it has not had.
        """
        left_s = RECONNECT_WAIT_S
        while True:
            try:
                return await self._guest.write_stdin(process, offset, piece, eof=eof, timeout_s=STDIN_WAIT_S)
            except ConnectionLost:
                if left_s <= 0:
                    raise
                left_s -= RECONNECT_LOOK_S
                await asyncio.sleep(RECONNECT_LOOK_S)

    def _deadline(self, process: GuestProcess, timeout_s: float) -> None:
        if process.exit is not None:
            return
        task = self._guest.loop.create_task(self._time_out(process, timeout_s))
        self._feeders.add(task)
        task.add_done_callback(self._feeders.discard)

    async def _time_out(self, process: GuestProcess, timeout_s: float) -> None:
        """Its time is over, unless it had none: for want of bytes of its image."""
        if await self._handle.end_if_starved(timeout_s) or process.exit is not None:
            return
        process.timed_out = True
        await self._kill(process)

    async def _kill(self, process: GuestProcess) -> None:
        """Kill everything of one start. A guest that does not even do that is given up."""
        try:
            await self._guest.signal(process, signals.SIGKILL, Scope.ALL)
            async with asyncio.timeout(KILL_WAIT_S):
                await asyncio.shield(process.ended)
        except (TimeoutError, ReadTimeout):
            process.take_loss(ReadTimeout(f"process {process.process_id} survived SIGKILL for {KILL_WAIT_S:g} s"))
        except (TransportError, OSError) as error:
            process.take_loss(error if isinstance(error, TransportError) else ConnectionLost(str(error)))

    async def signal(self, process: GuestProcess, signal: str | int, scope: str) -> int:
        number = signal_number(signal)
        return await self._guest.signal(
            process, number, Scope[{"all": "ALL", "children": "CHILDREN"}.get(scope, scope.upper())]
        )

    async def listed(self) -> list[ProcessInfo]:
        """Every program started through the platform, by the init's own list."""
        infos = []
        for item in await self._guest.listed():
            known = self._guest.processes.get(item.handle)
            if known is not None:
                infos.append(self.info(known))
                continue
            code, number = exit_of(item.wstatus) if item.exited else (None, None)
            infos.append(
                ProcessInfo(
                    process_id=item.process_id, pid=item.pid, running=not item.exited, exit_code=code, signal=number
                )
            )
        return [info for info in infos if not info.process_id.startswith(APPLET_PREFIX)]

    # results

    def info(self, process: GuestProcess) -> ProcessInfo:
        ended = process.exit
        if ended is None:
            return ProcessInfo(process_id=process.process_id, pid=process.pid, running=True)
        code, number = exit_of(ended.wstatus)
        return ProcessInfo(
            process_id=process.process_id,
            pid=process.pid,
            running=False,
            exit_code=code,
            signal=number,
            timed_out=process.timed_out,
            oom_killed=self._oom(process, code),
            usage=usage_of(ended, self._missed_s(process)),
        )

    def _result(self, process: GuestProcess, collector: Collector) -> ExecResult:
        ended = process.exit
        assert ended is not None
        code, number = exit_of(ended.wstatus)
        out, err = collector.streams[wire.STDOUT], collector.streams[wire.STDERR]
        stdout, stdout_whole = out.value()
        stderr, stderr_whole = err.value()
        return ExecResult(
            process_id=process.process_id,
            exit_code=code,
            signal=number,
            timed_out=process.timed_out,
            oom_killed=self._oom(process, code),
            stdout=stdout,
            stderr=stderr,
            truncated=not (
                stdout_whole and stderr_whole and out.end >= ended.stdout_end and err.end >= ended.stderr_end
            ),
            stdout_bytes=max(out.end, ended.stdout_end),
            stderr_bytes=max(err.end, ended.stderr_end),
            usage=usage_of(ended, self._missed_s(process)),
        )

    def _oom(self, process: GuestProcess, code: int) -> bool:
        """Did the memory limit kill it? The kernel's counter must have risen, and SIGKILL must have been the end.

        Raises:
            SandboxLost: The host was out of memory, and killed it for that.
        """
        if code != 128 + signals.SIGKILL or process.timed_out:
            return False
        if process.process_id in self._oom_killed:
            return True
        kills = self._handle.oom_kills()
        if kills <= self._oom_seen:
            if self._handle.host_kills():
                raise self.evicted()
            return False
        self._oom_seen = kills
        self._oom_killed.add(process.process_id)
        return True

    async def close(self) -> None:
        """Stop what this node does for the sandbox's processes; they themselves live on."""
        for timer in self._deadlines:
            timer.cancel()
        for task in list(self._feeders):
            task.cancel()
        await asyncio.gather(*self._feeders, return_exceptions=True)


APPLET_PREFIX = "fs:"


def _python(request: ExecRequest | StartRequest, warm: str) -> tuple[tuple[str, ...], bytes]:
    """The argument vector of a start in the warm interpreter, and the source."""
    has_pty = isinstance(request, StartRequest) and request.pty
    has_limits = bool(request.rlimits) or request.restrained
    if request.shell is not None or request.user is not None or has_limits or request.platform or has_pty:
        raise InvalidSpec(
            "the warm interpreter runs source as the sandbox's user, within the guest's limits and without a terminal: "
            "python excludes shell, user, rlimits, restrained, platform and pty (try: exec)"
        )
    source = (request.python or "").encode("utf-8", "surrogateescape")
    return (warm, *(request.argv or ())), source + b"\n"


def exit_of(wstatus: int) -> tuple[int, int | None]:
    """Exit code (128 + n after signal n) and signal of a wait status."""
    if os.WIFSIGNALED(wstatus):
        return 128 + os.WTERMSIG(wstatus), os.WTERMSIG(wstatus)
    return os.WEXITSTATUS(wstatus), None


def usage_of(ended: wire.Exit, missed_s: float) -> Usage:
    """What it used; `missed_s` of its wall time, by the guest's clock, the platform had it asleep."""
    return Usage(
        user_s=ended.utime_us / 1e6,
        system_s=ended.stime_us / 1e6,
        max_rss_kib=ended.maxrss_kib,
        wall_s=max(0.0, (ended.ended_ns - ended.started_ns) / 1e9 - missed_s),
    )


def signal_number(signal: str | int) -> int:
    """`"INT"`, `"SIGINT"` or 2 as a number.

    Raises:
        InvalidSpec: There is no such signal.
    """
    names: Iterable[str] = (str(signal).upper(), f"SIG{signal}".upper())
    for name in names:
        if name in signals.Signals.__members__:
            return signals.Signals[name].value
    if str(signal).isdigit() and 0 <= int(signal) <= 64:
        return int(signal)
    raise InvalidSpec(f"no signal {signal!r}")
