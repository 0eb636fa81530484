"""Git on the client, for rows that name a repository and a commit: what a sandbox gets, and whether a patch fits it."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from barchan.errors import RequirementMissing

# The only commit that an agent finds. All of it is fixed, so that equal trees make the same commit everywhere.
NAME, EMAIL, DATE, MESSAGE = "barchan", "barchan@localhost", "1700000000 +0000", "The repository as it is"
_AUTHORS = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", NAME), ("EMAIL", EMAIL), ("DATE", DATE))
}
_NO_CONFIG = {"PATH": os.defpath, "LANG": "C.UTF-8", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
UMASK = 0o022


class GitError(Exception):
    """What git said."""


def commit_of(mirror: Path, name: str) -> str | None:
    """The full name of a commit, or None where the repository does not have it."""
    try:
        return _git(mirror, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}").strip()
    except GitError:
        return None


def head(workspace: Path) -> str:
    return _git(workspace, "rev-parse", "HEAD").strip()


def make_workspace(mirror: Path, commit: str, workspace: Path) -> None:
    """Write a repository whose only commit has the tree of `commit`, with its files checked out and without an index.

    It appears whole or not at all, also when several processes make the same one.

    Raises:
        GitError: The mirror lacks objects of the tree.
    """
    workspace.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=workspace.parent) as scratch:
        made = Path(scratch, "repository")
        _git(None, "init", "--quiet", "--template=", "--initial-branch=main", str(made))
        objects = made / ".git/objects/info/alternates"
        objects.parent.mkdir(exist_ok=True)
        objects.write_text(f"{Path(mirror.absolute(), _git(mirror, 'rev-parse', '--git-path', 'objects').strip())}\n")
        root = _git(made, "commit-tree", "-m", MESSAGE, f"{commit}^{{tree}}").strip()
        _git(made, "-c", "core.logAllRefUpdates=false", "update-ref", "refs/heads/main", root)
        _git(made, "-c", "core.logAllRefUpdates=false", "reset", "--quiet", "--hard")
        # By name: repacking would take all of a partial clone along. One thread, since several may pack otherwise.
        names = _git(made, "rev-list", "--objects", "--no-object-names", "HEAD")
        pack = str(made / ".git/objects/pack/pack")
        _git(made, "-c", "pack.writeReverseIndex=false", "pack-objects", "--quiet", "--threads=1", pack, stdin=names)
        _git(made, "prune-packed", "--quiet")
        objects.unlink()
        objects.parent.rmdir()
        for name in ("index", "ORIG_HEAD"):
            (made / ".git" / name).unlink(missing_ok=True)
        try:
            made.rename(workspace)
        except OSError:
            if not workspace.is_dir():
                raise


def patch_complaint(patch: str, workspace: Path | None) -> str:
    """Why a patch can't be used: it does not parse, or does not fit the workspace, where there is one; else nothing."""
    if not patch.strip():
        return "is empty"
    try:
        _git(None, "apply", "--numstat", "-", stdin=patch)
    except GitError as error:
        return f"is no patch: {error}"
    if workspace is not None:
        try:
            _git(workspace, "apply", "--check", "-", stdin=patch)
        except GitError as error:
            return f"does not fit base_commit: {error}"
    return ""


def _git(folder: Path | None, *arguments: str, stdin: str = "") -> str:
    program = shutil.which("git")
    if program is None:
        raise RequirementMissing("there is no git (Debian package git)")
    at = ("-C", str(folder)) if folder is not None else ()
    done = subprocess.run(
        [program, "-c", "safe.directory=*", *at, *arguments],
        input=stdin.encode("utf-8", "surrogateescape"),
        capture_output=True,
        cwd="/",
        env={**_NO_CONFIG, **_AUTHORS},
        umask=UMASK,
        check=False,
    )
    if done.returncode:
        raise GitError(done.stderr.decode("utf-8", "replace").strip().removeprefix("error: ")[-400:])
    return done.stdout.decode("utf-8", "surrogateescape")
