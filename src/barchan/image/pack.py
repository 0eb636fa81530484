"""Layers as EROFS files, made by our own packer: the same input gives the same file, byte for byte.

Everything here blocks, and is called in threads. A packer dies with the thread that started it.
"""

import errno
import hashlib
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from barchan.errors import BackendError, CapacityError, Conflict, InvalidSpec, RequirementMissing
from barchan.image.erofs import IDENTITY_AT, IDENTITY_BYTES
from barchan.image.store import NewLayer
from barchan.image.template import Layer, LayerKind
from barchan.image.unpack import unpack

PACKER = Path(__file__).parents[1] / "_guest" / "barchan-pack"
# Every file of a layer that is made from a tree of this host bears this time (2000-01-01): a digest must not depend on
# when a tree was unpacked, and zip files can't say anything before 1980.
MTIME_UNIX_S = 946_684_800
RETRY_AFTER_MS = 1000
REASON_CHARS_MAX = 1500
_PIECE_BYTES = 1 << 20
_INPUT, _ROOM = 3, 4  # exit codes of the packer: the input can't be a layer; the disk is full
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


class Limits(Struct, frozen=True, kw_only=True):
    """What one layer may cost; its packer needs about 200 bytes of memory for each entry of an archive, and its text.

    Attributes:
        entries_max: Names in it, with the directories that an archive leaves out.
        bytes_max: Of an archive, unpacked from its compression, and of the layer's file.
        depth_max: Directories in directories; more than 2048 can't be asked for.
        xattr_bytes_max: Of all its extended attributes together.
        text_bytes_max: Of an archive's names, without those of the directories that they are in, and of what its
            symbolic links say.
        git_bytes_max: Memory of each git process that reads a repository.
    """

    entries_max: int = 4_000_000
    bytes_max: int = 256 << 30
    depth_max: int = 2048
    xattr_bytes_max: int = 256 << 20
    text_bytes_max: int = 128 << 20
    git_bytes_max: int = 4 << 30


DEFAULT_LIMITS = Limits()


def pack_tree(tree: Path, target: Path, *, mtime_unix_s: int | None = None, limits: Limits = DEFAULT_LIMITS) -> str:
    """Pack a directory as the file `target`, which must not be there yet; nothing is left of it after an error.

    Owners and modes are kept, and the words of an overlay's layer to those below: whiteouts, `opaque` and `redirect`.

    Args:
        mtime_unix_s: The time of every file, in seconds; extended attributes then stay behind. None keeps both.

    Returns:
        The sha256 of the file, in hex.

    Raises:
        InvalidSpec: It holds something that a layer can't, or too much; the message names the entry.
        CapacityError: The target's disk is full, or the host lacks memory or open files.
        RequirementMissing: The packer was not built.
    """
    options = [] if mtime_unix_s is None else ["--mtime", str(mtime_unix_s)]
    return _pack([*options, *_limits(limits), "--", tree], target, limits, f"{tree} can't be a layer", None)


def pack_tar(source: BinaryIO, target: Path, *, limits: Limits = DEFAULT_LIMITS) -> str:
    """Pack an OCI layer's archive, read from `source` to its end, as the file `target`; otherwise as `pack_tree`.

    `.wh.NAME` and `.wh..wh..opq` become what an overlay understands. No path is touched on the way: an archive with
    names that lead out, entries below links, devices or links to what is not there is refused. Whatever `source` raises
    ends the packer and goes on to the caller.

    Returns:
        The sha256 of the file, in hex.

    Raises:
        InvalidSpec: The archive is damaged, hostile or too large; the message names the entry.
        CapacityError: The target's disk is full, or the host lacks memory or open files.
        RequirementMissing: The packer was not built.
    """
    return _pack([*_limits(limits), "--tar", "--"], target, limits, "the archive can't be a layer", source)


def make_layer(tree: Path, workspace: Path, kind: LayerKind, limits: Limits = DEFAULT_LIMITS) -> NewLayer:
    """Pack a tree of this host as a layer in `workspace`; owners and modes are kept, times and attributes are not.

    Whatever `kind`, the digest is that of the EROFS file, so that it names the same content on every machine.

    Raises:
        InvalidSpec, CapacityError, RequirementMissing: As `pack_tree`.
    """
    packed = workspace / "layer.erofs"
    digest = pack_tree(tree, packed, mtime_unix_s=MTIME_UNIX_S, limits=limits)
    return keep_as(packed, digest, workspace, kind)


def keep_as(packed: Path, digest: str, workspace: Path, kind: LayerKind) -> NewLayer:
    """A packed layer in the form in which the store shall keep it; `dir` unpacks it into `workspace` and removes it."""
    if kind != "dir":
        return NewLayer(Layer(digest, "erofs"), packed)
    unpacked = workspace / f"{digest}.dir"
    unpack(packed, unpacked)
    packed.unlink()
    return NewLayer(Layer(digest, "dir"), unpacked)


def make_distinct(packed: Path, digests: Collection[str]) -> str:
    """Give a packed layer another identity, as often as it takes, until its digest is none of `digests`.

    An overlay refuses the same file system twice. Content that comes again over other layers can't be left out below
    either: what the overlay notes of renamed directories means something else at each place.

    Returns:
        Its sha256, in hex; the same for the same content and the same digests.
    """
    with packed.open("r+b") as file:
        while (digest := hashlib.file_digest(file, "sha256").hexdigest()) in digests:
            file.seek(IDENTITY_AT)
            identity = hashlib.sha256(file.read(IDENTITY_BYTES)).digest()[:IDENTITY_BYTES]
            file.seek(IDENTITY_AT)
            file.write(identity)
            file.seek(0)
    return digest


def _limits(limits: Limits) -> list[str]:
    return [
        f"--entries-max={limits.entries_max}",
        f"--depth-max={limits.depth_max}",
        f"--xattr-bytes-max={limits.xattr_bytes_max}",
        f"--text-bytes-max={limits.text_bytes_max}",
    ]


def _pack(arguments: list[str | Path], target: Path, limits: Limits, refused: str, source: BinaryIO | None) -> str:
    if target.exists():
        raise Conflict(f"{target} is there already, and a layer is never written over another file")
    if not PACKER.exists():
        raise RequirementMissing(
            f"packing a layer needs {PACKER.name}, which was not built (try: make setup, or install barchan again)",
            tool=PACKER.name,
        )
    try:
        argv = [PACKER, *arguments, target, str(limits.bytes_max)]
        with _start(argv, subprocess.DEVNULL if source is None else subprocess.PIPE) as process:
            try:
                if source is not None:
                    _feed(process, source)
                assert process.stderr is not None
                said = process.stderr.read()
            except BaseException:
                process.kill()
                raise
        _check(process.returncode, said.decode("utf-8", "replace").strip()[:REASON_CHARS_MAX], refused)
        with target.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _start(argv: list[str | Path], stdin: int) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(argv, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0)
    except OSError as error:
        if error.errno in _SCARCE:
            raise CapacityError(f"no room for a packer: {error.strerror}", retry_after_ms=RETRY_AFTER_MS) from error
        raise BackendError(f"the packer can't be started: {error}") from error


def _feed(process: "subprocess.Popen[bytes]", source: BinaryIO) -> None:
    """Give it all that `source` has; a packer that ends before has said why."""
    assert process.stdin is not None
    while data := source.read(_PIECE_BYTES):
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[process.stdin.write(rest) :]
        except BrokenPipeError:
            break
    process.stdin.close()


def _check(exit_code: int, reason: str, refused: str) -> None:
    if exit_code == _INPUT:
        raise InvalidSpec(f"{refused}: {reason}")
    if exit_code == _ROOM:
        raise CapacityError(f"no room for the layer: {reason}", retry_after_ms=RETRY_AFTER_MS)
    if exit_code != 0:
        raise BackendError(f"packing the layer failed with exit code {exit_code}: {reason}", exit_code=exit_code)
