"""A repository at a commit as a layer: its files, and a history of one commit that knows nothing of others.

The commit is always the same for the same tree: author and committer `barchan <barchan@localhost>`, time 1700000000,
message `The repository as it is`. Files that git-lfs keeps elsewhere stay the pointers that they are in the repository.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryFile
from threading import Event
from time import monotonic
from typing import NamedTuple

from barchan.errors import BackendError, BarchanError, Denied, InvalidSpec, NotFound, TransportError
from barchan.image.intake import Stopped
from barchan.image.pack import Limits
from barchan.image.tools import Progress, in_namespaces, require

NAME, EMAIL, DATE, MESSAGE = "barchan", "barchan@localhost", "1700000000 +0000", "The repository as it is"
WORKDIR = "/workspace"
LISTED_MAX = 5
LOOK_S = 0.2  # how often it is asked whether a command's end is still wanted
GIT_S_MAX = 3600.0  # of one command
MESSAGE_BYTES_MAX = 400
UMASK = 0o022
# What git says, in the language that it is told to speak.
# A short name, or a server that gives nothing but what it lists.
UNASKED = r"find remote ref [0-9a-f]{4,64}\s*$|not our ref|unadvertised object|not support shallow"
TOO_MUCH = r"out of memory|cannot allocate memory|file too large|died of signal 25"
MISSING = (
    r"find remote ref|does not appear to be a git repository|repository .*not found|not a git repository|does not exist"
)
UNWANTED = r"transport '.*' not allowed|unable to find remote helper|bad/illegal format"
REFUSED = r"authentication failed|could not read (username|password)|permission denied|error: 40[13]"
UNREACHED = (
    r"could ?n[o']t (resolve|connect|read from remote)|failed to connect|timed out|too slow|took too long"
    r"|connection (refused|reset|closed)|unable to (access|connect|look up)|rpc failed|early eof|hung up|disconnect"
)
OURS = re.compile(r"HEAD|config|index|refs/heads/main|objects/pack/pack-[0-9a-f]+\.(?:pack|idx)")
# Programs, hooks and transports that a repository could bring are off; a server that sends nothing is given up.
SETTINGS = """
[safe]
	directory = *
[protocol]
	allow = never
[protocol "file"]
	allow = always
[protocol "git"]
	allow = always
[protocol "http"]
	allow = always
[protocol "https"]
	allow = always
[protocol "ssh"]
	allow = always
[core]
	hooksPath = /dev/null
	fsmonitor = false
	logAllRefUpdates = false
	attributesFile = /dev/null
[gc]
	auto = 0
[maintenance]
	auto = false
[pack]
	threads = 1
	writeReverseIndex = false
[http]
	lowSpeedLimit = 1000
	lowSpeedTime = 60
[advice]
	detachedHead = false
"""


class GitSource(NamedTuple):
    """A repository, a commit of it, and where in the image its files go."""

    repository: str
    commit: str
    workdir: str = WORKDIR

    @classmethod
    def parse(cls, text: str) -> "GitSource":
        """`PATH_OR_URL@COMMIT[:/WORKDIR]`."""
        found = re.fullmatch(r"(?P<repository>.+)@(?P<commit>[0-9A-Za-z][\w./-]*)(?::(?P<workdir>/.*))?", text)
        if found is None or found["repository"].startswith("-") or ".." in found["commit"]:
            raise InvalidSpec(f"{_without_password(text)!r} is not PATH_OR_URL@COMMIT or PATH_OR_URL@COMMIT:/WORKDIR")
        workdir = PurePosixPath(found["workdir"] or WORKDIR)
        if ".." in workdir.parts or len(workdir.parts) < 2:
            raise InvalidSpec(f"{workdir} is no folder below / for a repository to be in")
        return cls(found["repository"], found["commit"], os.path.normpath(workdir))

    @property
    def shown(self) -> str:
        """The source without the user and password that an address may have."""
        return f"git:{_without_password(self.repository)}@{self.commit}"


def make_tree(
    source: GitSource, workspace: Path, progress: Progress, stop: Event, *, limits: Limits, owner: int = 0
) -> tuple[Path, str]:
    """Make the tree of the layer in a workspace; returns its path, and the full name of the commit.

    Args:
        stop: Once it is set, `Stopped` is raised.
        owner: User and group of the files and folders, the workdir included; the folders above are root's.

    Raises:
        NotFound: There is no such repository or commit.
        InvalidSpec: It has submodules, which are named, or needs more than the limits allow.
        Denied: Its server wants (other) credentials.
        TransportError: Its server can't be reached, or fails.
        BackendError: Git can't make a repository of it.
    """
    try:
        return _make_tree(_Git(workspace, limits, stop), source, workspace, progress, limits, owner)
    except _GitError as error:
        if re.search(TOO_MUCH, str(error), re.IGNORECASE):
            raise InvalidSpec(
                f"{source.shown} needs more than {limits.git_bytes_max} bytes of memory, or files of more than "
                f"{limits.bytes_max} bytes: {error}"
            ) from None
        raise BackendError(f"git can't make a repository of {source.shown}: {error}") from None


def _make_tree(
    git: "_Git", source: GitSource, workspace: Path, progress: Progress, limits: Limits, owner: int
) -> tuple[Path, str]:
    progress("fetching the repository")
    mirror = workspace / "mirror"
    commit = _fetch(git, source, mirror)
    _check_entries(git, mirror, commit, source, limits)
    progress("checking the files out")
    tree = workspace / "tree"
    made = tree / source.workdir.lstrip("/")
    _make_folders(tree, made.parent)
    _make_repository(git, mirror, commit, made)
    _check_alone(git, made)
    pointers = _pointers(git, made)
    if pointers:
        progress(f"{len(pointers)} files are kept by git-lfs and stay pointers: {_some(pointers)}")
    if owner:
        for top, _, names in os.walk(made):
            for path in (top, *(os.path.join(top, name) for name in names)):
                os.chown(path, owner, owner, follow_symlinks=False)
    return tree, commit


class _GitError(Exception):
    """What git said."""


class _Git:
    """The git program, with settings of its own and none of this machine's.

    It dies with this process, and what it started with it; the latter is promised to root only.
    """

    def __init__(self, workspace: Path, limits: Limits, stop: Event) -> None:
        self._stop = stop
        program = require("git", "git", needed_for="reading a repository")
        bounded = ["prlimit", f"--fsize={limits.bytes_max}", f"--data={limits.git_bytes_max}", program]
        alone = in_namespaces(bounded) if os.geteuid() == 0 else bounded
        self._argv = ["setpriv", "--pdeathsig", "KILL", *map(str, alone)]
        settings = workspace / "gitconfig"
        settings.write_text(SETTINGS)
        self._environment = {
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": str(settings),
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
        }
        for who in ("AUTHOR", "COMMITTER"):
            for what, value in (("NAME", NAME), ("EMAIL", EMAIL), ("DATE", DATE)):
                self._environment[f"GIT_{who}_{what}"] = value

    def __call__(self, folder: Path | None, *arguments: str, stdin: bytes = b"", timeout_s: float = GIT_S_MAX) -> bytes:
        """What it writes. Raises `_GitError` where it fails or takes too long."""
        at = ["-C", str(folder)] if folder is not None else []
        deadline = monotonic() + timeout_s
        with ExitStack() as exits:
            given = exits.enter_context(TemporaryFile())  # which, unlike a pipe, can't be left half written
            given.write(stdin)
            given.seek(0)
            process = exits.enter_context(
                subprocess.Popen(
                    [*self._argv, *at, *arguments],
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd="/",
                    env=self._environment,
                    umask=UMASK,
                    start_new_session=True,
                )
            )
            try:
                out, said = self._output(process, deadline)
            except BaseException:
                _kill(process)
                raise
        if process.returncode:
            raise _GitError(_without_password(said.decode("utf-8", "replace").strip())[-MESSAGE_BYTES_MAX:])
        return out

    def _output(self, process: "subprocess.Popen[bytes]", deadline: float) -> tuple[bytes, bytes]:
        while True:
            try:
                return process.communicate(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                if self._stop.is_set():
                    raise Stopped from None
                if monotonic() > deadline:
                    raise _GitError("it took too long") from None

    def word(self, folder: Path, *arguments: str) -> str:
        return self(folder, *arguments).decode().strip()

    def records(self, folder: Path, *arguments: str) -> Iterator[bytes]:
        """What it writes, one by one up to each zero byte, as it comes: whoever has seen enough need not read all."""
        with subprocess.Popen(
            [*self._argv, "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=self._environment,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            try:
                rest = b""
                while data := os.read(process.stdout.fileno(), 64 << 10):
                    *whole, rest = (rest + data).split(b"\0")
                    yield from whole
                if process.wait():
                    raise _GitError(f"{arguments[0]} failed with exit code {process.returncode}")
            finally:
                _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a command and all that it started, which has the session that it leads."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _fetch(git: _Git, source: GitSource, mirror: Path) -> str:
    """Bring a commit into a repository of our own; returns its full name."""
    git(None, "init", "--quiet", "--bare", "--template=", str(mirror))
    local = Path(source.repository)
    address = str(local.absolute()) if local.exists() else source.repository
    fetch = ("fetch", "--quiet", "--no-tags", "--no-recurse-submodules")
    wanted = "FETCH_HEAD"
    try:
        try:
            git(mirror, *fetch, "--depth=1", "--", address, source.commit)
        except _GitError as error:
            if not re.search(UNASKED, str(error), re.IGNORECASE):
                raise
            git(mirror, *fetch, "--", address, "+refs/*:refs/all/*")
            wanted = source.commit
    except _GitError as error:
        raise _fetch_error(source, error, is_local=local.exists()) from None
    try:
        return git.word(mirror, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}")
    except _GitError:
        raise NotFound(
            f"{source.shown} can't be had: the repository has no such commit (try: another)", source=source.shown
        ) from None


def _fetch_error(source: GitSource, error: "_GitError", *, is_local: bool) -> BarchanError | _GitError:
    """What it means that a repository was not brought."""
    said = re.sub(rf"(?<![\w./-]){re.escape(source.repository)}(?![\w-])", "the repository", str(error))
    message = f"{source.shown} can't be had: {said}"

    def is_said(pattern: str) -> bool:
        return re.search(pattern, said, re.IGNORECASE) is not None

    if is_said(TOO_MUCH):
        return error
    if is_said(UNWANTED):
        return InvalidSpec(message)
    if is_said(MISSING):
        what = "commit, branch or tag" if "remote ref" in said else "repository"
        return NotFound(f"{message} (try: another {what})", source=source.shown)
    if is_said(REFUSED):
        return Denied(message)
    if is_said(UNREACHED) and not is_local:
        return TransportError(f"{message} (try: again later)")
    return BackendError(message)


def _check_entries(git: _Git, mirror: Path, commit: str, source: GitSource, limits: Limits) -> None:
    """Refuse what can't become a layer before a file is written: few objects can say that there are a billion files."""
    size = 0
    submodules = []
    for count, record in enumerate(git.records(mirror, "ls-tree", "-r", "-z", "--long", commit), 1):
        head, _, path = record.partition(b"\t")
        mode, _, _, length = head.split()
        size += int(length) if length != b"-" else 0
        if count > limits.entries_max or size > limits.bytes_max:
            raise InvalidSpec(
                f"{source.shown} has more than {limits.entries_max} files or {limits.bytes_max} bytes", path=_text(path)
            )
        if mode == b"160000":
            submodules.append(_text(path))
    if submodules:
        raise InvalidSpec(
            f"{source.shown} has submodules, which are not fetched: {_some(submodules)} (try: dir: with a checkout)"
        )


def _make_folders(tree: Path, folder: Path) -> None:
    """Make the folders above the workdir; their modes become the layer's, whatever this process's umask is."""
    for path in (*reversed([p for p in folder.parents if p.is_relative_to(tree)]), folder):
        path.mkdir()
        path.chmod(0o755)


def _make_repository(git: _Git, mirror: Path, commit: str, made: Path) -> None:
    """A repository whose only commit has the tree of another one's, with its files checked out."""
    git(None, "init", "--quiet", "--template=", "--initial-branch=main", str(made))
    alternates = made / ".git/objects/info/alternates"
    alternates.parent.mkdir(exist_ok=True)
    alternates.write_text(f"{mirror}/objects\n")
    root = git.word(made, "commit-tree", "-m", MESSAGE, f"{commit}^{{tree}}")
    git(made, "update-ref", "refs/heads/main", root)
    git(made, "reset", "--quiet", "--hard")
    names = git(made, "rev-list", "--objects", "HEAD")
    # Nothing is taken over from the packs of the source: equal trees give equal bytes.
    pack = ("pack-objects", "--quiet", "--no-reuse-delta", "--no-reuse-object", str(made / ".git/objects/pack/pack"))
    git(made, *pack, stdin=names)
    git(made, "prune-packed", "--quiet")
    alternates.unlink()
    alternates.parent.rmdir()
    (made / ".git/ORIG_HEAD").unlink(missing_ok=True)
    (made / ".git/index").unlink()
    git(made, "read-tree", "HEAD")  # an index that holds no times and inode numbers of this machine


def _check_alone(git: _Git, made: Path) -> None:
    """Walk the objects: what is in the store is what the one commit needs, and nothing else is in the repository."""
    walked = set(git(made, "rev-list", "--objects", "--no-object-names", "--all").split())
    listed = git(made, "cat-file", "--batch-all-objects", "--batch-check=%(objectname) %(objecttype)").splitlines()
    kinds = dict(line.split() for line in listed)
    history = sorted(kind for kind in kinds.values() if kind not in (b"tree", b"blob"))
    repository = made / ".git"
    files = (path.relative_to(repository).as_posix() for path in repository.rglob("*") if not path.is_dir())
    others = [name for name in files if not OURS.fullmatch(name)]
    if walked != set(kinds) or history != [b"commit"] or others:
        raise BackendError(
            f"the repository that was made holds more than its commit: {len(set(kinds) - walked)} objects nobody "
            f"reaches, {len(history)} commits and tags, {_some(others) or 'no other file'}"
        )


def _pointers(git: _Git, made: Path) -> list[str]:
    """Files that git-lfs would bring from elsewhere."""
    names = git(made, "ls-files", "-z")
    found = git(made, "check-attr", "-z", "--stdin", "filter", stdin=names).split(b"\0")
    return [_text(path) for path, value in zip(found[::3], found[2::3], strict=False) if value == b"lfs"]


def _without_password(text: str) -> str:
    """Without the user and password that addresses may have."""
    return re.sub(r"://[^/\s]*@", "://", text)


def _text(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
    return ", ".join(names[:LISTED_MAX]) + more
