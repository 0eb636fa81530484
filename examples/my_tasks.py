"""Two tasks of one's own: a file graded by a function of this module, and a program graded by a script.

barchan rollout examples/my_tasks.py
barchan rollout examples/my_tasks.py --policy nop
"""

from barchan.rollout.calls import call_to
from barchan.rollout.graders.base import Artifact
from barchan.rollout.task import FileArtifact, PythonGrader, ScriptGrader, Task

WANTED = "2 3 5 7 11 13 17 19 23 29"


def tasks() -> list[Task]:
    """What `barchan rollout` asks for."""
    return [
        Task(
            task_id="primes",
            instruction="Write the first ten primes into answer.txt, one a line, smallest first. Then call submit.",
            artifact=FileArtifact(path="answer.txt"),
            grader=PythonGrader(function="my_tasks:grade_primes"),
            oracle=(
                call_to("bash", command=f"printf '%s\\n' {WANTED} >answer.txt"),
                call_to("submit"),
            ),
        ),
        Task(
            task_id="count-words",
            instruction="Write a shell script count.sh that prints how many words it reads. Then call submit.",
            artifact=FileArtifact(path="count.sh"),
            grader=ScriptGrader(command=CHECK_COUNT, timeout_s=60),
            oracle=(call_to("submit", solution="wc -w\n"),),
        ),
    ]


# Runs where the agent never was, beside the file that the agent left. Its exit code means nothing.
CHECK_COUNT = """
said=$(printf 'one two\\nthree\\n' | sh count.sh | tr -d '[:space:]')
if [ "$said" = 3 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""


def grade_primes(task: Task, artifact: Artifact) -> dict[str, float]:
    """The share of lines that are right; what else it gives is kept as metrics."""
    lines, wanted = artifact.data.decode("utf-8", "replace").split(), WANTED.split()
    right = sum(line == prime for line, prime in zip(lines, wanted, strict=False))
    return {"reward": right / max(len(wanted), len(lines)), "lines": len(lines)}
