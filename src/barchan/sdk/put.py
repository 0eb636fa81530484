"""Files of this machine into a sandbox, with the owner and the modes that were asked for."""

import asyncio
import hashlib
import os
import posixpath
import secrets
import shutil
import stat
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from msgspec.structs import replace

from barchan.errors import BarchanError, Denied, InvalidSpec, NotFound, TaskError
from barchan.sdk.aio.files import AsyncFiles
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.pack import check_link
from barchan.sdk.recipe import Put

_PIECE_BYTES = 1 << 20
_GIVE_TIMEOUT_S = 600.0
_KNOWN_MAX = 10_000


def put_digest(put: Put) -> str:
    """sha256 of what would be put: names, kinds, modes, bytes; times and owners on this machine don't count.

    Raises:
        InvalidSpec: The source is missing, can't be read, or holds what does not travel.
    """
    digest = hashlib.sha256()
    if (put.source is None) == (put.data is None):
        raise InvalidSpec(f"what goes to {put.path}: give exactly one of source and data")
    if put.source is None:
        digest.update(put.data or b"")
        return digest.hexdigest()
    try:
        for line in _described(Path(put.source), put.without):
            digest.update(line)
    except OSError as error:
        raise _unreadable(Path(put.source), error) from error
    return digest.hexdigest()


class PutDigests:
    """The same of many, remembered for as long as the sources look as they did: a run asks for the same repository at
    each of its rollouts.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Put, tuple[bytes, str]] = OrderedDict()

    def of(self, put: Put) -> str:
        """As `put_digest`. Blocking."""
        if put.source is None:
            return put_digest(put)
        look = _look(Path(put.source), put.without)  # before it is read
        known = self._known.get(put)
        if known is None or known[0] != look:
            known = self._known[put] = look, put_digest(put)
        self._known.move_to_end(put)
        while len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return known[1]


def _look(source: Path, without: tuple[str, ...]) -> bytes:
    """How a source looks without being read: any change of it changes a time, a size or an inode.

    Raises:
        InvalidSpec: It is missing, or can't be looked through.
    """
    digest = hashlib.sha256()
    try:
        for relative, _, found in _entries(source, without):
            marks = (found.st_mode, found.st_size, found.st_ino, found.st_dev, found.st_mtime_ns, found.st_ctime_ns)
            digest.update(b"%b\0%b\0" % (os.fsencode(relative), repr(marks).encode()))
    except OSError as error:
        raise _unreadable(source, error) from error
    return digest.digest()


def _unreadable(source: Path, error: OSError) -> InvalidSpec:
    return InvalidSpec(f"can't read {error.filename or source}: {error.strerror or error}")


def _entries(source: Path, without: tuple[str, ...]) -> Iterator[tuple[str, str, os.stat_result]]:
    """A file, followed if it is a link; or what is in a folder, in an order of its own: relative path, path, kind."""
    if not source.is_dir():
        yield ".", str(source), source.stat()
        return
    left = {os.path.join(source, name) for name in without}
    start = len(os.path.join(source, ""))
    for top, folders, names in os.walk(source, onerror=_raise):
        if left:
            folders[:] = [name for name in folders if os.path.join(top, name) not in left]
        folders.sort()
        for name in sorted([*folders, *names]):
            path = os.path.join(top, name)
            if path not in left:
                yield path[start:], path, os.lstat(path)


def _raise(error: OSError) -> None:
    raise error


def _described(source: Path, without: tuple[str, ...]) -> Iterator[bytes]:
    for relative, path, found in _entries(source, without):
        yield _entry(os.fsencode(relative), found)
        if stat.S_ISLNK(found.st_mode):
            target = os.readlink(path)
            check_link(Path(path), relative, target)
            yield os.fsencode(target) + b"\0"
        elif stat.S_ISREG(found.st_mode):
            yield _content(path)
        elif not stat.S_ISDIR(found.st_mode):
            raise InvalidSpec(f"{path} is neither file, directory nor link")


def _entry(name: bytes, found: os.stat_result) -> bytes:
    return b"%b\0%o\0" % (name, found.st_mode)


def _content(path: str) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.digest()


class _Local(NamedTuple):
    """What is sent: the bytes of `path`, a file or a folder's content, or without it those given."""

    path: Path | None
    is_folder: bool
    mode: int
    data: bytes = b""


async def put_files(
    sandbox: AsyncSandbox, put: Put, *, root_is_capable: bool = False, digest: str | None = None
) -> None:
    """Do it. A file that goes to where a folder is goes into that folder.

    A capable root writes it and gives it to its owner. In other sandboxes nobody can give files away, not even root:
    so they are written by the owner, and where the owner may not write, written elsewhere and moved there by root.

    Args:
        digest: What `put_digest` said before: nothing else is sent.

    Raises:
        InvalidSpec: The source can't be read, or holds what does not travel.
        TaskError: The source has another digest by now.
        Denied: Neither the owner nor root may write there.
        GuestError: It can't be given to the owner, which a capable root does by the sandbox's own programs.
    """
    with TemporaryDirectory() as folder:
        local = await asyncio.to_thread(_local, put, Path(folder, "copy"), digest)
        path = put.path
        if local.path is not None and not local.is_folder and await _is_folder(sandbox, path):
            path = posixpath.join(path, local.path.name)
        if root_is_capable:
            async with staged(sandbox, put.user, path, is_folder=local.is_folder) as where:
                await _write(sandbox.files.as_user("root"), local, where)
            return
        try:
            await _write(sandbox.files.as_user(put.user), local, path)
        except Denied:
            if put.user == "root":
                raise
            await _write_elsewhere(sandbox, put.user, local, path)


@asynccontextmanager
async def staged(sandbox: AsyncSandbox, user: str, path: str, *, is_folder: bool = True) -> AsyncIterator[str]:
    """Where a capable root is to write what a user is to own at a path; on leaving it is there.

    A file there gives way; a folder there is filled, and keeps its own mode and owner. Folders above it that are not
    there yet are the user's, too.

    Raises:
        GuestError: Giving it away failed.
    """
    if user in ("root", "0", "root:root", "0:0"):
        yield path
        return
    root = sandbox.files.as_user("root")
    folder = f"/tmp/put-{secrets.token_hex(6)}"
    where = f"{folder}/it"
    await root.mkdir(folder, mode=0o700)
    try:
        yield where
        # As file operations see it: a name alone has its own group, a number alone the group of that number.
        owner = user if ":" in user else f"{user}:{user if user.isdigit() else ''}"
        await _as_root(sandbox, "chown", "-R", "-h", owner, where)
        if not is_folder or not await root.exists(path):
            if missing := await _missing_above(root, path):
                await root.mkdir(missing[0])
                await _as_root(sandbox, "chown", "-h", owner, *missing)
            await root.move(where, path)
        elif names := [posixpath.basename(entry.path) for entry in await root.list(where)]:
            await _as_root(sandbox, "cp", "-a", "--", *(f"{where}/{name}" for name in names), f"{path}/")
    finally:
        await asyncio.shield(_remove(root, folder))


async def _missing_above(root: AsyncFiles, path: str) -> list[str]:
    """The folders above a path that are not there, the deepest first."""
    missing = []
    while (path := posixpath.dirname(path)) not in ("", "/") and not await root.exists(path):
        missing.append(path)
    return missing


async def _as_root(sandbox: AsyncSandbox, *argv: str) -> None:
    (await sandbox.exec(argv, user="root", cwd="/", timeout_s=_GIVE_TIMEOUT_S)).check()


def _local(put: Put, copy: Path, digest: str | None) -> _Local:
    """Where the source is. What is checked, and a folder that is not sent as it is, is copied first."""
    if put.source is None:
        return _Local(None, False, 0o644 if put.mode is None else put.mode, put.data or b"")
    source = Path(put.source)
    try:
        is_folder = source.is_dir()
        if is_folder and (digest is not None or put.mode is not None or put.without):
            left = {str(source / name) for name in put.without}

            def ignored(top: str, names: list[str]) -> list[str]:
                return [name for name in names if os.path.join(top, name) in left]

            shutil.copytree(source, copy, symlinks=True, ignore=ignored)
            source = copy
        elif digest is not None:
            copy.mkdir()
            source = Path(shutil.copy2(source, copy))
        if digest not in (None, put_digest(replace(put, source=str(source), without=()))):
            raise TaskError(f"{put.source} was changed while it was being sent (try: again, once nothing writes there)")
        if is_folder and put.mode is not None:
            for top, folders, names in os.walk(copy, topdown=False):  # a mode may close a folder to who walks it
                for name in (*folders, *names):
                    if not os.path.islink(entry := os.path.join(top, name)):
                        os.chmod(entry, put.mode)
        mode = stat.S_IMODE(source.stat().st_mode) if put.mode is None else put.mode
    except (OSError, shutil.Error) as error:
        raise InvalidSpec(f"can't read {put.source}: {error}") from error
    return _Local(source, is_folder, 0o755 if is_folder else mode)


async def _is_folder(sandbox: AsyncSandbox, path: str) -> bool:
    if path.endswith("/"):
        return True
    try:
        return (await sandbox.files.as_user("root").stat(path)).kind == "directory"
    except NotFound:
        return False


async def _write(files: AsyncFiles, local: _Local, path: str) -> None:
    if local.path is None:
        await files.write(path, local.data, mode=local.mode)
    elif local.is_folder:
        await files.mkdir(path)
        await files.upload(local.path, path)
    else:
        with open(local.path, "rb") as file:  # noqa: ASYNC230 (a local file; its reads are in threads)
            await files.write(path, file, mode=local.mode)


async def _write_elsewhere(sandbox: AsyncSandbox, user: str, local: _Local, path: str) -> None:
    """Write below a folder that the owner lends to everybody, and let root move it."""
    root, owner = sandbox.files.as_user("root"), sandbox.files.as_user(user)
    lent = f"/tmp/put-{secrets.token_hex(6)}"
    written = f"{lent}/it"
    await owner.mkdir(lent, mode=0o777)
    try:
        await _write(owner, local, written)
        if not await root.exists(path) or not local.is_folder:
            await root.mkdir(posixpath.dirname(path))
            moved = [(written, path, local.mode if local.is_folder else None)]
        else:
            await _chmod(sandbox, user, 0o777, written)
            moved = [
                (
                    posixpath.join(written, name),
                    posixpath.join(path, name),
                    entry.mode if entry.kind == "directory" else None,
                )
                for entry in await owner.list(written)
                if (name := posixpath.basename(entry.path))
            ]
        for source, target, folder_mode in moved:
            if folder_mode is not None:  # moving a folder writes in it
                await _chmod(sandbox, user, 0o777, source)
            await root.move(source, target)
            if folder_mode is not None:
                await _chmod(sandbox, user, folder_mode, target)
    finally:
        await asyncio.shield(_remove(owner, lent))


async def _chmod(sandbox: AsyncSandbox, user: str, mode: int, path: str) -> None:
    (await sandbox.exec(["chmod", f"{mode:o}", path], user=user)).check()


async def _remove(owner: AsyncFiles, path: str) -> None:
    try:
        await owner.remove(path, recursive=True)
    except BarchanError:
        return  # the sandbox is gone, or what failed before says why
