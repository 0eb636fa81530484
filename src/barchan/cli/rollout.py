"""`barchan rollout`."""

import asyncio
import os
import re
import secrets
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec.structs import replace

import barchan
from barchan.cli.common import DEFAULTS, FAILED, INTERRUPTED, OK, STOPPED, Common, key_values, print_json
from barchan.cli.image_build import base_config
from barchan.cli.rollout_inject import inject as inject_faults
from barchan.cli.rollout_policy import PolicyOptions, limited, policy_of
from barchan.cli.rollout_report import print_summary
from barchan.cli.rollout_run import LeaseTerms, carry_out
from barchan.errors import InvalidSpec
from barchan.model.node import PRIORITY_MAX, Budget
from barchan.rollout.breaker import BreakerTerms
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import RunFolder, RunInfo
from barchan.rollout.task import Task
from barchan.rollout.tasksets import SetOptions, TaskSet, load_set

Count = Annotated[int, Parameter(validator=Number(gte=1))]
CountOrNone = Annotated[int, Parameter(validator=Number(gte=0))]
Words = Annotated[tuple[str, ...], Parameter(consume_multiple=False, show_default=False)]
AGENTS_PER_CPU = 2


def rollout(
    tasks: str,
    /,
    *,
    policy: str = "oracle",
    limit: Count | None = None,
    task: Words = (),
    group: Count = 1,
    over_sample: CountOrNone = 0,
    refill: CountOrNone = 0,
    concurrency: Count | None = None,
    graders: Count | None = None,
    gradings: Count = 1,
    breaker: Annotated[float, Parameter(validator=Number(gte=0, lte=1))] = 0.5,
    budget_tokens: Count | None = None,
    budget_seconds: Annotated[float, Parameter(validator=Number(gt=0))] | None = None,
    priority: Annotated[int, Parameter(validator=Number(gte=-PRIORITY_MAX, lte=PRIORITY_MAX))] = 0,
    out: Path | None = None,
    resume: Path | None = None,
    grace: Annotated[float, Parameter(validator=Number(gt=0))] = 300.0,
    template: str = "debian",
    backend: str = "container",
    memory_mib: Annotated[int, Parameter(validator=Number(gte=16))] = 512,
    repos: Path | None = None,
    base: Words = (),
    keep_images: bool = False,
    snapshot_every: CountOrNone = 0,
    base_url: str | None = None,
    model: str | None = None,
    tool_format: Literal["openai", "text"] = "openai",
    max_turns: Count | None = None,
    max_tokens: Count | None = None,
    turn_tokens: Count | None = None,
    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    seed: int | None = None,
    script: Path | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    inject: Words = (),
    inject_seed: int | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Attempt each task of a set, in a sandbox of its own, and grade what came
    of it in another.

    Tasks: humaneval (164 problems), a folder of Harbor tasks, swe:ROWS.jsonl,
    FILE.py, or module:function.

    Writes one line per rollout to rollouts.jsonl, as they end, and at the end
    summary.json and tasks.json. Ctrl-C ends the run and keeps what is finished.
    The exit code is 0 when anything was scored, whatever the rewards, and 1
    when nothing was.

    Examples:

        barchan rollout humaneval --limit 10
        barchan rollout humaneval --policy nop --group 4
        barchan rollout humaneval --group 16 --over-sample 4 --refill 2 --json
        barchan rollout humaneval --policy chat --base-url http://127.0.0.1:8000 --model NAME --max-turns 8
        barchan rollout ./tasks --task hello --task fix-git
        barchan rollout swe:rows.jsonl --repos ./repos --resume runs/a

    Parameters
    ----------
    tasks
        The set.
    policy
        Who answers: the known-good solutions (oracle), nobody (nop), the tool
        calls of a file (script), a model behind an OpenAI-compatible address
        (chat), or a class of yours (module:Class).
    limit
        Only the first so many tasks.
    task
        Only the task of this id; may be repeated.
    group
        Scored attempts wanted at each task.
    over_sample
        Start so many more; those not among the first scored are cancelled.
    refill
        Try void attempts again, so often in each group.
    concurrency
        Agents at once. [default: 2 per CPU of this machine]
    graders
        Gradings at once. [default: as many as agents]
    gradings
        Grade each artifact so often; where the rewards disagree, the
        known-good one's decide whether the least stands or none.
    breaker
        Begin no more rollouts once this share of the latest are void, of more
        than one task; what they have in common is said, and the exit code is
        4. With 0 the run goes on whatever comes.
    budget_tokens
        Prompt and completion tokens of all rollouts together; when they are
        used up, what is not over is void (budget_spent) and the run stops.
    budget_seconds
        Seconds that all its sandboxes may be awake, added up; likewise.
    priority
        Where sandboxes have to wait for their start, those of runs with a
        higher one go first: from -100 to 100.
    out
        A folder for the results. [default: runs/DATE-TIME-...]
    resume
        The folder of an earlier run of the same command: its scored rollouts
        are kept, those that were under way go on where they were, others run
        again.
    grace
        Seconds that sandboxes outlive this process, should it be killed: so
        long --resume finds them again.
    template
        Name or digest of an image with Python, for tasks without one of their own.
    backend
        What the sandboxes are made by, those of agents and of graders (barchan
        doctor); auto: the strongest isolation that the node has.
    memory_mib
        Memory of each sandbox, where the task does not say.
    repos
        swe: the folder with the rows' repositories.
    base
        Harbor: the image of the node that a task's base means, as NAME=IMAGE;
        may be repeated.
    keep_images
        Keep the images that hold agents' layers, to grade them again.
    snapshot_every
        Keep each agent's sandbox as it is after every so many turns, so that
        its rollout can go on where that is lost. [default: never]
    base_url
        chat: address of the server, with or without /v1.
    model
        chat: the model's name.
    tool_format
        chat: text for models that can't call tools.
    max_turns
        Turns of one rollout. With one, chat is asked for the answer itself;
        with more it works with tools.
        [default: the task's; humaneval: 1, 50 for script and module:Class]
    max_tokens
        Completion tokens of one rollout.
        [default: the task's; humaneval: 512 for each turn]
    turn_tokens
        chat: completion tokens of one answer. [default: what is left of the
        rollout's]
    temperature
        chat: sampling temperature.
    seed
        chat: makes sampling repeatable where the server can; attempts and
        turns still differ.
    script
        script: a JSON file with a list of {"name": ..., "arguments": {...}},
        or with such lists by task id.
    api_key_env
        chat: the environment variable that holds the key, if there is one.
    inject
        Have this go wrong, on a node of the run's own: node-kill:every=20s, or
        a plan.toml; may be repeated (docs/faults.md).
    inject_seed
        Decides which rollouts and moments. [default: the plan's, or 0]
    """
    given = dict(locals())
    if inject:
        return inject_faults(inject, inject_seed, given, common)
    if out is not None and resume is not None:
        raise InvalidSpec("give --out for a new run, or --resume for an earlier one")
    options = PolicyOptions(
        policy=policy,
        base_url=base_url,
        model=model,
        tool_format=tool_format,
        temperature=temperature,
        seed=seed,
        api_key=os.environ.get(api_key_env),
        script=script,
        max_turns=max_turns,
        max_tokens=max_tokens,
        turn_tokens=turn_tokens,
    )
    set_options = SetOptions(repos, key_values(base, "--base"), os.environ, base_config(common))
    found = load_set(tasks, set_options)
    chosen = TaskSet(found.name, limited(_chosen(found.tasks, task, limit), options))
    make_policy = policy_of(options, chosen.tasks)
    agents = concurrency or AGENTS_PER_CPU * len(os.sched_getaffinity(0))
    settings = RunSettings(
        run_id=f"run_{secrets.token_hex(6)}",
        template=template,
        backend=backend,
        group=group,
        over_sample=over_sample,
        refill=refill,
        concurrency=agents,
        graders=graders or agents,
        gradings=gradings,
        memory_mib=memory_mib,
        keep_images=keep_images,
        snapshot_every=snapshot_every,
        breaker=BreakerTerms(share=breaker),
    )
    terms = LeaseTerms(priority, grace, Budget(tokens_max=budget_tokens, sandbox_s_max=budget_seconds))
    with _run_folder(out, resume, _info(settings, chosen.name, options), chosen.tasks) as store:
        settings = replace(settings, run_id=store.info.run_id)
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            summary, rows, interrupted = runner.run(
                carry_out(chosen.tasks, make_policy, settings, store, terms, common)
            )
    print_summary(summary, rows)
    if common.json:
        print_json({**msgspec.structs.asdict(summary), "tasks": rows})
    if summary.stopped and not interrupted:
        return STOPPED
    return INTERRUPTED if interrupted else OK if summary.scored else FAILED


def _chosen(tasks: list[Task], ids: Sequence[str], limit: int | None) -> list[Task]:
    if missing := set(ids) - {task.task_id for task in tasks}:
        raise InvalidSpec(f"--task {sorted(missing)[0]}: the set has no such task")
    return [task for task in tasks if not ids or task.task_id in ids][:limit]


def _info(settings: RunSettings, task_set: str, options: PolicyOptions) -> RunInfo:
    """What the run's folder says of it: all that must be the same when it is resumed, by the options' names."""
    return RunInfo(
        run_id=settings.run_id,
        task_set=task_set,
        policy=options.policy,
        settings={
            "--group": settings.group,
            "--over-sample": settings.over_sample,
            "--template": settings.template,
            **({} if settings.backend == "container" else {"--backend": settings.backend}),
            "--memory-mib": settings.memory_mib,
            **({"--snapshot-every": settings.snapshot_every} if settings.snapshot_every else {}),
            "--model": options.model,
            "--tool-format": options.tool_format,
            "--max-turns": options.max_turns,
            "--max-tokens": options.max_tokens,
            "--turn-tokens": options.turn_tokens,
            "--temperature": options.temperature,
            "--seed": options.seed,
            "--script": None if options.script is None else sha256(options.script.read_bytes()).hexdigest(),
        },
        barchan_version=barchan.__version__,
        started_unix_s=time.time(),
    )


def _run_folder(out: Path | None, resume: Path | None, info: RunInfo, tasks: Sequence[Task]) -> RunFolder:
    if resume is not None:
        return RunFolder.resume(resume, info, tasks)
    words = re.sub(r"[^A-Za-z0-9]+", "-", f"{info.task_set}-{info.policy}")
    folder = out or Path("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{words}-{info.run_id[4:8]}")
    try:
        return RunFolder.create(folder, info, tasks)
    except InvalidSpec as error:
        raise InvalidSpec(f"--out {error}") from error


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop where there is one: it takes a quarter off the client's part of a rollout."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
