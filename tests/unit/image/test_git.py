"""Repositories as layers: the files of a commit, one commit, and nothing of any other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from barchan.errors import Denied, InvalidSpec, NotFound, TransportError
from barchan.image import git, sources
from barchan.image.git import GitSource, make_tree
from barchan.image.intake import Stopped
from barchan.image.pack import Limits
from barchan.image.store import ImageStore

WHO = {"NAME": "someone", "EMAIL": "someone@example.org", "DATE": "1600000000 +0000"}
ENVIRONMENT = {
    "PATH": os.defpath,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    **{f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in WHO.items()},
}


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", folder, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit(folder: Path, message: str) -> str:
    run(folder, "add", "-A")
    run(folder, "commit", "-q", "-m", message)
    return run(folder, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, list[str]]:
    """Three commits, of which the last has what nobody may see; a tag, a stash, a hook and a loose object."""
    folder = tmp_path / "repository"
    folder.mkdir()
    run(folder, "init", "-q", "-b", "main")
    (folder / "a").write_text("first\n")
    commits = [commit(folder, "one")]
    (folder / "a").write_text("second\n")
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    (folder / "d").mkdir()
    (folder / "d/link").symlink_to("../a")
    (folder / ".gitattributes").write_text("*.bin filter=lfs diff=lfs merge=lfs -text\n")
    (folder / "x.bin").write_text("version 1\noid sha256:0\nsize 1\n")
    commits.append(commit(folder, "two"))
    (folder / "solution").write_text("the answer\n")
    commits.append(commit(folder, "three"))
    run(folder, "tag", "-a", "v3", "-m", "tagged")
    run(folder, "remote", "add", "origin", "https://example.org/x.git")
    (folder / "a").write_text("stashed\n")
    run(folder, "stash", "-q")
    hook = folder / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    return folder, commits


Make = Callable[..., tuple[Path, list[str]]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    count = iter(range(100))

    def make(source: str, limits: Limits | None = None, owner: int = 0) -> tuple[Path, list[str]]:
        """The tree, and what was said while it was made."""
        workspace = tmp_path / f"workspace{next(count)}"
        workspace.mkdir()
        said: list[str] = []
        tree, _ = make_tree(
            GitSource.parse(source), workspace, said.append, Event(), limits=limits or Limits(), owner=owner
        )
        return tree, said

    return make


def all_objects(folder: Path) -> set[str]:
    return set(run(folder, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split())


def test_one_commit_and_nothing_else(make: Make, repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Files, modes and links of the commit; a walk over all objects meets its tree only; nothing leads elsewhere."""
    folder, commits = repository
    tree, said = make(f"{folder}@{commits[1]}")
    made = tree / "workspace"
    assert sorted(path.name for path in made.iterdir()) == [".git", ".gitattributes", "a", "d", "run", "x.bin"]
    assert ((made / "a").read_text(), (made / "d/link").readlink()) == ("second\n", Path("../a"))
    assert (made / "run").stat().st_mode & 0o777 == 0o755
    assert run(made, "status", "--porcelain") == ""
    assert run(made, "log", "--format=%an %ae %at %cn %ct %s %P", "--all") == (
        "barchan barchan@localhost 1700000000 barchan 1700000000 The repository as it is"
    )
    assert all_objects(made) == set(run(made, "rev-list", "--objects", "--no-object-names", "HEAD").split())
    assert all_objects(made).isdisjoint(commits)
    assert run(folder, "rev-parse", "HEAD:solution") not in all_objects(made)
    assert run(made, "rev-parse", "HEAD^{tree}") == run(folder, "rev-parse", f"{commits[1]}^{{tree}}")
    names = {path.relative_to(made / ".git").parts[0] for path in (made / ".git").rglob("*") if path.is_file()}
    assert names == {"HEAD", "config", "index", "objects", "refs"}
    assert run(made, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert run(made, "remote") == run(made, "reflog") == ""
    assert b"example.org" not in b"".join(path.read_bytes() for path in (made / ".git").rglob("*") if path.is_file())
    run(made, "fsck", "--strict", "--unreachable")
    assert any("x.bin" in line and "git-lfs" in line for line in said)
    assert not (tmp_path / "hooked").exists()


def test_equal_trees_are_equal_layers(make: Make, repository: tuple[Path, list[str]]) -> None:
    """By full or short name, branch or tag, from a packed or unpacked repository: byte for byte the same."""
    folder, commits = repository

    def content(tree: Path) -> dict[str, bytes]:
        return {str(p.relative_to(tree)): p.read_bytes() for p in tree.rglob("*") if p.is_file()}

    first = content(make(f"{folder}@{commits[2]}")[0])
    run(folder, "repack", "-q", "-a", "-d", "--depth=1", "--window=20")
    for name in (commits[2][:12], "main", "v3"):
        assert content(make(f"{folder}@{name}")[0]) == first
    assert content(make(f"file://{folder}@{commits[2]}")[0]) == first


@pytest.mark.requires("root")
async def test_a_repository_becomes_an_image(repository: tuple[Path, list[str]], tmp_path: Path) -> None:
    """One layer, named by repository and commit; the same digest each time; the folder belongs to whom was said."""
    folder, commits = repository
    store = ImageStore(tmp_path / "images")

    async def pull(source: str, **wishes: int) -> str:
        made = await sources.pull(
            store, source, kind="erofs", progress=lambda said: None, wishes=sources.Wishes(**wishes)
        )
        assert (made.name, made.user, len(made.layers)) == (f"repository@{commits[0][:12]}", "root", 1)
        return made.digest

    digest = await pull(f"git:{folder}@{commits[0]}")
    assert await pull(f"git:{folder}@{commits[0][:8]}") == digest
    assert store.resolve(digest).workdir == "/workspace"
    assert await pull(f"git:{folder}@{commits[0]}", owner=1000) != digest
    assert await pull(f"git:{folder}@{commits[0]}:/srv/code") != digest
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.requires("root")
def test_files_belong_to_whom_was_said(make: Make, repository: tuple[Path, list[str]]) -> None:
    """The work folder and all in it; folders above it stay root's."""
    folder, commits = repository
    tree, _ = make(f"{folder}@{commits[1]}:/home/agent/code", owner=1000)
    owners = {str(path.relative_to(tree)): path.lstat().st_uid for path in tree.rglob("*")}
    assert [owners[name] for name in ("home", "home/agent")] == [0, 0]
    assert {owner for name, owner in owners.items() if name.startswith("home/agent/code")} == {1000}


def test_what_is_not_there_is_said(
    make: Make, repository: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such commit, no such repository, and transports that run programs."""
    folder, _ = repository
    for source in (f"{folder}@{'0' * 40}", f"{folder}@nope", f"{tmp_path}/none@main"):
        with pytest.raises(NotFound, match="can't be had"):
            make(source)
    (tmp_path / "e").symlink_to(folder)  # a name that is part of every word
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound, match=r"remote ref nope \(try: another commit, branch or tag\)"):
        make("e@nope")
    with pytest.raises(InvalidSpec, match="not allowed"):
        make(f"ext::sh -c 'touch {tmp_path}/ran'@main")
    assert not (tmp_path / "ran").exists()


def test_a_command_is_ended_when_nobody_waits(tmp_path: Path) -> None:
    """Input that takes its time is given whole; once it is told to stop, git is gone before the call returns."""
    stop = Event()
    run_git = git._Git(tmp_path, Limits(), stop)
    waits = ("-c", "alias.wait=!sleep 0.5; cat", "wait")
    assert run_git(None, *waits, stdin=b"x" * 100_000) == b"x" * 100_000
    stop.set()
    os.mkfifo(tmp_path / "nobody_writes")
    with pytest.raises(Stopped):
        run_git(None, "hash-object", "--no-filters", str(tmp_path / "nobody_writes"))


class Failing(BaseHTTPRequestHandler):
    """Answers everything with one status, and counts."""

    status = 500
    seen = 0

    def do_GET(self) -> None:
        type(self).seen += 1
        self.send_error(self.status)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def failing() -> Iterator[tuple[str, type[Failing]]]:
    """The address of a server, and what it does."""
    handler = type("Handler", (Failing,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    serving = Thread(target=server.serve_forever)
    serving.start()
    yield f"127.0.0.1:{server.server_port}", handler
    server.shutdown()
    serving.join()
    server.server_close()


@pytest.mark.parametrize(("status", "error"), [(500, TransportError), (404, NotFound), (403, Denied)])
def test_a_server_that_fails_is_asked_once(
    make: Make, failing: tuple[str, type[Failing]], status: int, error: type[Exception]
) -> None:
    """Its failure is no word about the commit."""
    host, handler = failing
    handler.status = status
    with pytest.raises(error, match=f"git:http://{host}/x.git@main can't be had"):
        make(f"http://someone:secret@{host}/x.git@main")
    assert handler.seen == 1


def test_a_server_that_is_not_there_may_come_back(make: Make) -> None:
    """The error says to try again."""
    with pytest.raises(TransportError, match="try: again later"):
        make("http://127.0.0.1:1/x.git@main")


def test_nobody_is_told_the_password(make: Make) -> None:
    """Even where an address is none because of it."""
    with pytest.raises(InvalidSpec, match=r"git:http://127\.0\.0\.1:1/x\.git@main can't be had") as failure:
        make("http://someone:sec@ret@127.0.0.1:1/x.git@main")
    assert "ret@" not in str(failure.value)


def test_memory_is_bounded(make: Make, repository: tuple[Path, list[str]]) -> None:
    """A few kilobytes can unpack to more than there is."""
    folder, _ = repository
    (folder / "zeros").write_bytes(bytes(96 << 20))
    made = commit(folder, "large")
    with pytest.raises(InvalidSpec, match=f"needs more than {48 << 20} bytes of memory"):
        make(f"{folder}@{made}", Limits(git_bytes_max=48 << 20))


def sleepers(seconds: str) -> list[int]:
    """Processes that sleep for so long."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it ended meanwhile
    return found


def wait_for(seconds: str, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(sleepers(seconds)) != count:
        assert time.monotonic() < deadline, sleepers(seconds)
        time.sleep(0.02)


def test_what_git_started_ends_with_it(tmp_path: Path) -> None:
    """Its helpers do the downloading."""
    seconds, stop = f"9{os.getpid()}.1", Event()
    run_git = git._Git(tmp_path, Limits(), stop)
    failed: list[BaseException] = []

    def fetch() -> None:
        try:
            run_git(None, "-c", f"alias.wait=!sleep {seconds}; true", "wait")
        except Stopped as error:
            failed.append(error)

    running = Thread(target=fetch)
    running.start()
    wait_for(seconds, 1)
    stop.set()
    running.join()
    wait_for(seconds, 0)
    assert len(failed) == 1


@pytest.mark.requires("root")
def test_what_git_started_ends_with_a_killed_process(tmp_path: Path) -> None:
    """Nobody is left to end it then."""
    seconds = f"9{os.getpid()}.2"
    code = (
        "import pathlib, threading\n"
        "from barchan.image import git, pack\n"
        f"run = git._Git(pathlib.Path({str(tmp_path)!r}), pack.Limits(), threading.Event())\n"
        f"run(None, '-c', 'alias.wait=!sleep {seconds}; true', 'wait')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            wait_for(seconds, 1)
        finally:
            process.send_signal(signal.SIGKILL)
    wait_for(seconds, 0)


def test_submodules_are_named(make: Make, repository: tuple[Path, list[str]]) -> None:
    """A tree that lacks what it names is no image."""
    folder, commits = repository
    run(folder, "update-index", "--add", "--cacheinfo", f"160000,{commits[0]},lib/sub")
    run(folder, "commit", "-q", "-m", "with a submodule")
    with pytest.raises(InvalidSpec, match="submodules, which are not fetched: lib/sub"):
        make(f"{folder}@main")


def test_few_objects_that_say_many_files_are_refused(make: Make, tmp_path: Path) -> None:
    """A hundred objects can name more files than a disk holds: they are counted before one is written."""
    folder = tmp_path / "bomb"
    run(tmp_path, "init", "-q", "-b", "main", str(folder))
    blob = subprocess.run(
        ["git", "-C", folder, "hash-object", "-w", "--stdin"], input=b"x", capture_output=True, check=True
    )
    line = f"100644 blob {blob.stdout.decode().strip()}"
    for _ in range(8):
        entries = "".join(f"{line}\tf{number}\n" for number in range(10))
        made = subprocess.run(
            ["git", "-C", folder, "mktree"], input=entries.encode(), capture_output=True, check=True
        ).stdout.decode()
        line = f"040000 tree {made.strip()}"
    root = run(folder, "commit-tree", "-m", "bomb", line.split()[2])
    run(folder, "update-ref", "refs/heads/main", root)
    with pytest.raises(InvalidSpec, match="more than 1000 files"):
        make(f"{folder}@main", Limits(entries_max=1000))


def test_a_replaced_commit_is_not_believed(make: Make, repository: tuple[Path, list[str]]) -> None:
    """A repository that shows one commit for another gives the one that was named."""
    folder, commits = repository
    run(folder, "replace", commits[0], commits[2])
    tree, _ = make(f"{folder}@{commits[0]}")
    assert (tree / "workspace/a").read_text() == "first\n"
    assert not (tree / "workspace/solution").exists()


def test_a_repository_that_is_not_alone_is_noticed(make: Make, repository: tuple[Path, list[str]]) -> None:
    """The walk is a check of its own: one object more, and it says so."""
    folder, commits = repository
    tree, _ = make(f"{folder}@{commits[0]}")
    made = tree / "workspace"
    checker = git._Git(tree.parent, Limits(), Event())
    git._check_alone(checker, made)
    subprocess.run(["git", "-C", made, "hash-object", "-w", "--stdin"], input=b"later", check=True, capture_output=True)
    with pytest.raises(Exception, match="1 objects nobody reaches"):
        git._check_alone(checker, made)
