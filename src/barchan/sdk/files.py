"""The synchronous face of a sandbox's files."""

import os
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, Self

from barchan.model.sandbox import FileChange, FileInfo
from barchan.sdk.aio.files import TRANSFER_TIMEOUT_S, TREE_BYTES_MAX, WATCH_TIMEOUT_S, AsyncFiles, AsyncWatch
from barchan.sdk.background import run


class Files:
    """Paths are the sandbox's; relative ones start at its working directory."""

    def __init__(self, twin: AsyncFiles) -> None:
        self._twin = twin

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._twin,)

    def as_user(self, user: str | None) -> Self:
        """The same files seen as another user of the sandbox; None is the sandbox's default user."""
        return type(self)(self._twin.as_user(user))

    def read(
        self, path: str, offset: int = 0, length: int | None = None, *, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> bytes:
        """The bytes of a regular file, or of `length` from `offset` on.

        Raises:
            QuotaExceeded: They are more than 256 MiB and no `length` says that so many are wanted; see `download`.
        """
        return run(self._twin.read(path, offset, length, timeout_s=timeout_s))

    def read_text(self, path: str, *, errors: str = "strict", timeout_s: float = TRANSFER_TIMEOUT_S) -> str:
        """A file as UTF-8 text; `errors` as in `bytes.decode`."""
        return run(self._twin.read_text(path, errors=errors, timeout_s=timeout_s))

    def write(
        self,
        path: str,
        data: bytes | str | IO[bytes],
        *,
        mode: int = 0o644,
        parents: bool = True,
        timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        """Replace a file in one step: readers see the old content or the whole new one. Text is written in UTF-8."""
        run(self._twin.write(path, data, mode=mode, parents=parents, timeout_s=timeout_s))

    def list(self, path: str = ".") -> list[FileInfo]:
        """The entries of a directory."""
        return run(self._twin.list(path))

    def stat(self, path: str) -> FileInfo:
        """One entry; symbolic links are not followed."""
        return run(self._twin.stat(path))

    def exists(self, path: str) -> bool:
        return run(self._twin.exists(path))

    def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = True) -> None:
        run(self._twin.mkdir(path, mode=mode, parents=parents))

    def move(self, source: str, target: str) -> None:
        run(self._twin.move(source, target))

    def remove(self, path: str, *, recursive: bool = False) -> None:
        run(self._twin.remove(path, recursive=recursive))

    def read_tar(self, path: str, *, max_bytes: int, timeout_s: float = TRANSFER_TIMEOUT_S) -> bytes:
        """What a directory holds, as one tar as the sandbox sends it: not to be trusted.

        Raises:
            QuotaExceeded: It is more than `max_bytes`.
        """
        return run(self._twin.read_tar(path, max_bytes=max_bytes, timeout_s=timeout_s))

    def write_tar(self, path: str, data: bytes, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        """Unpack a tar below a directory; the sandbox refuses entries that would not stay there, and special files."""
        run(self._twin.write_tar(path, data, timeout_s=timeout_s))

    def upload(self, local: str | os.PathLike[str], remote: str, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        """Copy a local file to `remote`, or the content of a local directory below `remote`."""
        run(self._twin.upload(local, remote, timeout_s=timeout_s))

    def download(
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
        run(self._twin.download(remote, local, max_bytes=max_bytes, timeout_s=timeout_s))

    def watch(self, path: str, *, recursive: bool = True, quiet_timeout_s: float | None = WATCH_TIMEOUT_S) -> "Watch":
        """Changes below a directory, from the return of this call on: iterate over them, and close at the end."""
        return Watch(run(self._twin.watch(path, recursive=recursive, quiet_timeout_s=quiet_timeout_s)))


class Watch:
    """Iterates over `FileChange`; after a lost connection comes an `overflow`, since some may have been missed.

    `ReadTimeout` when nothing changed for `quiet_timeout_s`.
    """

    def __init__(self, twin: AsyncWatch) -> None:
        self._twin = twin

    def __iter__(self) -> Iterator[FileChange]:
        return self

    def __next__(self) -> FileChange:
        change = run(self._twin.next())
        if change is None:
            raise StopIteration
        return change

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching."""
        run(self._twin.aclose())
