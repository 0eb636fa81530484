"""`python -m barchan.node`: one node agent, from start to its end when idle and empty."""

import argparse
import asyncio
import fcntl
import gc
import os
import resource
import secrets
import signal
import sys
from importlib import metadata
from pathlib import Path

import msgspec
from aiohttp import web
from msgspec.structs import replace

from barchan.backends.container.lazy import ReaderSettings
from barchan.errors import BarchanError, Conflict, InvalidSpec
from barchan.node.admission import default_limits
from barchan.node.http import Server
from barchan.node.sandboxes import Sandboxes
from barchan.wire.api import error_body

IDLE_CHECK_S = 1.0
LAST_REQUESTS_S = 1.0  # of a node that ends, for what is being served; who waits for longer asks the next node again
SWITCH_S = 0.001  # after which a thread that packs or unpacks gives way to the event loop
LIMITS = {
    "running_max": "live sandboxes at most (default: as memory lets)",
    "starting_max": "sandboxes made at once (default: 4 per processor)",
    "queued_max": "creates that may wait for their turn",
    "warm": "sandboxes prepared ahead of their creates (default: 4 per processor, at least 16; 0: none)",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="barchan.node", description="Run the node agent of this machine.")
    parser.add_argument("--state-dir", type=Path, required=True, help="where this node keeps everything it owns")
    parser.add_argument("--listen", metavar="HOST:PORT", help="also serve HTTP here, with a bearer token")
    parser.add_argument("--token-file", type=Path, help="holds the token; made with a fresh one if missing")
    parser.add_argument("--store", metavar="URL", default="", help="blob store of images that are not here")
    parser.add_argument("--idle-exit-s", type=float, default=30.0, help="end after this long idle and empty; 0: never")
    for name, what in LIMITS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=what)
    parser.add_argument(
        "--memory-overcommit", type=float, metavar="X", help="memory limits may add up to X times the host's memory"
    )
    parser.add_argument(
        "--weaken",
        action="append",
        default=[],
        metavar="no-...",
        help="switch a protection off, to test that it matters",
    )
    parser.add_argument("--image-cache-mib", type=int, metavar="N", help="what is kept of images read on demand")
    parser.add_argument("--image-wait-s", type=float, metavar="N", help="how long their store may take for a piece")
    parser.add_argument("--ready-fd", type=int, help="write `ready`, or an error as JSON, here once")
    return parser.parse_args()


def _say(ready_fd: int | None, line: bytes) -> None:
    if ready_fd is not None:
        os.write(ready_fd, line + b"\n")
        os.close(ready_fd)


def _raise_descriptor_limit() -> None:
    """Every sandbox takes a few descriptors: allow as many as the kernel lets this user have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = int(Path("/proc/sys/fs/nr_open").read_text())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except ValueError:  # raising the hard limit takes CAP_SYS_RESOURCE
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _lock(state_dir: Path) -> int:
    """Hold the state directory for the life of this process."""
    fd = os.open(state_dir / "node.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict(f"another node runs in {state_dir} (try: another --state-dir, or end that one)") from None
    return fd


def _token(path: Path) -> str:
    """The token in `path`, made on first use, readable by its owner only."""
    if not path.exists():
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    token = path.read_text().strip()
    if len(token) < 16:
        raise InvalidSpec(f"the token in {path} is shorter than 16 characters")
    return token


def _address(listen: str) -> tuple[str, int]:
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdigit() or not 1 <= int(port) <= 65_535:
        raise InvalidSpec(f"--listen {listen}: give HOST:PORT, with a port from 1 to 65535")
    return host.strip("[]"), int(port)


def _runner(server: Server) -> web.AppRunner:
    """A path in a query may have 4 KiB, and each byte of it three on the wire."""
    return web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,
        max_line_size=32 << 10,
        max_field_size=32 << 10,
        shutdown_timeout=LAST_REQUESTS_S,
    )


async def _serve(arguments: argparse.Namespace, sandboxes: Sandboxes) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    address = _address(arguments.listen) if arguments.listen else None
    runners = []
    socket_path = arguments.state_dir / "node.sock"
    try:
        await sandboxes.start()
        local = _runner(Server(sandboxes, None, stop, os.getpid()))
        runners.append(local)
        await local.setup()
        socket_path.unlink(missing_ok=True)
        await web.UnixSite(local, os.fspath(socket_path), backlog=1024).start()
        if address is not None:
            token = _token(arguments.token_file or arguments.state_dir / "token")
            remote = _runner(Server(sandboxes, token, stop, os.getpid()))
            runners.append(remote)
            await remote.setup()
            try:
                await web.TCPSite(remote, *address, backlog=1024).start()
            except OSError as error:
                raise Conflict(
                    f"can't listen on {arguments.listen}: {error.strerror} (try: barchan up --listen HOST:PORT)"
                ) from error
        _say(arguments.ready_fd, b"ready")
        arguments.ready_fd = None
        await _until_idle(stop, sandboxes, arguments.idle_exit_s)
        socket_path.unlink()  # a client that comes now starts the next node
        if not sandboxes.is_occupied:
            await sandboxes.end_backends()
    finally:
        await sandboxes.calls.close()
        for runner in runners:
            await runner.cleanup()
        await sandboxes.close()


async def _until_idle(stop: asyncio.Event, sandboxes: Sandboxes, idle_exit_s: float) -> None:
    """Return when told to stop, or when nothing has lived or been asked here for `idle_exit_s`."""
    loop = asyncio.get_running_loop()
    while not stop.is_set():
        try:
            async with asyncio.timeout(IDLE_CHECK_S):
                await stop.wait()
        except TimeoutError:
            if sandboxes.is_occupied or sandboxes.leases.held:
                sandboxes.touch()
            elif idle_exit_s and loop.time() - sandboxes.last_used > idle_exit_s:
                return


async def _run(arguments: argparse.Namespace) -> None:
    version = metadata.version("barchan")
    given = {name: value for name in (*LIMITS, "memory_overcommit") if (value := getattr(arguments, name)) is not None}
    limits = replace(default_limits(), **given)
    reader = ReaderSettings(cache_mib=arguments.image_cache_mib)
    if arguments.image_wait_s is not None:
        reader = replace(reader, wait_s=arguments.image_wait_s)
    sandboxes = Sandboxes(arguments.state_dir, limits, version, tuple(arguments.weaken), reader, arguments.store)
    gc.collect()
    gc.freeze()  # what is loaded now stays: collections need not walk it again and again
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(SWITCH_S)
    await _serve(arguments, sandboxes)


def main() -> int:
    """Run a node; returns its exit code."""
    arguments = _arguments()
    os.umask(0o077)
    _raise_descriptor_limit()
    try:
        arguments.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _lock(arguments.state_dir)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_run(arguments))
        os.close(lock)
    except BarchanError as error:
        _say(arguments.ready_fd, msgspec.json.encode(error_body(error)))
        return 1
    return 0


def _loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(main())
