"""`swe:ROWS.jsonl`: a repository at a commit, an issue, and the tests that say whether a patch resolves it.

The agent's repository holds one commit, made from the row's base commit, and nothing of what came after it: no remote,
tag, reflog or unreachable object. What leaves is the patch against that commit; the row's own tests are put over it in
a fresh environment.
"""

import shlex
from pathlib import Path, PurePosixPath

from barchan.rollout.calls import call_to
from barchan.rollout.task import Environment, PatchArtifact, Task, TestsGrader
from barchan.rollout.tasksets import swe_git
from barchan.rollout.tasksets.swe_rows import SweEnvironment, SweRow, read_rows
from barchan.sdk.recipe import Put, Recipe, Run

WORK_ON_IT = (
    "The repository {repo} lies in {workdir}. Change its code so that the following issue is resolved. Tests that are "
    "not in the repository will be run on your work. When it is done, call submit.\n\n{problem_statement}"
)
GOLD_PATCH = "/tmp/gold.patch"
IMAGE_BASE = "refs/barchan/base"

# Nobody in a sandbox can give files away: the user makes the folder where everybody may, and root moves it.
LEND = "mkdir -m 777 /tmp/lent /tmp/lent/repository"
PLACE = "mkdir -p {parent} && mv -T /tmp/lent/repository {workdir}"
# The index is made here, since it holds inode numbers; not by a reset, which would leave a reflog.
MAKE_INDEX = "git read-tree HEAD && git update-index -q --refresh"
PREPARE = f"chmod 755 . && rmdir /tmp/lent && {MAKE_INDEX}"
# What the installs left in the work tree is no part of a patch.
FINISH = (
    "mkdir -p .git/info && git ls-files --others --exclude-standard --directory | sed 's|^|/|' >> .git/info/exclude"
)
# An image's own repository: the tree of the base commit as the only commit of a repository made anew.
REROOT = """set -e
git reset --quiet --hard {base_commit}
export GIT_AUTHOR_DATE='{date}' GIT_COMMITTER_DATE='{date}'
root=$(git -c user.name={name} -c user.email={email} commit-tree -m {message} 'HEAD^{{tree}}')
git update-ref refs/barchan/root "$root"
new=$(mktemp -d)
git -c core.logAllRefUpdates=false init --quiet --template= "$new"
git -C "$new" fetch --quiet --no-tags "$PWD" refs/barchan/root:{ref}
git -C "$new" -c core.logAllRefUpdates=false update-ref "$(git -C "$new" symbolic-ref HEAD)" {ref}
rm -rf .git "$new/.git/FETCH_HEAD"
mv "$new/.git" .git
rmdir "$new"
{make_index}
"""


def load_swe(path: Path, *, repos: Path | None) -> list[Task]:
    """The tasks of a file of rows, each of them checked.

    Args:
        path: JSON lines; docs/rollouts.md has their fields.
        repos: Folder with a git repository `OWNER__NAME.git` for each of the rows' repositories. What the sandboxes get
            is made from them, in a folder `workspaces` beside them, where it stays for the next time.

    Raises:
        TaskError: A row can't be used; file, line and field are named.
        RequirementMissing: There is no git.
    """
    return [_task(row, repos, path.parent) for row in read_rows(path)]


def _task(row: SweRow, repos: Path | None, folder: Path) -> Task:
    workspace = _workspace(row, repos)
    for field, patch in (("patch", row.patch), ("test_patch", row.test_patch)):
        if complaint := swe_git.patch_complaint(patch, workspace):
            raise row.error(field, complaint)
    if row.environment is None:
        recipe, base = _on_image(row), IMAGE_BASE
    else:
        assert workspace is not None
        recipe, base = _from_mirror(row, row.environment, workspace, folder), swe_git.head(workspace)
    asked = row.environment or SweEnvironment()
    return Task(
        task_id=row.instance_id,
        instruction=WORK_ON_IT.format(repo=row.repo, workdir=row.workdir, problem_statement=row.problem_statement),
        environment=Environment(
            recipe=recipe,
            workdir=row.workdir,
            user=row.user,
            env=asked.env,
            memory_mib=asked.memory_mib,
            cpus=asked.cpus,
            disk_mib=asked.disk_mib,
        ),
        artifact=PatchArtifact(repo=row.workdir, base=base),
        grader=TestsGrader(
            test_patch=row.test_patch,
            command=row.test_command,
            fail_to_pass=row.fail_to_pass,
            pass_to_pass=row.pass_to_pass,
            reference=row.patch,
            user=row.user,
            env=asked.env,
            timeout_s=asked.test_s_max,
        ),
        oracle=(
            call_to("bash", command=f"cd {shlex.quote(row.workdir)} && git apply {GOLD_PATCH}"),
            call_to("submit"),
        ),
        oracle_files=(Put(path=GOLD_PATCH, data=row.patch.encode(), user=row.user),),
        nop=(call_to("submit"),),
        labels={"repo": row.repo, **({"version": row.version} if row.version else {})},
    )


def _workspace(row: SweRow, repos: Path | None) -> Path | None:
    """The repository as the sandbox gets it; None when the image has it."""
    if row.environment is None:
        return None
    if repos is None:
        raise row.error("environment", f"needs the repository {row.mirror}; say in which folder it lies (--repos)")
    mirror = repos / row.mirror
    if not mirror.is_dir():
        raise row.error("repo", f"there is no {mirror}")
    commit = swe_git.commit_of(mirror, row.base_commit)
    if commit is None:
        raise row.error("base_commit", f"{row.base_commit} is no commit of {mirror}")
    workspace = repos / "workspaces" / f"{mirror.stem}-{commit}"
    if not workspace.exists():
        try:
            swe_git.make_workspace(mirror, commit, workspace)
        except swe_git.GitError as error:
            raise row.error("base_commit", f"{mirror} does not have all of {commit}: {error}") from error
    return workspace


def _from_mirror(row: SweRow, asked: SweEnvironment, workspace: Path, folder: Path) -> Recipe:
    puts = []
    for file in asked.files:
        source = (folder / file.source).absolute()
        if not source.exists():
            raise row.error("environment.files", f"there is no {source}")
        puts.append(Put(path=file.path, source=str(source)))

    def run(command: str, *, user: str = asked.user, cwd: str | None = asked.workdir) -> Run:
        """All with the same network, since steps with another would be another image."""
        return Run(
            command=command,
            user=user,
            cwd=cwd,
            env=asked.env,
            network=asked.network,
            allow_hosts=asked.allow_hosts,
            timeout_s=asked.install_s_max,
        )

    workdir = PurePosixPath(asked.workdir)
    place = PLACE.format(parent=shlex.quote(str(workdir.parent)), workdir=shlex.quote(str(workdir)))
    steps: tuple[Run | Put, ...] = (
        *puts,
        run(LEND, cwd="/tmp"),
        run(place, user="root", cwd="/"),
        Put(path=asked.workdir, source=str(workspace.absolute()), user=asked.user),
        run(PREPARE),
        *(run(command) for command in asked.install),
        run(FINISH),
    )
    return Recipe(base=asked.base, steps=steps, env=asked.env, user=asked.user, workdir=asked.workdir)


def _on_image(row: SweRow) -> Recipe:
    assert row.image is not None
    reroot = REROOT.format(
        base_commit=row.base_commit,
        date=swe_git.DATE,
        name=swe_git.NAME,
        email=swe_git.EMAIL,
        message=shlex.quote(swe_git.MESSAGE),
        ref=IMAGE_BASE,
        make_index=MAKE_INDEX,
    )
    steps = tuple(Run(command=command, user=row.user, cwd=row.workdir) for command in (reroot, FINISH))
    return Recipe(base=row.image, steps=steps, user=row.user, workdir=row.workdir)
