"""All that differs in a git work tree from a commit, as a patch, although the repository may be set against it.

Nothing of the repository's own configuration is read: git works with a repository of its own, made for this one patch,
that only borrows the other's objects. So no hook, filter, monitor, diff driver or alias of the agent's runs, and the
agent's index may be as broken as it likes. What is ignored is decided by the `.gitignore` files and `.git/info/exclude`
as they are now, as `git add` would.
"""

from barchan.model.sandbox import ExecResult
from barchan.rollout.ports import Sandbox
from barchan.rollout.task import PatchArtifact

DIFF_TIMEOUT_S = 300.0

# What can't be added (a file that may not be read, say) is left out and said on stderr.
SCRIPT = r"""
set -u
cd -- "$1" || exit 3
work=$(pwd -P) && mine=$(mktemp -d) || exit 3
trap 'rm -rf "$mine"' EXIT
base=$2
case $base in
*[!0-9a-f]*) base=$(git rev-parse --verify --quiet --end-of-options "$base^{commit}") || exit 4 ;;
esac
if [ -d .git ]; then
    theirs=$work/.git
else
    theirs=$(git rev-parse --path-format=absolute --git-common-dir) || exit 4
fi
git init --quiet --bare --template= "$mine/git" || exit 3
export GIT_DIR="$mine/git" GIT_INDEX_FILE="$mine/index" GIT_WORK_TREE="$work"
export GIT_ALTERNATE_OBJECT_DIRECTORIES="$theirs/objects"
git config core.bare false
git config core.excludesFile "$theirs/info/exclude"
git read-tree "$base" || exit 4
git add --all --ignore-errors . || echo "not everything could be added" >&2
git diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames "$base" --
"""

ENV = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_PAGER": "cat",
    "LC_ALL": "C",
}


async def diff(sandbox: Sandbox, spec: PatchArtifact) -> ExecResult:
    """Run by the agent's own user, whose files these are."""
    return await sandbox.exec(
        ["sh", "-c", SCRIPT, "patch", spec.repo, spec.base],
        env=ENV,
        timeout_s=DIFF_TIMEOUT_S,
        max_output_bytes=spec.bytes_max,
    )
