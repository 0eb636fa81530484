"""Files out of one sandbox into another, by way of the client."""

import posixpath
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from barchan.errors import InvalidSpec, TaskError
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.put import put_files, staged
from barchan.sdk.recipe import Put, Take

NAMES_BYTES_MAX = 128 << 10  # of one tar command
TIMEOUT_S = 1800.0
TAIL_BYTES = 400
_SPOOL_BYTES = 4 << 20
_PIECE_BYTES = 1 << 20
_PATTERN = "*?["


async def take_files(source: AsyncSandbox, target: AsyncSandbox, take: Take) -> None:
    """Do it. Both sandboxes' roots have to be capable; a folder needs a `tar` in both.

    Raises:
        InvalidSpec: There is no such file, or several of them have no folder to go to.
        TaskError: tar failed.
    """
    paths = await _matching(source, take.source)
    into = take.path.endswith("/")
    if len(paths) > 1 and not into:
        raise InvalidSpec(f"{take.source}: {len(paths)} files need a folder to go to: let the target end with a slash")
    for path in paths:
        info, real = await source.files.as_user("root")._followed(path)
        if info.kind == "directory":
            await _folder(source, real, target, take)
        elif info.kind == "file":
            where = posixpath.join(take.path, posixpath.basename(path)) if into else take.path
            with TemporaryDirectory() as folder:
                local = Path(folder, posixpath.basename(path))
                await source.files.as_user("root").download(real, local)
                mode = info.mode if take.mode is None else take.mode
                put = Put(path=where, source=str(local), mode=mode, user=take.user)
                await put_files(target, put, root_is_capable=True)
        else:
            raise InvalidSpec(f"{path} is a {info.kind}, neither file nor folder")


async def _matching(source: AsyncSandbox, pattern: str) -> list[str]:
    plain = pattern.rstrip("/") or "/"
    folder, name = posixpath.split(plain)
    if any(char in folder for char in _PATTERN):
        raise InvalidSpec(f"{pattern}: only the last part of a path may be a pattern")
    if not any(char in name for char in _PATTERN):
        return [plain]
    entries = await source.files.as_user("root").list(folder)
    names = sorted(posixpath.basename(entry.path) for entry in entries)
    found = [posixpath.join(folder, entry) for entry in names if fnmatchcase(entry, name)]
    if not found:
        raise InvalidSpec(f"{pattern}: there is no such file")
    return found


async def _folder(source: AsyncSandbox, path: str, target: AsyncSandbox, take: Take) -> None:
    """The content of a folder. The folder itself is not of it: the target keeps its own mode, `/` above all."""
    names = sorted(posixpath.basename(entry.path) for entry in await source.files.as_user("root").list(path))
    async with staged(target, take.user, posixpath.normpath(take.path)) as where:
        await target.files.as_user("root").mkdir(where)
        for batch in _batches(names):
            await _tar(source, path, batch, target, where)
            if take.mode is not None:
                changed = (posixpath.join(where, name) for name in batch)
                argv = ["chmod", "-R", f"{take.mode:o}", "--", *changed]
                (await target.exec(argv, user="root", timeout_s=TIMEOUT_S)).check()


def _batches(names: list[str]) -> list[list[str]]:
    batches: list[list[str]] = []
    size = NAMES_BYTES_MAX
    for name in names:
        size += len(name) * 4
        if size >= NAMES_BYTES_MAX:
            batches.append([])
            size = 0
        batches[-1].append(name)
    return batches


async def _tar(source: AsyncSandbox, path: str, names: list[str], target: AsyncSandbox, where: str) -> None:
    """What one tar writes goes to the other as it comes, so that nobody holds it whole."""
    argv = ["tar", "-C", path, "-cf", "-", "--", *(f"./{name}" for name in names)]
    writer = await source.start(
        argv,
        user="root",
        cwd="/",
        stdin_open=False,
        overflow="block",
        spool_bytes=_SPOOL_BYTES,
        timeout_s=TIMEOUT_S,
    )
    reader = await target.start(["tar", "-C", where, "-xopf", "-"], user="root", cwd="/", timeout_s=TIMEOUT_S)
    said, waiting = b"", bytearray()

    async def pass_on(data: bytes, *, eof: bool = False) -> None:
        """A reader that is done, or has failed, takes no more; its exit code says which."""
        with suppress(InvalidSpec):
            await reader.write_stdin(data, eof=eof)

    async for stream, _, data in writer.output():
        if stream == "stderr":
            said = (said + data)[-TAIL_BYTES:]
            continue
        waiting += data
        if len(waiting) >= _PIECE_BYTES:
            await pass_on(bytes(waiting))
            waiting.clear()
    await pass_on(bytes(waiting), eof=True)
    read, written = await writer.wait(None), await reader.wait(None)
    async for _, _, data in reader.output(follow=False):
        said = (said + data)[-TAIL_BYTES:]
    if code := read.exit_code or written.exit_code:
        text = said.decode("utf-8", "replace").strip()
        raise TaskError(f"{path}: tar ended with exit code {code}: {text}")
