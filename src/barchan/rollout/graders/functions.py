"""Grades a function: its checks run in one process, the candidate in another, in a sandbox where the agent never was.

The only thing of the agent's that enters is the artifact's text, on the checker's stdin. The checker runs as the
sandbox's root and the candidate as nobody, so the candidate can't signal, trace or read it. The checker's report
leaves by its stdout, which the candidate can't open, and carries a nonce that is made for this grading and given to
the checker alone. An exit code scores nothing.

Time: the kernel bounds the candidate's CPU seconds, which a slow host does not use up. The bound in wall time is
generous, and reaching it decides nothing without a control (`barchan.rollout.verdict`).
"""

import asyncio
import functools
import secrets
from importlib import resources
from typing import cast, get_args

from msgspec.structs import replace

from barchan.model.sandbox import ExecResult
from barchan.model.verdict import Verdict
from barchan.rollout.graders.base import Artifact, Grading
from barchan.rollout.graders.guest import codec
from barchan.rollout.limits import GradingLimits
from barchan.rollout.ports import Sandbox
from barchan.rollout.task import FunctionGrader
from barchan.rollout.verdict import Checked, CheckReport, Outcome, judge

CANDIDATE_USER = "65534:65534"  # nobody, by number: also where the template has no such name
CHECKER_USER = "root"
INTERPRETER = ("python3", "-I", "-S", "-c")  # half the start-up time of a bare python3
REPORT_BYTES_MAX = 64 << 10
PLATFORM_SLACK_S = 10.0  # beyond the checker's own deadline, the platform ends it
UNLIMITED = -1
END_WAIT_S = 2.0  # for the candidate's wait status, once its pipe is closed


@functools.cache
def program(name: str) -> str:
    """A guest program as one text: the codec, then the program without its import of the codec."""
    folder = resources.files("barchan.rollout.graders.guest")
    text = folder.joinpath("codec.py").read_text() + folder.joinpath(f"{name}.py").read_text()
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("from barchan."))


class FunctionGrading:
    """Runs the checks of a `FunctionGrader`."""

    def __init__(self, spec: FunctionGrader) -> None:
        self._spec = spec

    async def grade(self, grading: Grading, artifact: Artifact) -> Verdict:
        environment = replace(grading.task.environment, network="none", allow_hosts=(), services=())
        async with grading.sandboxes.opened("grader", environment) as sandbox:
            source = artifact.data.decode("utf-8", "replace")
            return judge(await check(sandbox, self._spec, source, grading.settings.grading))


async def check(sandbox: Sandbox, checks: FunctionGrader, source: str, limits: GradingLimits) -> Checked:
    """Run the checks against `source` in a fresh sandbox; what the platform fails to do is raised."""
    nonce = secrets.token_hex(16)
    job = {
        "nonce": nonce,
        "checks": checks.checks,
        "entry_point": checks.entry_point,
        "source": source,
        "wall_s": limits.wall_s,
    }
    candidate = asyncio.create_task(_run_candidate(sandbox, limits))
    try:
        checker = await sandbox.exec(
            [*INTERPRETER, program("checker")],
            stdin=codec.encode(job),
            user=CHECKER_USER,
            cwd="/",
            timeout_s=limits.wall_s + PLATFORM_SLACK_S,
            max_output_bytes=REPORT_BYTES_MAX,
        )
        report = parse_report(checker, nonce)
        if report is None or report.outcome != "slow":  # a slow one has not ended and will not soon
            await asyncio.wait([candidate], timeout=END_WAIT_S)
        ended = candidate.result() if candidate.done() else None
    finally:
        candidate.cancel()
        await asyncio.gather(candidate, return_exceptions=True)
    return Checked(
        report=report,
        report_malformed=report is None and bool(checker.stdout),
        checker=checker,
        candidate=ended,
        checks_total=checks.checks_total,
        cpu_s_max=limits.cpu_s,
    )


async def _run_candidate(sandbox: Sandbox, limits: GradingLimits) -> ExecResult:
    return await sandbox.exec(
        [*INTERPRETER, program("candidate")],
        user=CANDIDATE_USER,
        cwd="/",
        timeout_s=limits.wall_s + 2 * PLATFORM_SLACK_S,
        max_output_bytes=4096,
        restrained=True,
        rlimits={
            # No hard limit, whose SIGKILL comes by the ticks that find it running, far from the time that it has used:
            # who ignores SIGXCPU gives no answer, and a control decides.
            "cpu": (limits.cpu_s, UNLIMITED),
            "nproc": (limits.processes, limits.processes),
            "fsize": (limits.file_bytes, limits.file_bytes),
            "core": (0, 0),
        },
    )


def parse_report(checker: ExecResult, nonce: str) -> CheckReport | None:
    """The checker's report, or None: nothing written, another nonce, another form."""
    words = checker.text.rstrip("\n").split(" ", 4)
    if len(words) != 5 or not secrets.compare_digest(words[0].encode(), nonce.encode()):
        return None
    try:
        passed, calls = int(words[2]), int(words[3])
    except ValueError:
        return None
    if words[1] not in get_args(Outcome) or passed < 0 or calls < 0:
        return None
    return CheckReport(outcome=cast(Outcome, words[1]), passed=passed, calls=calls, detail=words[4].strip("'\"")[:400])
