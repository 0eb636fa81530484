"""File operations in a sandbox: applets of the guest init, run as the asking user."""

import asyncio
import errno
import itertools
import os
import uuid
from collections.abc import AsyncIterable, AsyncIterator

from barchan.backends.base import Handle
from barchan.backends.guest import GuestProcess
from barchan.errors import (
    BackendError,
    BarchanError,
    Conflict,
    Denied,
    GuestWrecked,
    InvalidSpec,
    NotFound,
    QuotaExceeded,
)
from barchan.model.sandbox import FileChange, FileInfo
from barchan.node.collect import Collector, Stream
from barchan.node.processes import APPLET_PREFIX, STDIN_INLINE_MAX, Defaults, Processes
from barchan.wire import guest as wire
from barchan.wire.guest import Scope, StartFlag

KINDS = {"f": "file", "d": "directory", "l": "symlink", "c": "device", "b": "device", "p": "fifo", "s": "socket"}
READY = "r"
CHANGES = {"c": "created", "m": "modified", "d": "removed", "v": "moved", "o": "overflow"}
CANNOT_START = 126  # an applet that can't become its user: the guest has changed its /etc/passwd
DISK_FULL = " (try: remove files of the sandbox, or create it with more disk_mib)"
LIST_BYTES_MAX = 256 << 20
STREAM_SPOOL_BYTES = 1 << 20


class Files:
    """The file operations of one sandbox. Paths are absolute already; `user` None is the sandbox's default user."""

    def __init__(self, handle: Handle, processes: Processes, defaults: Defaults) -> None:
        self._guest = handle.guest
        self._processes = processes
        self._defaults = defaults
        self._ids = (f"{APPLET_PREFIX}{uuid.uuid4().hex[:12]}:{count}" for count in itertools.count())

    def _applet(self, argv: tuple[str, ...], user: str | None, flags: StartFlag, stdin: bytes = b"") -> wire.Start:
        return wire.Start(
            process_id=next(self._ids),
            argv=argv,
            applet=True,
            flags=flags | StartFlag.BLOCK | StartFlag.FOLLOW,
            spool_bytes=STREAM_SPOOL_BYTES,
            user=self._defaults.user if user is None else user,
            cwd=self._defaults.cwd,
            stdin=stdin,
        )

    async def run(self, *argv: str, user: str | None, stdin: bytes = b"") -> bytes:
        """One operation with small input and output."""
        collector = Collector(LIST_BYTES_MAX)
        process = await self._guest.start(self._applet(argv, user, StartFlag(0), stdin), collector)
        try:
            await collector.done
        except asyncio.CancelledError:
            await asyncio.shield(self._kill(process))
            raise
        finally:
            process.remove_reader(collector)
        _raise_failed(process, collector.streams[wire.STDERR].value()[0], argv)
        data, whole = collector.streams[wire.STDOUT].value()
        if not whole:
            raise InvalidSpec(f"{argv[0]} of {argv[1]} gives more than {LIST_BYTES_MAX} bytes")
        return data

    async def stat(self, path: str, user: str | None) -> FileInfo:
        return _info(wire.decode_entries(await self.run("stat", path, user=user))[0])

    async def list(self, path: str, user: str | None) -> list[FileInfo]:
        entries = wire.decode_entries(await self.run("list", path, user=user))
        return sorted((_info(entry, path) for entry in entries), key=lambda info: info.path)

    async def stream_out(self, *argv: str, user: str | None) -> AsyncIterator[bytes]:
        """The bytes an operation prints, as they come; its failure is raised where it happens."""
        stream = Stream()
        process = await self._guest.start(self._applet(argv, user, StartFlag(0)), stream)
        errors = bytearray()
        try:
            while True:
                chunk = stream.take_nowait()
                if chunk is None:
                    if stream.exited:
                        break
                    await stream.changed()
                    continue
                if chunk[0] == wire.STDERR:
                    errors += chunk[2][: 4096 - len(errors)]
                else:
                    yield chunk[2]
                process.acknowledge(chunk[0])
            _raise_failed(process, bytes(errors), argv)
        finally:
            process.remove_reader(stream)
            if process.exit is None:
                await asyncio.shield(self._kill(process))

    async def stream_in(self, *argv: str, user: str | None, data: AsyncIterable[bytes], length: int | None) -> None:
        """Feed an operation; it is killed, and takes nothing over, when the bytes stop coming before their end."""
        if length is not None and length <= STDIN_INLINE_MAX:
            body = b"".join([piece async for piece in data])
            if len(body) != length:
                raise InvalidSpec(f"{length} bytes were announced and {len(body)} came")
            await self.run(*argv, user=user, stdin=body)
            return
        collector = Collector(1 << 16)
        process = await self._guest.start(self._applet(argv, user, StartFlag.STDIN), collector)
        try:
            offset = 0
            async for piece in data:
                offset = await self._processes.write_stdin(process, offset, piece, eof=False)
            if length is not None and offset != length:
                raise InvalidSpec(f"{length} bytes were announced and {offset} came")
            await self._processes.write_stdin(process, offset, b"", eof=True)
            await collector.done
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise BackendError(f"writing failed: {error.strerror}") from error
            await collector.done  # it stopped reading: its own words say why
        finally:
            if process.exit is None:
                await asyncio.shield(self._kill(process))
            process.remove_reader(collector)
        _raise_failed(process, collector.streams[wire.STDERR].value()[0], argv)

    async def watch(self, path: str, recursive: bool, user: str | None) -> AsyncIterator[tuple[FileChange, ...]]:
        """Changes as they come; nothing at first, when everything from then on is seen."""
        rest = b""
        async for data in self.stream_out("watch", path, str(int(recursive)), user=user):
            changes, rest = wire.decode_changes(rest + data)
            if unknown := {kind for kind, _ in changes} - {*CHANGES, READY}:
                raise BackendError(f"the guest init reports an unknown change {unknown.pop()!r}")
            yield tuple(
                FileChange(kind=CHANGES[kind], path=name)  # type: ignore[arg-type]
                for kind, name in changes
                if kind != READY
            )

    async def _kill(self, process: GuestProcess) -> None:
        await self._guest.signal(process, 9, Scope.ALL)


def _info(entry: wire.Entry, directory: str = "") -> FileInfo:
    return FileInfo(
        path=os.path.join(directory, entry.name),
        kind=KINDS.get(entry.kind, "device"),  # type: ignore[arg-type]
        size=entry.size,
        mode=entry.mode & 0o7777,
        uid=entry.uid,
        gid=entry.gid,
        mtime_unix_s=entry.mtime_ns / 1e9,
        target=entry.target,
    )


_CLASSES: dict[int, type[BarchanError]] = {
    errno.ENOENT: NotFound,
    errno.EACCES: Denied,
    errno.EPERM: Denied,
    errno.EROFS: Denied,
    errno.EEXIST: Conflict,
    errno.ENOTEMPTY: Conflict,
    errno.EBUSY: Conflict,
    errno.ETXTBSY: Conflict,
    errno.ENOSPC: QuotaExceeded,
    errno.EDQUOT: QuotaExceeded,
    errno.EFBIG: QuotaExceeded,
}


def _raise_failed(process: GuestProcess, said: bytes, argv: tuple[str, ...]) -> None:
    ended = process.exit
    assert ended is not None
    if ended.wstatus == 0:
        return
    number, _, message = said.decode("utf-8", "replace").strip().partition(" ")
    if number.isdigit():
        cls = _CLASSES.get(int(number), InvalidSpec)
        hint = DISK_FULL if int(number) in (errno.EDQUOT, errno.ENOSPC) else ""
        raise cls(f"{argv[0]}: {message or f'{argv[1]}: {os.strerror(int(number))}'}{hint}", errno=int(number))
    if os.WIFEXITED(ended.wstatus) and os.WEXITSTATUS(ended.wstatus) == CANNOT_START:
        raise GuestWrecked(f"{argv[0]} {argv[1]}: {said.decode('utf-8', 'replace').strip()}")
    raise BackendError(f"{argv[0]} {argv[1]} failed in the guest: {said[:200]!r}", wstatus=ended.wstatus)
