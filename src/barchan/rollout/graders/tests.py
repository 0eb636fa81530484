"""Grades a patch by the task's own tests, in a fresh environment.

Both patches meet as git trees, where nothing in a work tree can be in the way: base with the agent's patch, and over it
the tests as base and the test patch have them, so that what the agent did to them is lost. Only the files in which the
result differs from base are then written. The tests' report is asked for under a name, in a folder, that exist only
from then on.

The code under test runs in the test runner's own process, in every format of this kind. It can't reach other gradings
or the platform, but it could write the report itself: each verdict is `exposed`. Files of the patch that a test runner
takes orders from are put back to what they were, unless the reference changes them as well; and a test that must fail
runs with the others, so that whoever makes all of them pass is found out.
"""

import asyncio
import posixpath
import secrets
import shlex
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import BarchanError, TaskError
from barchan.model.sandbox import ExecResult
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.graders.base import Artifact, Grading
from barchan.rollout.graders.junit import BadReport, Outcome, files_of, outcomes, parse_junit
from barchan.rollout.integrity.hooks import steering_of, touched
from barchan.rollout.integrity.sentinel import Sentinel, takes_sentinel
from barchan.rollout.integrity.signs import SOURCE
from barchan.rollout.ports import Files, Sandbox
from barchan.rollout.task import PatchArtifact, TestsGrader
from barchan.rollout.tools.base import is_guests_doing
from barchan.rollout.verdict import scored, void

REPORT_BYTES_MAX = 32 << 20
OUTPUT_BYTES_MAX = 64 << 10
NAMES_BYTES_MAX = 1 << 20
APPLY_TIMEOUT_S = 300.0
IDS_TOLD = 20
TAIL_CHARS = 1500

NO_GIT, NO_BASE, BAD_TESTS, BAD_PATCH = 40, 41, 42, 43
TASK_FAULTS = {NO_GIT: "its image has no git", NO_BASE: "no such base", BAD_TESTS: "the test patch does not fit base"}
_GIT = r"""
work=$1 repo=$2 base=$3; shift 3
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_LITERAL_PATHSPECS=1 LC_ALL=C
command -v git >/dev/null || exit 40
git() { command git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }
differs() { git diff-tree -r --no-renames "$@"; }

cd "$repo" && top=$(git rev-parse --show-toplevel) && cd "$top" || exit 41
base=$(git rev-parse --verify "$base^{commit}") || exit 41
"""
# $1: folder of tests.patch and agent.patch; $2: repository; $3: base; the rest: files of tests. Prints what the agent
# has changed.
MEET = (
    _GIT
    + r"""
for name in tests agent; do
    export GIT_INDEX_FILE="$work/$name.index"
    git read-tree "$base" || exit 44
    [ -s "$work/$name.patch" ] || continue
    if ! git apply --cached --check --whitespace=nowarn "$work/$name.patch"; then
        [ $name = tests ] && exit 42 || exit 43
    fi
    git apply --cached --whitespace=nowarn "$work/$name.patch" || exit 44
done
tests=$(GIT_INDEX_FILE="$work/tests.index" git write-tree) || exit 44
{
    differs "$base" "$tests" | sed 's/^:[0-7]* \([0-7]*\) [0-9a-f]* \([0-9a-f]*\) [A-Z][0-9]*/\1 \2/'
    [ $# = 0 ] || git ls-tree "$tests" -- "$@"
} >"$work/index-info" && git update-index --replace --index-info <"$work/index-info" || exit 44
final=$(git write-tree) || exit 44
echo "$tests" >"$work/tests.tree" || exit 44
differs -z --name-only "$tests" "$final" || exit 44
"""
)
# As above. Puts what $work/steering names back to what it was, and writes the work tree.
WRITE = (
    _GIT
    + r"""
export GIT_INDEX_FILE="$work/agent.index"
tests=$(cat "$work/tests.tree") || exit 44
if [ -s "$work/steering" ]; then
    git update-index --force-remove -z --stdin <"$work/steering" || exit 44
    xargs -0 git -c safe.directory='*' ls-tree -z "$tests" -- <"$work/steering" >"$work/steering-info" || exit 44
    git update-index --replace -z --index-info <"$work/steering-info" || exit 44
fi
final=$(git write-tree) || exit 44

differs -z --name-only --diff-filter=D "$base" "$final" >"$work/gone" || exit 44
xargs -0 -r rm -f -- <"$work/gone" || exit 44
differs -z --name-only --diff-filter=d "$base" "$final" >"$work/there" || exit 44
git checkout-index -f -z --stdin <"$work/there" || exit 44
"""
)


class TestRun(Struct, frozen=True, kw_only=True):
    """What is known of one run of the tests.

    Attributes:
        applied: How putting the patches in place ended; None where it was not come to.
        failed: What else in the sandbox stood in the way: its disk is full, say.
        steering: Files that the agent has changed and a test runner takes orders from: they were put back.
        end: How the command ended; None where it was not run.
        outcomes: By test id, where there is a report.
        no_report: Why there is none.
        sentinel: What became of the test that must fail; None where there was none.
    """

    applied: ExecResult | None = None
    failed: str = ""
    steering: tuple[str, ...] = ()
    end: ExecResult | None = None
    outcomes: Mapping[str, Outcome] = {}
    no_report: str = ""
    sentinel: Outcome | None = None


class TestsGrading:
    """Runs the tests of a `TestsGrader`.

    Raises:
        TaskError: It names no test.
    """

    def __init__(self, spec: TestsGrader) -> None:
        if not spec.fail_to_pass and not spec.pass_to_pass:
            raise TaskError("a grader by tests has no test to look at")
        self._spec = spec
        self._ids = tuple(dict.fromkeys((*spec.fail_to_pass, *spec.pass_to_pass)))

    async def grade(self, grading: Grading, artifact: Artifact) -> Verdict:
        """The verdict; where all has passed and the test that must fail was left out, the reference is run as well:
        with that nobody had a reason to.
        """
        run = await self.run(grading, artifact)
        verdict = tests_verdict(self._spec, run)
        if not verdict.reward or not left_out(run) or not self._spec.reference:
            return verdict
        control = await self.run(grading, Artifact(kind="patch", data=self._spec.reference.encode()))
        return tests_verdict(self._spec, run, control)

    async def run(self, grading: Grading, artifact: Artifact) -> TestRun:
        """Run the tests over a patch, and tell what became of each.

        Raises:
            TaskError: The task can't be graded so: no repository, no such base, or a test patch that does not fit it.
        """
        task, spec = grading.task, self._spec
        if artifact.kind != "patch" or not isinstance(task.artifact, PatchArtifact):
            raise TaskError(f"task {task.task_id}: a grader by tests takes a patch, and no {artifact.kind} artifact")
        environment = replace(
            task.environment,
            recipe=spec.recipe or task.environment.recipe,
            network="none",
            allow_hosts=(),
            services=(),
        )
        async with grading.sandboxes.opened("grader", environment) as sandbox:
            try:
                applied, steering = await self._apply(sandbox, task.artifact, artifact.data)
                if applied.exit_code in TASK_FAULTS:
                    what, said = TASK_FAULTS[applied.exit_code], applied.error_text.strip()[-400:]
                    raise TaskError(f"task {task.task_id}: {what}: {said}")
                if not applied.ok or applied.truncated:
                    return TestRun(applied=applied)
                return await self._test(sandbox, task.artifact.repo, steering, applied)
            except BarchanError as error:
                if not is_guests_doing(error):
                    raise
                return TestRun(failed=f"{type(error).__name__}: {error}")

    async def _apply(self, sandbox: Sandbox, spec: PatchArtifact, patch: bytes) -> tuple[ExecResult, tuple[str, ...]]:
        """As the environment's user, whose files they become; how it ended, and what was put back."""
        work = f"/tmp/barchan-{secrets.token_hex(8)}"
        files = sandbox.files
        await files.mkdir(work, mode=0o700)
        for name, data in (("agent", patch), ("tests", self._spec.test_patch.encode())):
            await files.write(f"{work}/{name}.patch", data if data.strip() else b"")
        arguments = (work, spec.repo, spec.base, *files_of(self._ids))
        steering: tuple[str, ...] = ()
        applied = await _sh(sandbox, MEET, arguments)
        if applied.ok and not applied.truncated:
            names = [name for name in applied.stdout.split(b"\0") if name]
            allowed = touched(self._spec.reference)
            found = [name for name in names if steering_of((name.decode("utf-8", "replace"),), allowed)]
            steering = tuple(name.decode("utf-8", "replace") for name in found)
            await files.write(f"{work}/steering", b"".join(name + b"\0" for name in found))
            applied = await _sh(sandbox, WRITE, arguments)
        await files.remove(work, recursive=True)
        return applied, steering

    async def _test(self, sandbox: Sandbox, repo: str, steering: tuple[str, ...], applied: ExecResult) -> TestRun:
        spec = self._spec
        files = sandbox.files.as_user(spec.user)
        folder = f"/tmp/barchan-{secrets.token_hex(16)}"
        await files.mkdir(folder, mode=0o700)
        report = f"{folder}/{secrets.token_hex(16)}.xml"
        names = list(files_of(self._ids))
        sentinel = Sentinel.beside(names[0]) if names and takes_sentinel(spec.command) else None
        if sentinel is not None:
            await sandbox.files.write(posixpath.join(repo, sentinel.path), sentinel.source)
            names.append(sentinel.path)
        tests = " ".join(shlex.quote(name) for name in names)
        end = await sandbox.exec(
            spec.command.replace("{tests}", tests).replace("{junit}", report),
            user=spec.user,
            cwd=repo,
            env=spec.env,
            merge_stderr=True,
            timeout_s=spec.timeout_s,
            max_output_bytes=OUTPUT_BYTES_MAX,
        )
        found, why = await _report(files, report)
        run = TestRun(applied=applied, steering=steering, end=end, no_report=why)
        if found is None:
            return run
        ids = self._ids if sentinel is None else (*self._ids, sentinel.test_id)
        try:
            # In a thread: a report made to be large takes seconds, in which other rollouts go on.
            found_outcomes = await asyncio.to_thread(_outcomes, found, ids)
        except BadReport as error:
            return replace(run, no_report=f"malformed: {error}")
        told = None if sentinel is None else found_outcomes.pop(sentinel.test_id)
        return replace(run, outcomes=found_outcomes, sentinel=told)


async def _sh(sandbox: Sandbox, script: str, arguments: tuple[str, ...]) -> ExecResult:
    return await sandbox.exec(
        ("sh", "-c", script, "apply", *arguments),
        cwd="/",
        timeout_s=APPLY_TIMEOUT_S,
        max_output_bytes=NAMES_BYTES_MAX,
    )


def _outcomes(report: bytes, ids: tuple[str, ...]) -> dict[str, Outcome]:
    return outcomes(parse_junit(report), ids)


async def _report(files: Files, path: str) -> tuple[bytes | None, str]:
    """The report's bytes, or why there are none."""
    try:
        data = await files.read(path, length=REPORT_BYTES_MAX + 1)
    except BarchanError as error:
        if not is_guests_doing(error):
            raise
        return None, f"missing: {error}"
    return (None, f"malformed: more than {REPORT_BYTES_MAX} bytes") if len(data) > REPORT_BYTES_MAX else (data, "")


def left_out(run: TestRun) -> bool:
    """Whether a test that must fail was there, and did neither that nor pass."""
    return run.sentinel not in (None, "passed", "failed", "error")


def tests_verdict(spec: TestsGrader, run: TestRun, control: TestRun | None = None) -> Verdict:
    """1 where every test of both lists passed, else 0. A test that had passed may also be expected to fail.

    Args:
        control: The same with the reference, where a test that must fail was left out.
    """
    end = run.end
    proof = _proof(run, control)
    if proof is not None:
        facts = () if run.end is None else _facts(run, run.end)
        verdict = scored(0.0, "integrity_violation", False, (proof, *facts))
    elif run.applied is None:
        failed = Evidence(source="grader's sandbox", fact="failed", value=run.failed[:400])
        verdict = void("platform", "grader_crash", (failed,))
    elif end is None:
        verdict = _not_applied(run.applied)
    elif end.timed_out or run.no_report:
        cause: Cause = "reward_malformed" if run.no_report.startswith("malformed") else "reward_missing"
        verdict = void("platform", "grader_timeout" if end.timed_out else cause, _facts(run, end))
    else:
        verdict = _counted(spec, run, end)
    return replace(verdict, exposed=True)


def _proof(run: TestRun, control: TestRun | None) -> Evidence | None:
    """What became of the test that must fail, where no honest code makes that of it."""
    if run.sentinel == "passed":
        return Evidence(source=SOURCE, fact="proven: a test that must fail was reported as passed", value=True)
    if control is not None and left_out(run) and control.sentinel in ("failed", "error"):
        fact = "proven: a test that must fail was left out, which with the reference was run"
        return Evidence(source=SOURCE, fact=fact, value=str(run.sentinel))
    return None


def _not_applied(applied: ExecResult) -> Verdict:
    said = Evidence(source="git", fact="the patch does not apply", value=applied.error_text.strip()[-TAIL_CHARS:])
    if applied.ok:
        said = Evidence(source="git", fact="the patch changes more files than can be looked at", value=True)
        return scored(0.0, "completed", False, (said,))
    if applied.exit_code == BAD_PATCH and not applied.timed_out:
        return scored(0.0, "completed", False, (said,))
    if applied.oom_killed:
        said = Evidence(source="git, kernel's memory counter", fact="oom_killed", value=True)
    return void("platform", "grader_timeout" if applied.timed_out else "grader_crash", (said,))


def _counted(spec: TestsGrader, run: TestRun, end: ExecResult) -> Verdict:
    f2p = [test_id for test_id in spec.fail_to_pass if run.outcomes[test_id] == "passed"]
    p2p = [test_id for test_id in spec.pass_to_pass if run.outcomes[test_id] in ("passed", "xfailed")]
    lacking = {*spec.fail_to_pass} - {*f2p} | {*spec.pass_to_pass} - {*p2p}
    others = [test_id for test_id in run.outcomes if test_id in lacking]
    evidence = [
        Evidence(source="tests", fact=f"not passed, {run.outcomes[test_id]}", value=test_id[:400])
        for test_id in others[:IDS_TOLD]
    ]
    if len(others) > IDS_TOLD:
        evidence.append(Evidence(source="tests", fact="not passed, further ones", value=len(others) - IDS_TOLD))
    metrics = {
        "f2p_passed": len(f2p),
        "f2p_total": len(spec.fail_to_pass),
        "p2p_passed": len(p2p),
        "p2p_total": len(spec.pass_to_pass),
        "runner_files": len(run.steering),
    }
    reward = 0.0 if others else 1.0
    evidence += _facts(run, end)
    return scored(reward, "completed", False, tuple(evidence)).with_metrics(
        {name: float(count) for name, count in metrics.items()}
    )


def _facts(run: TestRun, end: ExecResult) -> tuple[Evidence, ...]:
    source = "tests' command" + (", with a test that must fail" if run.sentinel else "")
    facts = [Evidence(source=source, fact="exit_code", value=end.exit_code)]
    if end.timed_out:
        facts.append(Evidence(source=source, fact="timed_out", value=True))
    if end.oom_killed:
        facts.append(Evidence(source=f"{source}, kernel's memory counter", fact="oom_killed", value=True))
    if run.no_report:
        facts.append(Evidence(source="report", fact="none", value=run.no_report[:400]))
    if run.steering:
        value = ", ".join(run.steering)[:400]
        facts.append(Evidence(source=SOURCE, fact="put back: files that steer the runner", value=value))
    if run.sentinel is not None and run.sentinel not in ("failed", "error"):
        facts.append(
            Evidence(source=SOURCE, fact="sign: a test that must fail was not run as told", value=run.sentinel)
        )
    if run.no_report or end.timed_out or any(outcome != "passed" for outcome in run.outcomes.values()):
        facts.append(Evidence(source=source, fact="output", value=end.text.strip()[-TAIL_CHARS:]))
    return tuple(facts)
