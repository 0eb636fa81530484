"""`barchan rollout`."""

import asyncio
import os
import re
import secrets
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

import barchan
from barchan.cli.common import DEFAULTS, FAILED, INTERRUPTED, OK, Common, print_json
from barchan.cli.rollout_policy import PolicyOptions, limited, policy_of
from barchan.cli.rollout_report import Progress, print_summary
from barchan.errors import InvalidSpec, NotFound
from barchan.rollout.policies import Policy
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.store import RunFolder
from barchan.rollout.summary import Summary, Tally
from barchan.rollout.task import Task
from barchan.rollout.tasksets import TASK_SETS
from barchan.sdk.aio.client import AsyncClient

app = App(name="rollout", help_format="plaintext")

Count = Annotated[int, Parameter(validator=Number(gte=1))]
ROLLOUTS_PER_CPU = 2


@app.command
def humaneval(
    *,
    policy: str = "oracle",
    limit: Count | None = None,
    group: Count = 1,
    concurrency: Count | None = None,
    out: Path | None = None,
    template: str = "debian",
    memory_mib: Count = 512,
    base_url: str | None = None,
    model: str | None = None,
    max_turns: Count | None = None,
    max_tokens: Count | None = None,
    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    seed: int | None = None,
    script: Path | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    common: Common = DEFAULTS,
) -> int:
    """Attempt the 164 problems of HumanEval, each in a sandbox of its own,
    graded in another.

    Writes one line per rollout to rollouts.jsonl, as they end, and summary.json.
    Ctrl-C ends the run and keeps what is finished. The exit code is 0 when
    anything was scored, whatever the rewards, and 1 when nothing was.

    Examples:

        barchan rollout humaneval --limit 10
        barchan rollout humaneval --policy nop --group 4
        barchan rollout humaneval --group 16 --json
        barchan rollout humaneval --policy chat --base-url http://127.0.0.1:8000 --model NAME --temperature 0.8
        barchan rollout humaneval --policy chat --base-url http://127.0.0.1:8000 --model NAME --max-turns 8

    Parameters
    ----------
    policy
        Who answers: the known-good solutions (oracle), an empty function
        (nop), the tool calls of a file (script), a model behind an
        OpenAI-compatible address (chat), or a class of yours (module:Class).
    limit
        Only the first so many problems.
    group
        Attempts at each problem.
    concurrency
        Rollouts at once. [default: 2 per CPU of this machine]
    out
        A folder for the results. [default: runs/DATE-TIME-...]
    template
        Name or digest of an image with Python.
    memory_mib
        Memory of each sandbox.
    base_url
        chat: address of the server, with or without /v1.
    model
        chat: the model's name.
    max_turns
        Turns of one rollout. With one, chat is asked for the answer itself;
        with more it works with tools.
        [default: 1; 50 for script and module:Class]
    max_tokens
        Completion tokens of one rollout. [default: 512 for each turn]
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
    """
    options = PolicyOptions(
        policy=policy,
        base_url=base_url,
        model=model,
        temperature=temperature,
        seed=seed,
        api_key=os.environ.get(api_key_env),
        script=script,
        max_turns=max_turns,
        max_tokens=max_tokens,
    )
    tasks = limited(TASK_SETS["humaneval"]()[:limit], options)
    make_policy = policy_of(options, tasks)
    settings = RunSettings(
        run_id=f"run_{secrets.token_hex(6)}",
        template=template,
        group=group,
        concurrency=concurrency or ROLLOUTS_PER_CPU * len(os.sched_getaffinity(0)),
        memory_mib=memory_mib,
    )
    with _run_folder(out, policy, settings.run_id) as store, asyncio.Runner(loop_factory=_new_loop) as runner:
        summary, interrupted = runner.run(_run(tasks, policy, make_policy, settings, store, common))
    print_summary(summary)
    if common.json:
        print_json(summary)
    return INTERRUPTED if interrupted else OK if summary.scored else FAILED


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop where there is one: it takes a quarter off the client's part of a rollout."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _run_folder(out: Path | None, policy: str, run_id: str) -> RunFolder:
    name = re.sub(r"[^A-Za-z0-9]+", "-", policy)
    folder = out or Path("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-humaneval-{name}-{run_id[4:8]}")
    try:
        return RunFolder(folder, run_id=run_id, policy=policy, version=barchan.__version__)
    except OSError as error:
        raise InvalidSpec(f"--out {folder}: {error.strerror}; give a folder that holds no run yet") from error


async def _run(
    tasks: list[Task],
    policy_name: str,
    make_policy: Callable[[], AbstractAsyncContextManager[Policy]],
    settings: RunSettings,
    store: RunFolder,
    common: Common,
) -> tuple[Summary, bool]:
    """The run's summary, and whether it was interrupted. The first interrupt ends it in order, a second one at once."""
    tally = Tally()
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    interrupted = False
    started = time.monotonic()
    async with barchan.connect_async(**common.connection) as client, make_policy() as policy:
        await _require_template(client, settings.template)
        with Progress(len(tasks) * settings.group, tally) as progress:

            def keep(record: RolloutRecord) -> None:
                store.add(record)
                tally.add(record)
                progress.update()

            runner = Runner(client, tasks, policy, settings, keep, open_log=store.open_log)
            try:
                await runner.run()
            except asyncio.CancelledError:
                task.uncancel()
                interrupted = True
    summary = tally.summary(
        run_id=settings.run_id,
        task_set="humaneval",
        policy=policy_name,
        not_started=runner.rollouts_total - tally.rollouts,
        wall_s=time.monotonic() - started,
        out=str(store.path),
    )
    store.finish(summary)
    return summary, interrupted


async def _require_template(client: AsyncClient, template: str) -> None:
    """Better one line now than every rollout void."""
    names = [name for image in await client.images() for name in (image.name, image.digest)]
    if not any(name == template or name.startswith(template) for name in names):
        raise NotFound(f"no image {template!r} (try: sudo barchan image build debian)")
