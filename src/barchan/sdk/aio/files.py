"""Files of a sandbox, read and written as one of its users with the kernel's own permission checks."""

import asyncio
import os
import posixpath
import stat
import time
from collections.abc import AsyncGenerator
from io import BytesIO
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from types import TracebackType
from typing import IO, Any, BinaryIO, Self

from barchan.errors import BarchanError, ConnectionLost, InvalidSpec, NotFound, QuotaExceeded, ReadTimeout
from barchan.model.sandbox import FileChange, FileInfo
from barchan.sdk.aio.clock import awake_s
from barchan.sdk.checks import check_seconds
from barchan.sdk.endpoint import Endpoint
from barchan.sdk.http1 import Response
from barchan.sdk.transport import RESEND_S, Call, Transport, encode, records, shared_transport
from barchan.wire.api import Empty, MkdirRequest, MoveRequest, RemoveRequest

READ = Call("file_read", bytes)
WRITE = Call("file_write", Empty)
STAT = Call("file_stat", FileInfo)
LIST = Call("file_list", list[FileInfo])
MKDIR = Call("file_mkdir", Empty)
MOVE = Call("file_move", Empty)
REMOVE = Call("file_remove", Empty)
TAR_READ = Call("tar_read", bytes)
TAR_WRITE = Call("tar_write", Empty)
WATCH = Call("file_watch", FileChange)

TRANSFER_TIMEOUT_S = 600.0
READ_BYTES_MAX = 256 << 20
LINKS_MAX = 40  # as many as the kernel follows
TREE_BYTES_MAX = 4 << 30
_PIECE_BYTES = 1 << 20
_QUIET_S = 60.0
_REOPEN_DELAY_S = 0.05
WATCH_TIMEOUT_S = 3600.0


class AsyncFiles:
    """Paths are the sandbox's; relative ones start at its working directory.

    Args:
        lease_id: Change nothing once the sandbox belongs to another lease; a pickled copy does not know it.
        epoch: As of `fenced`; a pickled copy does not know it either.
    """

    def __init__(
        self,
        transport: Transport,
        sandbox_id: str,
        user: str | None = None,
        lease_id: str | None = None,
        epoch: int | None = None,
    ) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._user = user
        self._lease_id = lease_id
        self._epoch = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (self._transport.endpoint, self._sandbox_id, self._user)

    def as_user(self, user: str | None) -> Self:
        """The same files seen as another user of the sandbox; None is the sandbox's default user."""
        return type(self)(self._transport, self._sandbox_id, user, self._lease_id, self._epoch)

    def fenced(self, epoch: int) -> Self:
        """The same files for one of those who go on with each other's work: they raise `Conflict` instead of changing
        anything once somebody has changed a file of the sandbox in a higher epoch.
        """
        return type(self)(self._transport, self._sandbox_id, self._user, self._lease_id, epoch)

    def _target(self, call: Call[Any], **query: Any) -> str:
        return call.target({**query, "user": self._user}, sandbox_id=self._sandbox_id)

    def _changed(self, call: Call[Any], **query: Any) -> str:
        return self._target(call, **query, lease=self._lease_id, epoch=self._epoch)

    async def read(
        self, path: str, offset: int = 0, length: int | None = None, *, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> bytes:
        """The bytes of a regular file, or of `length` from `offset` on.

        Raises:
            QuotaExceeded: They are more than 256 MiB and no `length` says that so many are wanted; see `download`.
        """
        check_seconds(timeout_s=timeout_s)
        bytes_max = length if length is not None else READ_BYTES_MAX
        target = self._target(READ, path=path, offset=offset, length=length if length is not None else bytes_max + 1)
        content = await self._transport.content(READ, target, timeout_s=timeout_s, bytes_max=bytes_max + 1)
        if len(content) > bytes_max:
            raise QuotaExceeded(f"{path} has more than {bytes_max} bytes: read it in parts or download it")
        return content

    async def read_text(self, path: str, *, errors: str = "strict", timeout_s: float = TRANSFER_TIMEOUT_S) -> str:
        """A file as UTF-8 text; `errors` as in `bytes.decode`."""
        return (await self.read(path, timeout_s=timeout_s)).decode("utf-8", errors)

    async def write(
        self,
        path: str,
        data: bytes | str | IO[bytes],
        *,
        mode: int = 0o644,
        parents: bool = True,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        """Replace a file in one step: readers see the old content or the whole new one. Text is written in UTF-8."""
        check_seconds(timeout_s=timeout_s)
        if not isinstance(data, bytes | bytearray | memoryview | str) and not callable(getattr(data, "read", None)):
            raise InvalidSpec(f"data is bytes, str or a file opened in binary mode, not {type(data).__name__}")
        body = data.encode() if isinstance(data, str) else data
        target = self._changed(WRITE, path=path, mode=mode, parents=parents)
        sent = bytes(body) if isinstance(body, bytes | bytearray | memoryview) else _pieces(body)
        await self._transport.value(WRITE, target, sent, timeout_s=timeout_s)

    async def list(self, path: str = ".") -> list[FileInfo]:
        """The entries of a directory."""
        return await self._transport.value(LIST, self._target(LIST, path=path))

    async def stat(self, path: str) -> FileInfo:
        """One entry; symbolic links are not followed."""
        return await self._transport.value(STAT, self._target(STAT, path=path))

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except NotFound:
            return False
        return True

    async def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True) -> None:
        request = MkdirRequest(path=path, mode=mode, parents=parents, user=self._user)
        await self._transport.value(MKDIR, self._changed(MKDIR), encode(request), resend=parents)

    async def move(self, source: str, target: str) -> None:
        request = MoveRequest(source=source, target=target, user=self._user)
        await self._transport.value(MOVE, self._changed(MOVE), encode(request), resend=False)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        request = RemoveRequest(path=path, recursive=recursive, user=self._user)
        await self._transport.value(REMOVE, self._changed(REMOVE), encode(request), resend=False)

    async def upload(
        self, local: str | os.PathLike[str], remote: str, *, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> None:
        """Copy a local file to `remote`, or the content of a local directory below `remote`."""
        check_seconds(timeout_s=timeout_s)
        source = Path(local)
        try:
            info = await asyncio.to_thread(os.stat, source)
        except OSError as error:
            raise InvalidSpec(f"can't read {source}: {error.strerror}") from error
        if not stat.S_ISDIR(info.st_mode):
            with _open(source) as file:
                mode = stat.S_IMODE(info.st_mode)
                await self.write(remote, file, mode=mode, timeout_s=timeout_s)
            return
        from barchan.sdk.pack import pack

        with TemporaryFile() as archive:
            await asyncio.to_thread(pack, source, archive)
            archive.seek(0)
            target = self._changed(TAR_WRITE, path=remote)
            await self._transport.value(TAR_WRITE, target, _pieces(archive), timeout_s=timeout_s)

    async def download(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        max_bytes: int = TREE_BYTES_MAX,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        """Copy a file to `local` (below it, if that is a directory), or the content of a directory below `local`.

        What the sandbox sends is not trusted: nothing is written outside `local`, no link leads out of it, no special
        file is made, no set-id bit is kept.

        Raises:
            QuotaExceeded: It is more than `max_bytes`.
            RemoteProtocolError: The tree holds what may not be written here; the message names the entry.
        """
        check_seconds(timeout_s=timeout_s)
        target = Path(local)
        info, source = await self._followed(remote)
        try:
            if info.kind != "directory":
                if await asyncio.to_thread(target.is_dir):
                    target = target / posixpath.basename(remote)
                mode = info.mode & 0o755 | 0o600 if info.kind == "file" else 0o644
                await self._download_file(source, target, mode, max_bytes, timeout_s)
            else:
                await self._download_tree(source, target, max_bytes, timeout_s)
        except OSError as error:
            raise InvalidSpec(f"can't write {error.filename or target} here: {error.strerror or error}") from error

    async def read_tar(self, path: str, *, max_bytes: int, timeout_s: float = TRANSFER_TIMEOUT_S) -> bytes:
        """What a directory holds, as one tar as the sandbox sends it: not to be trusted.

        Raises:
            QuotaExceeded: It is more than `max_bytes`.
        """
        check_seconds(timeout_s=timeout_s)
        archive = BytesIO()
        await self._fetch(TAR_READ, self._target(TAR_READ, path=path), archive, max_bytes, timeout_s)
        return archive.getvalue()

    async def write_tar(self, path: str, data: bytes, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        """Unpack a tar below a directory; the sandbox refuses entries that would not stay there, and special files."""
        check_seconds(timeout_s=timeout_s)
        await self._transport.value(TAR_WRITE, self._changed(TAR_WRITE, path=path), data, timeout_s=timeout_s)

    async def _followed(self, path: str) -> tuple[FileInfo, str]:
        """What a path leads to: if it is a symbolic link, the entry at its end, and the path of that."""
        at = path
        for _ in range(LINKS_MAX + 1):
            info = await self.stat(at)
            if info.kind != "symlink":
                return info, at
            # Not normalised: the sandbox's kernel knows where a `..` leads.
            at = posixpath.join(posixpath.dirname(at.rstrip("/")), info.target)
        raise InvalidSpec(f"{path} leads through more than {LINKS_MAX} symbolic links")

    async def _download_tree(self, remote: str, local: Path, max_bytes: int, timeout_s: float) -> None:
        from barchan.sdk.untar import unpack

        await asyncio.to_thread(local.mkdir, parents=True, exist_ok=True)
        with TemporaryFile(dir=local) as archive:
            await self._fetch(TAR_READ, self._target(TAR_READ, path=remote), archive, max_bytes, timeout_s)
            archive.seek(0)
            await asyncio.to_thread(unpack, archive, local, max_bytes)

    async def _download_file(self, remote: str, local: Path, mode: int, max_bytes: int, timeout_s: float) -> None:
        await asyncio.to_thread(local.parent.mkdir, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=local.parent, prefix=".barchan-", delete=False) as file:
            try:
                await self._fetch(READ, self._target(READ, path=remote), file.file, max_bytes, timeout_s)
                os.fchmod(file.fileno(), mode)
                os.replace(file.name, local)
            except BaseException:
                os.unlink(file.name)
                raise

    async def _fetch(self, call: Call[bytes], target: str, file: IO[bytes], max_bytes: int, timeout_s: float) -> None:
        """Copy a body into a file of ours."""
        total = 0
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._transport.open(call, target, timeout_s=timeout_s)
                try:
                    async for piece in response.pieces(_QUIET_S):
                        total += len(piece)
                        if total > max_bytes:
                            raise QuotaExceeded(f"it has more than max_bytes={max_bytes} (try: a larger max_bytes)")
                        await asyncio.to_thread(file.write, piece)
                finally:
                    response.close()
        except TimeoutError as error:
            raise ReadTimeout(f"not all came in {timeout_s:g} s") from error
        file.flush()

    async def watch(
        self, path: str, *, recursive: bool = True, quiet_timeout_s: float | None = WATCH_TIMEOUT_S
    ) -> "AsyncWatch":
        """Changes below a directory, from the return of this call on: iterate over them, and close at the end."""
        check_seconds(quiet_timeout_s=quiet_timeout_s)
        target = self._target(WATCH, path=path, recursive=recursive)
        watch = AsyncWatch(self._transport, self._sandbox_id, target, path, quiet_timeout_s)
        await watch.open()
        return watch


class AsyncWatch:
    """Iterates over `FileChange`; after a lost connection comes an `overflow`, since some may have been missed.

    `ReadTimeout` when nothing changed for `quiet_timeout_s`.
    """

    def __init__(
        self, transport: Transport, sandbox_id: str, target: str, path: str, quiet_timeout_s: float | None
    ) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._target = target
        self._path = path
        self._quiet_s = quiet_timeout_s
        self._response: Response | None = None
        self._changes: AsyncGenerator[FileChange, None] | None = None
        self._lost_at: float | None = None  # since when no connection has brought a change

    async def open(self) -> None:
        self._response = await self._transport.open(WATCH, self._target)
        self._changes = records(self._response, WATCH, quiet_s=self._quiet_s)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FileChange:
        change = await self.next()
        if change is None:
            raise StopAsyncIteration
        return change

    async def next(self) -> FileChange | None:
        """The next change, None when the node has ended the watch or it was closed."""
        while self._changes is not None:
            try:
                async for change in self._changes:
                    self._lost_at = None
                    return change
                await self.aclose()
            except ConnectionLost:
                await self.aclose()
                is_first, now = self._lost_at is None, time.monotonic()
                self._lost_at = now if self._lost_at is None else self._lost_at
                if now - self._lost_at > RESEND_S:
                    raise
                await asyncio.sleep(0 if is_first else _REOPEN_DELAY_S)
                await self.open()
                if is_first:
                    return FileChange(kind="overflow", path="")
            except ReadTimeout as error:
                await self.aclose()
                if self._quiet_s is not None and await awake_s(self._transport, self._sandbox_id) < self._quiet_s:
                    await self.open()  # it slept meanwhile
                    continue
                raise ReadTimeout(f"nothing changed below {self._path} for {self._quiet_s:g} s") from error
            except BarchanError:
                await self.aclose()
                raise
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop watching."""
        if self._response is not None and self._changes is not None:
            self._response.close()
            await self._changes.aclose()
        self._response = self._changes = None


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidSpec(f"can't read {path}: {error.strerror}") from error


async def _pieces(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    while True:
        try:
            piece = await asyncio.to_thread(file.read, _PIECE_BYTES)
        except OSError as error:
            raise InvalidSpec(f"the data to write can't be read: {error}") from error
        if not isinstance(piece, bytes):
            raise InvalidSpec("open the file to write from in binary mode")
        if not piece:
            return
        yield piece


def _revive(endpoint: Endpoint, sandbox_id: str, user: str | None) -> AsyncFiles:
    return AsyncFiles(shared_transport(endpoint), sandbox_id, user)
