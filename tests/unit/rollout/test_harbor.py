"""Harbor folders become tasks, or errors that name file and key."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from barchan.errors import TaskError
from barchan.rollout.calls import call_to
from barchan.rollout.task import DiffArtifact, FilesArtifact, ScriptGrader, SharedArtifact, Task
from barchan.rollout.tasksets.harbor import load_harbor
from barchan.sdk.dockerfile import BaseConfig
from barchan.sdk.recipe import Put, Recipe, Run

Make = Callable[..., Path]
CONFIG = 'schema_version = "1.4"\n'


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a task folder that is whole, with a `task.toml` and further files of one's own; None leaves one out."""

    def made(config: str = CONFIG, name: str = "task", **files: str | None) -> Path:
        folder = tmp_path / "set" / name
        content = {
            "task.toml": config,
            "instruction.md": "Do it.",
            "environment/Dockerfile": "FROM debian\nUSER agent\nRUN true\n",
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
            "solution/solve.sh": "true",
            **{key.replace("__", "/").replace("_dot_", "."): text for key, text in files.items()},
        }
        for path, text in content.items():
            if text is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return made


def only(path: Path, **options: object) -> Task:
    (task,) = load_harbor(path, **options)  # type: ignore[arg-type]
    return task


def grader(task: Task) -> ScriptGrader:
    assert isinstance(task.grader, ScriptGrader)
    return task.grader


def test_a_folder_as_it_is_made_first(make: Make) -> None:
    """Defaults: the network is open, the agent's layer is graded, by the image's user, with the tests over it."""
    folder = make()
    task = only(folder)
    assert (task.task_id, task.instruction, task.artifact) == ("task", "Do it.", DiffArtifact())
    assert (task.environment.network, task.environment.user, task.environment.workdir) == ("open", None, None)
    assert (task.limits.agent_s_max, task.limits.call_s_max) == (1800.0, 1800.0)
    assert grader(task) == ScriptGrader(
        command="/tests/test.sh",
        files=(
            Put(path="/tests", source=str(folder / "tests")),
            Put(path="/tests/test.sh", source=str(folder / "tests/test.sh"), mode=0o755),
        ),
        user="agent",
        network="open",
        timeout_s=600.0,
    )
    assert task.oracle == (call_to("bash", command="env DEBIAN_FRONTEND=noninteractive /solution/solve.sh"),)
    assert task.oracle_files == (
        Put(path="/solution", source=str(folder / "solution")),
        Put(path="/solution/solve.sh", source=str(folder / "solution/solve.sh"), mode=0o755),
    )
    recipe = task.environment.recipe
    assert recipe is not None and recipe.base == "debian" and recipe.user == "agent"
    first, logs = recipe.steps
    assert isinstance(first, Run) and first.command == ("/bin/sh", "-c", "true") and first.timeout_s == 600.0
    assert isinstance(logs, Run) and logs.network == "open" and "/logs/verifier" in logs.command[-1]
    assert msgspec.json.decode(msgspec.json.encode(task), type=Task) == task


FULL = """
version = "1.0"
source = "somewhere"
artifacts = ["/out"]
[task]
name = "org/task"
[metadata]
difficulty = "hard"
tags = ["a", "b"]
hours = 2.5
nested = { a = 1 }
[agent]
timeout_sec = 60
user = "worker"
network_mode = "allowlist"
allowed_hosts = ["example.org", "*.example.net"]
[verifier]
timeout_sec = 30.5
user = 0
network_mode = "public"
env = { KEY = "${TOKEN}", OTHER = "${NO:-default}", PLAIN = "$TOKEN" }
[environment]
network_mode = "no-network"
build_timeout_sec = 9.0
cpus = 2
memory_mb = 1024
storage = "2G"
gpus = 0
workdir = "/app"
env = { A = "1" }
mcp_servers = []
[environment.healthcheck]
command = "test -f /ready"
interval_sec = 1
timeout_sec = 2
retries = 4
start_period_sec = 3
[solution]
env = { HOW = "a b" }
"""


def test_a_folder_that_says_all(make: Make) -> None:
    """Every supported key arrives where it counts; variables of the caller are put in where they are asked for."""
    task = only(make(FULL), variables={"TOKEN": "secret"})
    environment = task.environment
    assert (environment.network, environment.allow_hosts) == ("allow", ("example.org", "*.example.net"))
    assert (environment.user, environment.workdir, environment.env) == ("worker", "/app", {"A": "1"})
    assert (environment.cpus, environment.memory_mib, environment.disk_mib) == (2.0, 1024, 2048)
    (service,) = environment.services
    assert (service.name, service.ready, service.ready_s_max, service.cwd) == (
        "healthcheck",
        "test -f /ready",
        15.0,
        "/app",
    )
    found = grader(task)
    assert (found.user, found.timeout_s, found.network, found.cwd) == ("0", 30.5, "open", "/app")
    assert found.env == {"A": "1", "KEY": "secret", "OTHER": "default", "PLAIN": "$TOKEN"}
    assert found.services
    assert (task.limits.agent_s_max, task.limits.call_s_max) == (60.0, 60.0)
    assert task.oracle[0].arguments == (
        '{"command":"env DEBIAN_FRONTEND=noninteractive \'HOW=a b\' /solution/solve.sh"}'
    )
    assert task.labels == {
        "source": "harbor",
        "name": "org/task",
        "difficulty": "hard",
        "tags": "a, b",
        "hours": "2.5",
    }


@pytest.mark.parametrize(
    ("verifier", "expected"),
    [
        ('environment_mode = "shared"', SharedArtifact()),
        ('environment_mode = "separate"', FilesArtifact(paths=("/logs/artifacts", "/out", "/app/rel"))),
        ("[verifier.environment]", FilesArtifact(paths=("/logs/artifacts", "/out", "/app/rel"))),
        ("", DiffArtifact()),
    ],
)
def test_what_is_graded(make: Make, verifier: str, expected: object) -> None:
    """Shared only where it is asked for; separate takes what is declared; else the agent's whole layer."""
    config = f'artifacts = ["/out", {{ source = "rel" }}]\n[environment]\nworkdir = "/app"\n[verifier]\n{verifier}\n'
    assert only(make(config)).artifact == expected


def test_a_verifier_of_its_own(make: Make) -> None:
    """Its image holds the tests, so nothing is put over it; its network and variables are its own."""
    config = (
        '[environment]\nenv = { A = "1" }\n[verifier.environment]\nnetwork_mode = "no-network"\nenv = { B = "2" }\n'
    )
    folder = make(config, tests__Dockerfile="FROM debian\nCOPY test.sh /tests/\n")
    found = grader(only(folder))
    assert found.recipe is not None and found.recipe.steps[0] == Put(
        path="/tests/test.sh", source=str(folder / "tests/test.sh")
    )
    assert (found.files, found.network, found.env, found.user) == ((), "none", {"B": "2"}, "root")


def test_an_image_by_name(make: Make) -> None:
    """`docker_image` is an image of the node, by this name or another; loose files go to the working directory."""
    config = '[environment]\ndocker_image = "ubuntu:24.04"\nworkdir = "/app"\n'
    folder = make(config, environment__Dockerfile=None, environment__data="x")
    recipe = only(folder, bases={"ubuntu:24.04": "debian"}).environment.recipe
    assert isinstance(recipe, Recipe) and recipe.base == "debian"
    assert recipe.steps[0] == Put(path="/app", source=str(folder / "environment"))
    last = recipe.steps[-1]
    assert isinstance(last, Run) and last.network == "none"


def test_a_folder_of_folders(make: Make) -> None:
    """Tasks come in the order of their names; other folders and files don't matter."""
    make(name="b")
    root = make(name="a", solution__solve_dot_sh=None).parent
    (root / "README.md").write_text("x")
    (root / "assets").mkdir()
    (root / ".git" / "tests").mkdir(parents=True)
    tasks = load_harbor(root)
    assert [task.task_id for task in tasks] == ["a", "b"]
    assert (tasks[0].oracle, tasks[0].oracle_files) == ((), ())


@pytest.mark.parametrize(
    ("config", "key", "why"),
    [
        ("x = 1", "", "unknown field `x`"),
        ("[environment]\nfoo = 1", "environment", "unknown field `foo`"),
        ("[verifier.environment]\nfoo = 1", "verifier.environment", "unknown field `foo`"),
        ('[agent]\ntimeout_sec = "1"', "agent.timeout_sec", "Expected `float | null`"),
        ("[environment]\ncpus = true", "environment.cpus", "Expected"),
        ('schema_version = "2.0"', "schema_version", "not one of 1.0 to 1.4"),
        ("[[steps]]\nname = 'a'", "steps", "several steps"),
        ("multi_step_reward_strategy = 'mean'", "multi_step_reward_strategy", "one step"),
        ("[environment]\ngpus = 1", "environment.gpus", "no GPU"),
        ("[environment]\ngpu_types = ['H100']", "environment.gpu_types", "no GPU"),
        ("[environment.tpu]\ntype = 'v6e'", "environment.tpu", "no TPU"),
        ("[environment]\nos = 'windows'", "environment.os", "only linux"),
        ("[[environment.mcp_servers]]\nname = 'x'", "environment.mcp_servers", "MCP"),
        ("[environment]\nskills_dir = '/s'", "environment.skills_dir", "skills"),
        ("[verifier.environment]\nmemory_mb = 1", "verifier.environment.memory_mb", "not supported"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]", "verifier.environment", "shared"),
        ("[[verifier.collect]]\ncommand = 'x'", "verifier.collect", "not supported"),
        ("artifacts = [{source = '/x', service = 'db'}]", "artifacts.service", "no other services"),
        ("artifacts = [{source = '/x', exclude = ['y']}]", "artifacts.exclude", "not supported"),
        ("artifacts = ['/x/../y']", "artifacts.source", "leads out"),
        ("artifacts = ['x']\n[verifier.environment]", "artifacts", "say environment.workdir"),
        ("[environment]\nstorage = 'much'", "environment.storage", "no size"),
        ("[agent]\nallowed_hosts = ['a.b']", "agent.allowed_hosts", "allowlist"),
        ("[environment]\nallowed_hosts = ['a.b']", "environment.allowed_hosts", "allowlist"),
        (
            "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['10.0.0.0/8']",
            "agent.allowed_hosts",
            "addresses are not supported",
        ),
        (
            "[agent]\nnetwork_mode = 'no-network'\n[verifier]\nenvironment_mode = 'shared'",
            "verifier.network_mode",
            "in shared mode",
        ),
        ("[verifier.env]\nA = '${NO}'", "verifier.env.A", "no variable NO"),
        ("[environment]\ndocker_image = 'x'", "environment.workdir", "where the files"),
        ("this is no toml", "", "can't be read"),
    ],
)
def test_what_is_refused_by_its_key(make: Make, config: str, key: str, why: str) -> None:
    """An unknown key, a wrong type, and what no sandbox here can do: an error with the file and the key."""
    folder = make(f"{config}\n", environment__Dockerfile=None, environment__x="x") if "docker_image" in config else None
    folder = folder or make(f"{config}\n")
    with pytest.raises(TaskError) as refused:
        load_harbor(folder)
    assert refused.value.details == {"file": str(folder / "task.toml"), "key": key}
    assert str(refused.value).startswith(f"{folder / 'task.toml'}: {f'{key}: ' if key else ''}")
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("files", "name", "why"),
    [
        ({"instruction_dot_md": None}, "instruction.md", "is missing"),
        ({"tests__test_dot_sh": None}, "tests/test.sh", "is missing"),
        ({"environment__Dockerfile": None}, "environment/Dockerfile", "is missing"),
        ({"environment__Dockerfile": "FROM a\nVOLUME /x\n"}, "environment/Dockerfile", "2: VOLUME: is not supported"),
        ({"environment__docker-compose_dot_yaml": ""}, "environment/docker-compose.yaml", "compose"),
        ({"trajectory_dot_json": "{}"}, "trajectory.json", "not supported"),
        ({"steps__a": ""}, "steps", "not supported"),
        ({"_dot_harborignore": ""}, ".harborignore", "not supported"),
    ],
)
def test_what_is_refused_by_its_file(make: Make, files: dict[str, str | None], name: str, why: str) -> None:
    """A missing file, and one that means something unsupported, is named."""
    folder = make(**files)
    with pytest.raises(TaskError) as refused:
        load_harbor(folder)
    assert refused.value.details == {"file": str(folder / name), "key": ""}
    assert str(refused.value).startswith(f"{folder / name}: ") and why in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["task.toml", "instruction.md", "tests", "tests/test.sh", "solution", "solution/solve.sh", "environment",
     "environment/Dockerfile", "environment/.dockerignore"],
)  # fmt: skip
def test_links_out_of_a_folder(make: Make, tmp_path: Path, name: str) -> None:
    """A task folder of somebody else's brings nothing but its own files; one may link to another of them."""
    folder = make()
    elsewhere = tmp_path / "secret"
    if (folder / name).is_dir():
        (folder / name).rename(elsewhere)
    else:
        elsewhere.write_text(CONFIG)
        (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(TaskError, match="leads out of the task's folder") as refused:
        load_harbor(folder)
    assert refused.value.details["file"] == str(folder / name)
    (folder / name).unlink()
    elsewhere.rename(folder / "own")
    (folder / name).symlink_to(folder / "own")
    if name in ("task.toml", "instruction.md", "tests", "tests/test.sh", "solution", "environment"):
        load_harbor(folder)


def test_a_folder_without_its_file(make: Make, tmp_path: Path) -> None:
    """A folder that is a task but for `task.toml` is not passed over; one without any task is an error, too."""
    folder = make()
    (folder / "task.toml").unlink()
    with pytest.raises(TaskError, match=r"set/task/task.toml: the file is missing"):
        load_harbor(folder.parent)
    with pytest.raises(TaskError, match="neither a task folder nor a folder of them"):
        load_harbor(tmp_path)
    with pytest.raises(TaskError, match=r"no/task.toml: the file is missing"):
        load_harbor(tmp_path / "no")


def test_a_dockerfile_goes_on_from_its_base(make: Make) -> None:
    """Its user and folder are those of the base, where they are known; the verifier runs as that user, too."""
    folder = make(environment__Dockerfile="FROM base\nRUN true\n")
    known = {"base": BaseConfig(user="app", workdir="/srv")}
    task = only(folder, base_config=known.get)
    recipe = task.environment.recipe
    assert recipe is not None and isinstance(recipe.steps[0], Run)
    assert (recipe.user, recipe.workdir, recipe.steps[0].user, grader(task).user) == ("app", "/srv", "app", "app")
