"""Grades by a command that writes the reward into a file.

Its exit code scores nothing. The reward is read when the command has ended, and only if it has: one that hangs, for
whatever reason, has given none. Where the artifact's code can keep the command from giving a reward, it could buy
itself a void; so all of that is undecided, and a control decides.

The command runs what the agent has made, as a user who may write the reward, and nobody but the task's author knows
what keeps one from the other: every verdict is `exposed`.
"""

import asyncio
import posixpath

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from barchan.errors import BarchanError, CallerError, Conflict, GuestError, NotFound, TaskError
from barchan.model.sandbox import ExecResult
from barchan.model.verdict import Cause, Evidence, Verdict
from barchan.rollout.graders.base import Artifact, Grading
from barchan.rollout.graders.placing import clear, placed, put
from barchan.rollout.graders.prepared import OFFLINE, image_name
from barchan.rollout.graders.reward import reward_of
from barchan.rollout.integrity.canary import PROVEN, proof_in
from barchan.rollout.integrity.layer import changed, layer_of, proof
from barchan.rollout.integrity.leftovers import outlived, programs, rewritten
from barchan.rollout.integrity.protected import base_listing, listing_of, sign, suspects
from barchan.rollout.integrity.signs import BYTES_MAX, SOURCE, names_grader, tar_text
from barchan.rollout.ports import Sandbox
from barchan.rollout.services import start_services
from barchan.rollout.task import ScriptGrader
from barchan.rollout.tools.base import in_time, is_guests_doing
from barchan.rollout.verdict import scored, void

REWARD_BYTES_MAX = 64 << 10
OUTPUT_BYTES_MAX = 64 << 10
FILES_TIMEOUT_S = 120.0
TAIL_CHARS = 800
ENDS_AT_ONCE = 16
SIGNALLED = 128  # exit codes above it


class NoReward(Struct, frozen=True):
    """Why a command that ended gave no reward."""

    cause: Cause
    why: str


class ScriptGrading:
    """Runs the command of a `ScriptGrader`."""

    def __init__(self, spec: ScriptGrader) -> None:
        self._spec = spec

    async def grade(self, grading: Grading, artifact: Artifact) -> Verdict:
        try:
            if self._spec.installs and artifact.sandbox is None:
                verdict = await self._prepared(grading, artifact)
            else:
                verdict = await self._fresh(grading, artifact)
        except TaskError as error:
            if error.details.get("cause") != "service_not_ready":
                raise
            # A diff can hold what keeps a service from starting.
            told = Evidence(source="service", fact=str(error)[:400], value=str(error.details.get("output", "")))
            verdict = void("task", "grader_crash", (told,))
        return replace(verdict, exposed=True)

    async def _fresh(self, grading: Grading, artifact: Artifact) -> Verdict:
        spec = self._spec
        async with placed(
            grading,
            artifact,
            recipe=spec.recipe,
            network=spec.network,
            allow_hosts=spec.allow_hosts,
            root="capable" if spec.installs else "plain",
        ) as sandbox:
            signs = await _left_by_agent(sandbox, grading, artifact, ())
            return _with(await self._in(sandbox, grading, is_shared=artifact.sandbox is not None), signs)

    async def _prepared(self, grading: Grading, artifact: Artifact) -> Verdict:
        """Over what `prepare` has kept, where it has; an artifact that does not go over that is graded without."""
        spec = self._spec
        environment = grading.task.environment
        base = await grading.sandboxes.template(replace(environment, recipe=spec.recipe or environment.recipe))
        name = await asyncio.to_thread(image_name, spec, base)
        if not await grading.sandboxes.has_image(name):
            return await self._fresh(grading, artifact)
        offline = ScriptGrading(replace(spec, env={**OFFLINE, **spec.env}))
        is_made = False
        try:
            async with placed(grading, artifact, recipe=spec.recipe, root="capable", layers=(name,)) as sandbox:
                is_made = True
                signs = await _left_by_agent(sandbox, grading, artifact, (name,))
                return _with(await offline._in(sandbox, grading, is_shared=False), signs)
        except (NotFound, Conflict) as error:
            if is_made or "sandbox_id" in error.details:
                raise
            if isinstance(error, Conflict):
                told = Evidence(source="grader", fact="its prepared image does not go under it", value=str(error)[:400])
                verdict = await self._fresh(grading, artifact)
                return replace(verdict, evidence=(*verdict.evidence, told))
        return await self._fresh(grading, artifact)

    async def install(self, sandbox: Sandbox, grading: Grading) -> None:
        """Run the command for what it installs, whatever its reward.

        Raises:
            TaskError: It ran out of time.
        """
        await in_time(self._prepare(sandbox, grading), FILES_TIMEOUT_S)
        if self._spec.services:
            await start_services(sandbox, grading.task.environment.services, grading.log)
        result = await self._run(sandbox)
        await _end_all(sandbox)
        if result.timed_out:
            told = result.text.strip()[-TAIL_CHARS:]
            raise TaskError(f"its verifier did not end within {self._spec.timeout_s:g} s: {told or 'it said nothing'}")

    async def _in(self, sandbox: Sandbox, grading: Grading, *, is_shared: bool) -> Verdict:
        """While the platform works in it, nothing of the artifact's runs in a sandbox of the grader's own."""
        try:
            await in_time(self._prepare(sandbox, grading), FILES_TIMEOUT_S)
            if self._spec.services and not is_shared:
                await start_services(sandbox, grading.task.environment.services, grading.log)
            sealed = await layer_of(sandbox, self._spec.files)
            before, listed = await programs(sandbox), await listing_of(sandbox)
            result = await self._run(sandbox)
            left = await outlived(sandbox, before)
            paths = (self._spec.reward_json, self._spec.reward_text)
            found: tuple[float, dict[str, float]] | NoReward = NoReward("grader_timeout", "")
            proven: tuple[Evidence, ...] = ()
            if left and not is_shared:
                if not result.timed_out:
                    found = await in_time(self._reward(sandbox), FILES_TIMEOUT_S)
                proven = await in_time(rewritten(sandbox, paths), FILES_TIMEOUT_S)
            swapped = () if self._spec.installs else suspects(listed, await listing_of(sandbox))
            if not is_shared:
                await _end_all(sandbox)
            tampered = await in_time(changed(sandbox, sealed), FILES_TIMEOUT_S)
            if not result.timed_out:
                found = _one_of(found, await in_time(self._reward(sandbox), FILES_TIMEOUT_S))
        except BarchanError as error:
            if not isinstance(error, GuestError) and not is_guests_doing(error):
                raise
            told = Evidence(source=f"grader: {type(error).__name__}", fact="message", value=str(error)[:400])
            return void("task", "grader_crash", (told,))
        evidence = _evidence(result, self._spec)
        if tampered or proven:
            proofs = (*((proof(tampered),) if tampered else ()), *proven)
            return scored(0.0, "integrity_violation", False, (*proofs, *evidence))
        if left and not is_shared:
            evidence += (Evidence(source=SOURCE, fact="sign: programs outlived the grader's command", value=left),)
        evidence += sign("while it was graded", swapped)
        if isinstance(found, NoReward):
            if found.why:
                evidence += (Evidence(source="reward file", fact=found.cause, value=found.why[:400]),)
            return void("task", found.cause, evidence)
        reward, metrics = found
        if reward > 0 and (result.signal is not None or result.exit_code > SIGNALLED):
            # It did not come to its own end, so nobody knows who has written this.
            told = Evidence(
                source="grader's command", fact="ended by a signal, beside a reward", value=result.exit_code
            )
            return void("task", "grader_crash", (*evidence, told))
        return scored(reward, "completed", False, evidence).with_metrics(metrics)

    async def _prepare(self, sandbox: Sandbox, grading: Grading) -> None:
        """The artifact is there already: an early reward of its making goes, and the grader's files come."""
        for path in (self._spec.reward_text, self._spec.reward_json):
            await clear(sandbox, path)
            folder = posixpath.dirname(path)
            if folder:
                await sandbox.files.as_user(self._spec.user).mkdir(folder)
        for item in self._spec.files:
            await put(sandbox, item, grading.task, private=self._spec.user.partition(":")[0] in ("root", "0"))

    async def _run(self, sandbox: Sandbox) -> ExecResult:
        spec = self._spec
        return await sandbox.exec(
            spec.command,
            user=spec.user,
            cwd=spec.cwd,
            env=spec.env,
            merge_stderr=True,
            timeout_s=spec.timeout_s,
            max_output_bytes=OUTPUT_BYTES_MAX,
        )

    async def _reward(self, sandbox: Sandbox) -> tuple[float, dict[str, float]] | NoReward:
        files = sandbox.files.as_user(self._spec.user)
        for path in (self._spec.reward_json, self._spec.reward_text):
            try:
                found = await files.stat(path)
            except NotFound as error:
                if "errno" not in error.details:
                    raise
                continue
            if found.kind != "file" or found.size > REWARD_BYTES_MAX:
                what = f"of {found.size} bytes" if found.kind == "file" else f"a {found.kind}"
                return NoReward("reward_malformed", f"{path} is {what}")
            data = await files.read(path, length=REWARD_BYTES_MAX)
            return parsed(data, is_json=path == self._spec.reward_json)
        return NoReward("reward_missing", "the command has written none")


def _one_of(
    early: tuple[float, dict[str, float]] | NoReward, late: tuple[float, dict[str, float]] | NoReward
) -> tuple[float, dict[str, float]] | NoReward:
    """The reward, unless what outlived the command has written another one than that had."""
    if isinstance(early, NoReward) or isinstance(late, NoReward) or early[0] == late[0]:
        return late
    return NoReward("reward_malformed", f"it was {early[0]:g} when the command had ended, and {late[0]:g} soon after")


async def _left_by_agent(
    sandbox: Sandbox, grading: Grading, artifact: Artifact, layers: tuple[str, ...]
) -> tuple[Evidence, ...]:
    """What a layer of the agent's puts in place of what graders run by."""
    if artifact.kind != "diff" or not artifact.image:
        return ()
    base = await base_listing(grading, layers)
    found = sign("by the agent", suspects(base, await listing_of(sandbox)))
    grader, workdir = grading.task.grader, grading.task.environment.workdir
    if workdir is None or not workdir.strip("/") or not isinstance(grader, ScriptGrader):
        return found
    try:
        tar = await sandbox.files.as_user("root").read_tar(workdir, max_bytes=BYTES_MAX)
    except BarchanError as error:
        if not is_guests_doing(error):
            raise
        return found  # the agent's folder is gone, or too large to be looked through
    text = await asyncio.to_thread(tar_text, tar)
    proof = proof_in(grading.task, text.encode())
    return found + proof + names_grader(text, [item.path for item in grader.files])


def _with(verdict: Verdict, signs: tuple[Evidence, ...]) -> Verdict:
    if any(item.fact == PROVEN for item in signs):
        verdict = scored(0.0, "integrity_violation", False, verdict.evidence)
    return replace(verdict, evidence=verdict.evidence + signs)


def parsed(data: bytes, *, is_json: bool) -> tuple[float, dict[str, float]] | NoReward:
    """A reward file's content as reward and metrics."""
    if not data.strip():
        return NoReward("reward_missing", "the file is empty")
    try:
        if is_json:
            value = msgspec.json.decode(data)
            if not isinstance(value, dict):
                raise ValueError(f"no object but {type(value).__name__}")
            return reward_of(value)
        text = data.decode("ascii").strip()
        return reward_of(float(text) if "_" not in text else text)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        return NoReward("reward_malformed", str(error))


async def _end_all(sandbox: Sandbox) -> None:
    """End every process that the platform has started in a sandbox, with all that it has left behind."""
    turns = asyncio.Semaphore(ENDS_AT_ONCE)

    async def end(process_id: str) -> None:
        async with turns:
            try:
                await sandbox.process(process_id).kill()
            except CallerError as error:
                if "sandbox_id" in error.details:
                    raise
                return  # the node has forgotten it meanwhile

    ends = [end(process.process_id) for process in await sandbox.processes()]
    for failed in await asyncio.gather(*ends, return_exceptions=True):
        if failed is not None:
            raise failed


def _evidence(result: ExecResult, spec: ScriptGrader) -> tuple[Evidence, ...]:
    source = "grader's command"
    facts = [Evidence(source=source, fact="exit_code", value=result.exit_code)]
    if result.timed_out:
        facts.append(Evidence(source=source, fact="timed out after seconds", value=spec.timeout_s))
    if result.oom_killed:
        facts.append(Evidence(source=f"{source}, kernel's memory counter", fact="oom_killed", value=True))
    if said := result.text.strip():
        facts.append(Evidence(source=source, fact="output", value=said[-TAIL_CHARS:]))
    return tuple(facts)
