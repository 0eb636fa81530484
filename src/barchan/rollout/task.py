"""A problem to attempt, as rollouts see it. Values only: a task can be written to a file and read back."""

from msgspec import Struct

from barchan.model.sandbox import Env, Network, Root
from barchan.rollout.calls import ToolCall
from barchan.rollout.limits import Limits
from barchan.sdk.recipe import Put, Recipe

TOOLS = ("bash", "python", "edit", "submit")
ANSWER_FILE = "solution.py"


class Service(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that runs in the agent's sandbox beside it, and in the grader's where the grader asks for it.

    Attributes:
        command: Run by a shell.
        port: Ready when something listens there on 127.0.0.1.
        ready: Ready when this command succeeds; beside `port` both must hold.
        ready_s_max: From its start; one that is not ready by then voids the rollout before the policy acted.
    """

    name: str
    command: str
    port: int | None = None
    ready: str | None = None
    ready_s_max: float = 60.0
    user: str = "root"
    cwd: str | None = None
    env: Env = {}


class Environment(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the agent works. What is None is the run's.

    Attributes:
        recipe: Made once, before the first rollout needs it; a group's members all start from it.
        root: What power root has in the agent's sandbox; see `SandboxSpec`.
        network, allow_hosts: What the agent's sandbox may reach.
        memory_mib: What the task declares that an attempt needs.
        memory_limit_mib: Where the kernel stops it; None, or less than declared: as declared.
    """

    recipe: Recipe | None = None
    workdir: str | None = None
    user: str | None = None
    root: Root = "plain"
    env: Env = {}
    network: Network = "none"
    allow_hosts: tuple[str, ...] = ()
    memory_mib: int | None = None
    memory_limit_mib: int | None = None
    cpus: float | None = None
    disk_mib: int | None = None
    pids_max: int | None = None
    services: tuple[Service, ...] = ()


# What leaves the agent's sandbox


class FileArtifact(Struct, frozen=True, kw_only=True, tag="file", forbid_unknown_fields=True):
    """One regular file. `submit` can write it."""

    path: str = ANSWER_FILE
    bytes_max: int = 1 << 20


class PatchArtifact(Struct, frozen=True, kw_only=True, tag="patch", forbid_unknown_fields=True):
    """All that differs in a git work tree from `base`, new files included, as one patch."""

    repo: str
    base: str
    bytes_max: int = 8 << 20


class FilesArtifact(Struct, frozen=True, kw_only=True, tag="files", forbid_unknown_fields=True):
    """Files and folders by path, as one tar; a missing one is left out, and said in the evidence."""

    paths: tuple[str, ...]
    bytes_max: int = 64 << 20


class DiffArtifact(Struct, frozen=True, kw_only=True, tag="diff", forbid_unknown_fields=True):
    """All that the sandbox's own layer holds, laid over a fresh base. No process of the agent's survives, but whatever
    it has written does, programs included: the verdict is `exposed`.
    """


class SharedArtifact(Struct, frozen=True, kw_only=True, tag="shared", forbid_unknown_fields=True):
    """Nothing leaves: the grader runs in the agent's sandbox, beside what still runs there. It is `exposed`, too."""


ArtifactSpec = FileArtifact | PatchArtifact | FilesArtifact | DiffArtifact | SharedArtifact


# How it is graded


class FunctionGrader(Struct, frozen=True, kw_only=True, tag="functions", forbid_unknown_fields=True):
    """Calls one Python function of the artifact (a `FileArtifact`), and checks what it gives.

    Attributes:
        entry_point: Name of the function that is called.
        reference: A known-good solution, whole: the control.
        checks: Trusted Python source that defines `check(candidate)`; after each of its assertions it calls
            `__passed__(index)` with that assertion's index.
        checks_total: How many assertions `checks` has; a pass is all of them.
    """

    entry_point: str
    reference: str
    checks: str
    checks_total: int


class ScriptGrader(Struct, frozen=True, kw_only=True, tag="script", forbid_unknown_fields=True):
    """Runs a command in a sandbox that has the artifact, and reads the reward that it wrote.

    Attributes:
        command: Run by a shell. Its exit code is evidence and never a reward.
        files: Put in place after the artifact, before the command: the agent never saw them.
        recipe: What the grader's sandbox is made from, in place of the environment's; None: that one.
        reward_text, reward_json: Where the command writes a number, or an object of numbers whose `reward` (or only
            member) is the reward and whose others are metrics. The JSON counts where both are there.
        network, allow_hosts: What the command may reach.
        services: Whether the environment's services are started first.
        installs: The command installs what it needs. Its root is capable; and once `prepare` has kept what it installs
            as an image, that lies under the artifact and the command has no network.
    """

    command: str
    files: tuple[Put, ...] = ()
    recipe: Recipe | None = None
    reward_text: str = "/logs/verifier/reward.txt"
    reward_json: str = "/logs/verifier/reward.json"
    user: str = "root"
    cwd: str | None = None
    env: Env = {}
    network: Network = "none"
    allow_hosts: tuple[str, ...] = ()
    timeout_s: float = 600.0
    services: bool = False
    installs: bool = False


class TestsGrader(Struct, frozen=True, kw_only=True, tag="tests", forbid_unknown_fields=True):
    """Applies a patch (a `PatchArtifact`) to a fresh environment, puts the task's own tests over it, and runs them; the
    reward is 1 when every test of both lists passed.

    Attributes:
        test_patch: The tests, as a patch against the artifact's base; the files it touches are first made as in base.
        command: Run by a shell in the repository. `{tests}` is replaced by the tests' files, `{junit}` by the path of
            the JUnit XML that it has to write.
        fail_to_pass, pass_to_pass: Test ids: `path::name`, as pytest has them.
        reference: The known-good patch: the control.
        recipe: What the grader's sandbox is made from, in place of the environment's; None: that one.
    """

    test_patch: str
    command: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    reference: str = ""
    recipe: Recipe | None = None
    user: str = "root"
    env: Env = {}
    timeout_s: float = 1800.0


class PythonGrader(Struct, frozen=True, kw_only=True, tag="python", forbid_unknown_fields=True):
    """A trusted function of the caller's, run in the caller's process.

    Attributes:
        function: `module:name`. Called with the task and the artifact (and a sandbox, if `sandbox`); gives a reward, or
            an object of numbers as `ScriptGrader` has it; may be async.
        sandbox: It works in a fresh sandbox that holds the artifact.
    """

    function: str
    sandbox: bool = False
    timeout_s: float = 60.0


class JudgeGrader(Struct, frozen=True, kw_only=True, tag="judge", forbid_unknown_fields=True):
    """Asks a model behind an OpenAI-compatible address, and reads a number from its answer.

    Attributes:
        prompt: `{instruction}` and `{artifact}` are replaced.
        pattern: A regular expression whose last match's first group is the score.
        score_max: The score that means a reward of 1.
        samples: Answers asked for; the reward is their mean. All of them are logged.
        api_key_env: The environment variable of this process that holds the key, if there is one.
    """

    prompt: str
    base_url: str
    model: str
    pattern: str = r"(?i)score\W+?(-?\d*\.?\d+)"
    score_max: float = 10.0
    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 1024
    api_key_env: str = "OPENAI_API_KEY"
    timeout_s: float = 120.0


GraderSpec = FunctionGrader | ScriptGrader | TestsGrader | PythonGrader | JudgeGrader


class Stub(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a task that asks for one function: the text that an answer goes on from, and the function's name."""

    prompt: str
    entry_point: str


class Task(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a policy is asked to do, where, and how that is judged.

    Attributes:
        instruction: What a policy with tools is told.
        oracle: A known-good attempt as tool calls, one a turn: what the oracle policy plays, and what makes a
            known-good artifact where the grader's spec has none.
        oracle_files: What the oracle's calls need, put in place before the first of them: for the oracle policy, and
            where a known-good artifact is made. No other policy's sandbox ever has them.
        canaries: Absolute paths of decoys in the agent's sandbox: files that look like an answer. An artifact that was
            made from one is scored 0 (docs/integrity.md).
        nop: What the nop policy does; nothing at all when empty.
        stub: Whoever has one turn only is asked to complete this, where there is one.
        tools: What the policy may call: names of our own tools, or `module:Class` for one of the task's
            (`barchan.rollout.tools`).
        limits: How far one attempt may go.
        labels: Facts about the task, for tables: difficulty, repository, source.
    """

    task_id: str
    instruction: str
    grader: GraderSpec
    artifact: ArtifactSpec = FileArtifact()
    environment: Environment = Environment()
    oracle: tuple[ToolCall, ...] = ()
    oracle_files: tuple[Put, ...] = ()
    canaries: tuple[str, ...] = ()
    nop: tuple[ToolCall, ...] = ()
    stub: Stub | None = None
    tools: tuple[str, ...] = TOOLS
    limits: Limits = Limits()
    labels: dict[str, str] = {}
