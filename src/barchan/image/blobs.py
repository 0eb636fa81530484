"""Blobs by key in a directory, a shared file system, or an object store.

What has its key is whole: a directory gets it by a rename after it is on disk, object stores do it themselves.
Credentials come from the environment of the process, as `obstore` reads it; they are never part of a URL here, so that
URLs can be shown and kept.
"""

import asyncio
import errno
import functools
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from barchan.errors import (
    BackendError,
    BarchanError,
    BlobCorrupt,
    CapacityError,
    ConnectionLost,
    ConnectTimeout,
    Denied,
    InvalidSpec,
    NotFound,
    ReadTimeout,
    RequirementMissing,
)
from barchan.image.disk import sync_directory

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

SCHEMES = ("file", "s3", "gs", "az", "http", "https")
CONNECT_TIMEOUT_S = 5.0
OPERATION_TIMEOUT_S = 60.0  # one request with its repetitions
RETRIES = 3
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 2.0
REQUESTS_AT_ONCE = 32  # of one store in one process; more wait
PART_BYTES = 8 << 20
PARTS_AT_ONCE = 4
KEYS_MAX = 100_000
_COPY_BYTES = 1 << 20
_PIECE_BYTES = 256 << 10
_NO_ROOM_MS = 60_000
_CREDENTIALS = "(try: its credentials in the environment, as AWS_ACCESS_KEY_ID; nodes take theirs at their start)"

T = TypeVar("T")


class BlobStore:
    """One store; safe to use from several event loops, one after the other.

    Attributes:
        url: Where it is, without credentials; what `open` takes.
        is_read_only: Nothing can be put.
    """

    def __init__(self, url: str, root: Path | None, store: "ObjectStore | None", timeout_s: float) -> None:
        self.url = url
        self.is_read_only = url.startswith("http")
        self._root = root
        self._opened = store
        self._timeout_s = timeout_s
        # Threads of its own: a store that hangs must not take those that other work of the process waits for.
        self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, "barchan-store")

    @classmethod
    def open(cls, url: str, *, timeout_s: float = OPERATION_TIMEOUT_S, retries: int = RETRIES) -> "BlobStore":
        """A store by its URL; nothing is asked of it yet.

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, `https://host/path` (read
                only), `file:///path` or a path.
            timeout_s: What one operation may take, with its repetitions.

        Raises:
            InvalidSpec: No such URL, or one with a user, password or query.
            RequirementMissing: The library for stores is not installed.
        """
        path = _local_path(url)
        if path is not None:
            _obstore()
            return cls(path.as_uri(), path, None, timeout_s)
        obstore = _obstore()
        client: ClientConfig = {
            "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s)),
            "timeout": timedelta(seconds=timeout_s),
        }
        # An object store's endpoint is what the environment says; these options replace its word that HTTP is meant.
        client["allow_http"] = not url.startswith("https:")
        retry: RetryConfig = {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=timeout_s),
            "backoff": {
                "init_backoff": timedelta(seconds=BACKOFF_FIRST_S),
                "max_backoff": timedelta(seconds=BACKOFF_MAX_S),
                "base": 2,
            },
        }
        url = url.rstrip("/")
        try:
            store = obstore.store.from_url(url, client_options=client, retry_config=retry)
        except Exception as error:  # of many types, by kind of store
            raise InvalidSpec(f"no store can be opened at {url}: {_first_line(error)}") from None
        return cls(url, None, store, timeout_s)

    async def make(self) -> None:
        """Make the directory of a store in one; other stores are there already. Raises as `put`."""
        self._check_writable()
        if self._root is not None:
            await self._ask("", functools.partial(self._root.mkdir, parents=True, exist_ok=True))

    async def get(self, key: str, bytes_max: int) -> bytes:
        """A whole blob.

        Raises:
            NotFound: There is none.
            BlobCorrupt: It is larger than `bytes_max`.
            Denied, TransportError: The store refuses, is slow or dead.
        """

        def whole() -> bytes:
            result = self._store().get(key)
            size = result.meta["size"]
            data = _collected(result, bytes_max) if size <= bytes_max else None
            if data is None:
                raise BlobCorrupt(f"{key} in {self.url} has {size} bytes, and no such blob more than {bytes_max}")
            return data

        return await self._ask(key, whole)

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes `start` up to `end` of a blob, all of them. Raises as `get`; `BlobCorrupt`: the blob ends before."""

        def ranged() -> bytes:
            data = _collected(self._store().get(key, options={"range": (start, end)}), end - start)
            if data is None:
                raise BlobCorrupt(f"{key} in {self.url}: the store gives more than the {end - start} bytes asked for")
            if len(data) < end - start:
                raise BlobCorrupt(f"{key} in {self.url} ends at {start + len(data)}, before byte {end}")
            return data

        return await self._ask(key, ranged)

    async def size(self, key: str) -> int | None:
        """Bytes of a blob; None: there is none."""

        def head() -> int:
            return self._store().head(key)["size"]

        try:
            return await self._ask(key, head)
        except NotFound:
            return None

    async def exists(self, key: str) -> bool:
        return await self.size(key) is not None

    async def keys(self, prefix: str) -> list[str]:
        """Every key below `prefix`, sorted; stores over HTTP can't tell.

        Raises:
            BackendError: There are more than `KEYS_MAX`.
        """

        def listed() -> list[str]:
            if self._root is not None and not self._root.exists():
                return []
            found: list[str] = []
            for batch in self._store().list(prefix):
                found += [meta["path"] for meta in batch]
                if len(found) > KEYS_MAX:
                    raise BackendError(f"{prefix} in {self.url} has more than {KEYS_MAX} blobs")
            return sorted(found)

        return await self._ask(prefix, listed)

    async def put(self, key: str, data: bytes) -> None:
        """Store a small blob; an older one of that key gives way.

        Raises:
            NotFound: Its bucket or container does not exist.
            Denied, CapacityError, TransportError: The store refuses, is full, slow or dead.
        """
        self._check_writable()

        def sent() -> None:
            if self._root is not None:
                _put_local(self._root / key, [data])
            else:
                self._store().put(key, data, use_multipart=False)

        try:
            await self._ask(key, sent)
        except NotFound as error:
            raise NotFound(f"{self.url}: there is no such bucket or container (try: make it)", blob=key) from error

    async def put_new(self, key: str, data: bytes) -> bool:
        """Store a small blob unless there is one of that key: of all who try, in any process, exactly one succeeds.

        Returns:
            Whether it was stored. False may also be said after a request that was repeated, of its own success.

        Raises:
            As `put`.
        """
        self._check_writable()

        def sent() -> bool:
            if self._root is not None:
                return _put_local(self._root / key, [data], is_new=True)
            from obstore.exceptions import AlreadyExistsError

            try:
                self._store().put(key, data, use_multipart=False, mode="create")
            except AlreadyExistsError:
                return False
            return True

        return await self._ask(key, sent)

    async def delete(self, key: str) -> None:
        """Remove a blob, if there is one. Raises as `put`."""
        self._check_writable()

        def removed() -> None:
            if self._root is not None:
                (self._root / key).unlink()
            else:
                self._store().delete(key)

        try:
            await self._ask(key, removed)
        except NotFound:
            pass

    async def put_file(self, key: str, path: Path, progress: Callable[[int], None] = lambda done: None) -> None:
        """Store a file's content, in parts where it is big; the time is bounded by part.

        Args:
            progress: Called with the bytes that were read so far, from another thread.

        Raises:
            As `put`.
        """
        self._check_writable()

        def sent() -> None:
            pieces = _pieces(path, progress)
            if self._root is not None:
                _put_local(self._root / key, pieces)
            elif os.stat(path).st_size <= PART_BYTES:
                self._store().put(key, b"".join(pieces), use_multipart=False)
            else:
                self._store().put(key, pieces, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

        await self._ask(key, sent, bounded=False)

    def _check_writable(self) -> None:
        if self.is_read_only:
            raise InvalidSpec(f"{self.url} can only be read (try: the address under which it is written, s3://...)")

    def _store(self) -> "ObjectStore":
        if self._opened is None:  # a directory can be opened only while it is there
            self._opened = _obstore().store.LocalStore(self._root)
        return self._opened

    async def _ask(self, key: str, operation: Callable[[], T], *, bounded: bool = True) -> T:
        """Do it in a thread; the one place where a store's errors become ours. Given up, it ends by its own time-out.

        The library's coroutines are not used: its threads let go of Python's objects a moment after their answer, and
        a process that ends just then is aborted.
        """

        def translated() -> T:
            try:
                return operation()
            except BarchanError:
                raise
            except OSError as error:
                raise self._local_error(key, error) from None
            except Exception as error:
                if not type(error).__module__.startswith("obstore") and not isinstance(error, ValueError):
                    raise
                # Not chained: what the library says may hold the signed address of the request.
                raise self._remote_error(key, error) from None

        try:
            # A margin, so that the library's own time-out, which knows more, comes first.
            async with asyncio.timeout(self._timeout_s + CONNECT_TIMEOUT_S if bounded else None):
                return await asyncio.get_running_loop().run_in_executor(self._threads, translated)
        except TimeoutError:
            raise ReadTimeout(f"{key} in {self.url}: no answer in {self._timeout_s:g} s") from None

    def _local_error(self, key: str, error: OSError) -> BarchanError:
        if self._root is not None and not self._root.exists():
            return ConnectionLost(f"the store {self.url} is not there (try: mount it, or make the directory)")
        if isinstance(error, FileNotFoundError):
            return NotFound(f"no {key} in {self.url}", blob=key)
        if isinstance(error, PermissionError):
            return Denied(f"{key} in {self.url}: {error.strerror}")
        if isinstance(full := no_room(error, f"{key} in {self.url}"), BarchanError):
            return full
        return ConnectionLost(f"{key} in {self.url}: {error.strerror or type(error).__name__}")

    def _remote_error(self, key: str, error: Exception) -> BarchanError:
        where, text = f"{key} in {self.url}", str(error)
        if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
            return Denied(f"{where}: the store refuses us {_CREDENTIALS}")
        if self._root is not None and not self._root.exists():
            return ConnectionLost(f"the store {self.url} is not there (try: mount it, or make the directory)")
        if "StartTooLarge" in text or re.search(r"\b416\b", text):
            return BlobCorrupt(f"{where} is shorter than its index says")
        if type(error).__name__ == "NotSupportedError" or "NotSupported" in text:
            return BackendError(f"{where}: the store can't do this (a store over HTTP must answer ranges)")
        if type(error).__name__ == "InvalidPathError" or isinstance(error, ValueError):
            return InvalidSpec(f"{where} is no key")
        if "kind: Connect" in text:
            timed_out = "TimedOut" in text or "timed out" in text
            kind = ConnectTimeout if timed_out else ConnectionLost
            return kind(f"{where}: no connection{' in time' if timed_out else ''}")
        if "kind: Timeout" in text or "TimedOut" in text or "timed out" in text:
            return ReadTimeout(f"{where}: no whole answer in {self._timeout_s:g} s")
        if status := re.search(r"\b([45]\d\d)\b [A-Z]", text):
            if status[1] in ("401", "403"):
                return Denied(f"{where}: the store answers {status[1]} {_CREDENTIALS}")
            return ConnectionLost(f"{where}: the store answers {status[1]}")
        named = re.search(r"\bkind: (\w+)", text)
        return ConnectionLost(f"{where}: the request failed ({named[1] if named else type(error).__name__})")


def no_room(error: OSError, what: str) -> BarchanError | OSError:
    """A full disk as the error it is to a caller; other errors as they are."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"no room for {what}: {error.strerror}", retry_after_ms=_NO_ROOM_MS)
    return error


def _obstore() -> ModuleType:
    try:
        import obstore.store
    except ImportError as error:
        raise RequirementMissing("blob stores need obstore: pip install 'barchan[images]'") from error
    return obstore


def _collected(result: "GetResult", bytes_max: int) -> bytes | None:
    """What a store sends; None if it is more than that, of which no more is taken."""
    data = bytearray()
    for piece in result.stream(min_chunk_size=_PIECE_BYTES):
        data += piece
        if len(data) > bytes_max:
            return None
    return bytes(data)


def _local_path(url: str) -> Path | None:
    scheme, separator, _ = url.partition("://")
    if not separator:
        if not url or "\0" in url:
            raise InvalidSpec("the store's address is empty (try: a directory, or s3://bucket/prefix)")
        return Path(os.path.abspath(url))
    parts = urlsplit(url)
    if scheme not in SCHEMES:
        raise InvalidSpec(f"no store is of the kind {scheme}:// (there are: {', '.join(SCHEMES)}, and paths)")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise InvalidSpec(
            f"a store's address holds no user, password or query: {scheme}://{parts.hostname or ''}... "
            "(try: credentials in the environment)"
        )
    if scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise InvalidSpec(f"{url} is not on this machine (try: file:///PATH)")
    return Path(os.path.abspath(unquote(parts.path)))


def _put_local(target: Path, content: Iterable[bytes], *, is_new: bool = False) -> bool:
    """Write beside, sync, rename (link, if it must be new). What a killed writer leaves is in no listing.

    Returns:
        False: it must be new, and is there already.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}#{secrets.randbelow(1 << 62)}")
    try:
        with beside.open("xb") as out:
            for piece in content:
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        if is_new:
            os.link(beside, target)
            beside.unlink()
        else:
            beside.rename(target)
    except FileExistsError:
        beside.unlink(missing_ok=True)
        if not is_new:
            raise
        return False
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)
    return True


def _pieces(path: Path, progress: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    with path.open("rb") as file:
        while piece := file.read(_COPY_BYTES):
            yield piece
            done += len(piece)
            progress(done)


def _first_line(error: Exception) -> str:
    return re.sub(r"\?\S*", "?...", str(error).partition("\n")[0])[:200]
