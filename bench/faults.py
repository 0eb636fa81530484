"""Every kind of fault done to runs whose true rewards are known: does a reward ever come of one?

    sudo python -m bench.faults --tasks 4 --out faults.json
    sudo python -m bench.faults --plan node-kill --plan oom-host --policy oracle

Each plan is a run of HumanEval of its own, in groups of 16, by the oracle, whose every attempt is right, and by a
policy of which about half are; runs under faults of a model's server ask one that answers so. A reward that is not the
true one is a false-valid, and there must be none; what was void though nothing hit it is a false-void, and is told.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from msgspec import Struct

from barchan.rollout.task import Task
from barchan.rollout.tasksets.humaneval import load
from barchan.sdk.endpoint import default_state_dir
from barchan.testing.faults.campaign import Campaign
from barchan.testing.faults.endpoint import MODEL, HalfRightServer
from barchan.testing.faults.judge import FaultTable, Truth
from barchan.testing.faults.plan import read_plan
from barchan.testing.faults.policies import NAME, always_right, half_right

GROUP = 16
HUNG_S = 900.0
NONE = "none"
TURNS = 4  # so often does a fault at moments come in a run of any size, on average
# `each=TURN` stands for that share of the rollouts; `none` shows that the truth is the truth.
PLANS: dict[str, tuple[str, ...]] = {
    NONE: ("connection-cut:after=10h",),
    "node-kill": ("node-kill:each=TURN",),
    "node-stop": ("node-stop:each=TURN,times=2,for=6s",),
    "client-kill": ("client-kill:each=TURN,times=4",),
    "connection-cut": ("connection-cut:every=500ms",),
    "connection-silent": ("connection-silent:each=TURN,times=2,for=4s",),
    "init-kill": ("init-kill:share=25%", "init-kill:share=25%,role=grader"),
    "grader-kill": ("grader-kill:share=40%",),
    "grader-kill-again": ("grader-kill:share=20%,times=2", "grader-kill:share=20%,role=control"),
    "grader-stop": ("grader-stop:share=8%",),
    "oom-host": ("oom-host:each=TURN,for=2s",),
    "disk-full": ("disk-full:each=TURN,times=3,for=3s",),
    "image-missing": ("image-missing:each=TURN,for=50ms",),
    "store-slow": ("store-slow:after=0s,for=8s",),
    "store-corrupt": ("store-corrupt:after=0s,for=1500ms",),
    "store-down": ("store-down:after=0s,for=4s",),
    "endpoint-429": ("endpoint-429:each=TURN,for=2s",),
    "endpoint-500": ("endpoint-500:each=TURN,for=2s",),
    "endpoint-hang": ("endpoint-hang:each=TURN,for=2s",),
    "endpoint-garbage": ("endpoint-garbage:each=TURN,for=200ms",),
    "endpoint-cut": ("endpoint-cut:each=TURN,for=2s",),
    "everything": (
        "node-kill:each=TURN",
        "node-stop:each=TURN,times=1,for=4s",
        "client-kill:each=TURN,times=3",
        "connection-cut:every=2s",
        "init-kill:share=5%",
        "init-kill:share=5%,role=grader",
        "grader-kill:share=10%",
        "oom-host:each=TURN,for=1s",
        "disk-full:each=TURN,times=2,for=2s",
        "image-missing:each=TURN,for=50ms",
    ),
}


class Run(Struct, frozen=True, kw_only=True):
    """One plan by one policy."""

    plan: str
    policy: str
    has_hung: bool
    exit_code: int
    gave_up: int  # clients that ended in an error before the run was done; another one came
    table: FaultTable
    idle: tuple[str, ...]  # kinds of the plan that were done to nothing: the run shows nothing of them

    @property
    def ok(self) -> bool:
        return self.table.ok and not self.has_hung and not self.idle


async def run_plan(
    name: str, policy: str, tasks: list[Task], arguments: argparse.Namespace, out: Path, images: Path
) -> Run:
    words = ["humaneval", f"--limit={len(tasks)}", f"--group={GROUP}", f"--refill={GROUP}", "--breaker=0"]
    truth: Truth = half_right if policy == "half-right" else always_right
    turn = max(1, len(tasks) * GROUP // TURNS)
    plan = read_plan([word.replace("TURN", str(turn)) for word in PLANS[name]], arguments.seed)
    async with AsyncExitStack() as stack:
        base_url = None
        if name.startswith("endpoint-"):
            server = HalfRightServer(tasks, GROUP, arguments.seed)
            await stack.enter_async_context(server.opened())
            words += ["--policy=chat", f"--model={MODEL}", f"--seed={arguments.seed}"]
            base_url, truth = server.base_url, half_right
        else:
            words.append(f"--policy={NAME if policy == 'half-right' else policy}")
        campaign = Campaign(
            plan,
            words,
            out / f"{name}-{policy}",
            images=images,
            base_url=base_url,
            wall_s_max=HUNG_S,
            quiet=True,
            told=say if arguments.verbose else lambda text: None,
        )
        table = await campaign.run(truth)
    done = {row.kind for row in table.rows if row.injected}
    return Run(
        plan=name,
        policy=policy,
        has_hung=campaign.has_hung,
        exit_code=campaign.exit_code,
        gave_up=campaign.gave_up,
        table=table,
        idle=() if name == NONE else tuple(sorted({fault.kind for fault in plan.faults} - done)),
    )


def say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def line_of(run: Run) -> str:
    """One row of the table in docs/faults.md."""
    table = run.table
    injected = sum(row.injected for row in table.rows)
    hit = table.rollouts - next(row.hit for row in table.rows if row.kind == "none")
    void = sum_of(row.void for row in table.rows if row.kind != "none") if len(table.rows) == 2 else {}
    causes = ", ".join(f"{count} {cause}" for cause, count in void.items()) or str(table.void)
    wrong, wrongly_void = len(table.false_valid), len(table.false_void)
    return (
        f"| {run.plan} | {run.policy} | {injected} | {hit} | {table.right} | {causes} | {wrong} | {wrongly_void} "
        f"| {table.retried} | {table.resumed} | {table.wall_s:.0f} s |"
    )


def sum_of(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found


async def measure(arguments: argparse.Namespace) -> list[Run]:
    tasks, images = load()[: arguments.tasks], default_state_dir() / "images"
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="barchan-faults-", dir="/var/tmp") as name:
        folder = arguments.runs or Path(name)
        print("| plan | policy | injected | hit | right | void | false-valid | false-void | retried | resumed | wall |")
        print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
        asked = [
            (plan, policy)
            for plan in arguments.plan or PLANS
            for policy in (("half-right",) if plan.startswith("endpoint-") else arguments.policy or POLICIES)
        ]
        turns = asyncio.Semaphore(arguments.jobs)

        async def one(plan: str, policy: str) -> None:
            async with turns:
                run = await run_plan(plan, policy, tasks, arguments, folder, images)
                runs.append(run)
                print(line_of(run), flush=True)
                if run.exit_code or run.has_hung:
                    say(f"  {run.plan}: exit code {run.exit_code}" + ", given up: it hung" * run.has_hung)
                if run.gave_up:
                    say(f"  {run.plan}: {run.gave_up} clients ended in an error, and another one came")
                for wrong in (*run.table.false_valid, *run.table.false_void):
                    say(f"  {wrong}")
                if run.idle:
                    say(f"  done to nothing, so nothing is shown: {', '.join(run.idle)}")
                for left in run.table.left:
                    say(f"  left: {left}")

        async with asyncio.TaskGroup() as group:
            for plan, policy in asked:
                group.create_task(one(plan, policy))
    return runs


POLICIES = ("oracle", "half-right")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=10, help="the first so many of HumanEval's")
    parser.add_argument("--plan", action="append", choices=PLANS, help="only this plan; may be repeated")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="only this policy")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="keep the runs' folders here")
    parser.add_argument("--out", type=Path, help="a file for the findings as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="so many runs at a time; most of one is waiting")
    parser.add_argument("--verbose", action="store_true", help="tell each fault")
    arguments = parser.parse_args()
    runs = asyncio.run(measure(arguments))
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(runs)) + b"\n")
    return 0 if all(run.ok for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
