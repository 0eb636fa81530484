"""Harbor task folders as tasks. What of the format is supported, and what is refused: docs/rollouts.md."""

import ipaddress
import os
import posixpath
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from barchan.errors import InvalidSpec, TaskError
from barchan.model.sandbox import Network
from barchan.rollout.calls import call_to
from barchan.rollout.limits import Limits
from barchan.rollout.task import (
    ArtifactSpec,
    DiffArtifact,
    Environment,
    FilesArtifact,
    ScriptGrader,
    Service,
    SharedArtifact,
    Task,
)
from barchan.rollout.tasksets.harbor_config import (
    CONFIG,
    Config,
    EnvironmentFields,
    Healthcheck,
    Mode,
    read_config,
    sources,
    task_error,
)
from barchan.sdk.build import network_of
from barchan.sdk.dockerfile import BaseConfig, load_dockerfile
from barchan.sdk.recipe import Put, Recipe, Run

ARTIFACTS = "/logs/artifacts"
LOGS = ("/logs/agent", "/logs/verifier", ARTIFACTS)
COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
PARTS = ("instruction.md", "environment", "tests", "solution")
# What is read of a folder here. What else lies in one that is sent is checked then: its links must stay in it.
READ = (
    CONFIG,
    *PARTS,
    "tests/test.sh",
    "solution/solve.sh",
    *(
        f"{folder}/{name}"
        for folder in ("environment", "tests")
        for name in ("Dockerfile", "Dockerfile.dockerignore", ".dockerignore")
    ),
)
_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([GMK])", re.IGNORECASE)
# What a script says that fetches something: an installer, or a program that reads from an address.
_INSTALLS = re.compile(
    r"^[^#\n]*\b(apt(-get)?|apk|dnf|yum|pip3?|uvx?|pipx|conda|npm|npx|cargo|go|gem|curl|wget)\s", re.M
)
_KIB = {"K": 1, "M": 1 << 10, "G": 1 << 20}


def load_harbor(
    path: Path,
    *,
    bases: Mapping[str, str] = {},
    variables: Mapping[str, str] = {},
    build_network: Network = "open",
    base_config: Callable[[str], BaseConfig | None] = lambda name: None,
) -> list[Task]:
    """The tasks of one task folder, or of a folder of them, by name.

    Args:
        bases: Names of the node's images by what FROM or `docker_image` says, where that is another name.
        variables: For `${NAME}` in the tables of environment variables.
        build_network: What the RUN steps of their Dockerfiles may reach.
        base_config: What an image of the node starts with, by its name; None where it is not known.

    Raises:
        TaskError: A folder can't be used; the message and `details` name the file, and the key in it.
    """
    if (path / CONFIG).exists() or not path.is_dir():
        return [_Folder(path, bases, variables, build_network, base_config).task()]
    folders = [entry for entry in sorted(path.iterdir()) if entry.is_dir() and _is_task(entry)]
    if not folders:
        raise TaskError(f"{path}: neither a task folder nor a folder of them: there is no {CONFIG}")
    return [_Folder(folder, bases, variables, build_network, base_config).task() for folder in folders]


def _is_task(folder: Path) -> bool:
    """A folder that looks like one without its `task.toml` counts, so that this is said."""
    return any((folder / name).exists() for name in (CONFIG, *PARTS)) and not folder.name.startswith(".")


class _Folder:
    def __init__(
        self,
        path: Path,
        bases: Mapping[str, str],
        variables: Mapping[str, str],
        build_network: Network,
        base_config: Callable[[str], BaseConfig | None],
    ) -> None:
        self._path = path.absolute()
        self._bases = bases
        self._variables = variables
        self._build_network: Network = build_network
        self._base_config = base_config
        for name in READ:
            if not Path(os.path.realpath(self._path / name)).is_relative_to(os.path.realpath(self._path)):
                raise task_error(self._path / name, "", "leads out of the task's folder")
        self._config: Config = read_config(self._path)

    def task(self) -> Task:
        config = self._config
        for name in ("trajectory.json", ".harborignore", "steps", "tests/.harborignore", "solution/.harborignore"):
            if (self._path / name).exists():
                raise task_error(self._path / name, "", "is not supported")
        recipe = self._recipe("environment", config.environment, self._path / "environment")
        default = Limits()
        agent_s = config.agent.timeout_sec or default.agent_s_max
        solution = self._path / "solution" / "solve.sh"
        return Task(
            task_id=self._path.name,
            instruction=self._text("instruction.md"),
            grader=self._grader(recipe),
            artifact=self._artifact(),
            environment=self._environment(recipe),
            oracle=(call_to("bash", command=self._solve()),) if solution.exists() else (),
            oracle_files=_scripts(solution, "/solution") if solution.exists() else (),
            limits=replace(default, agent_s_max=agent_s, call_s_max=agent_s),
            labels=_labels(config),
        )

    # files

    def _text(self, name: str) -> str:
        try:
            return (self._path / name).read_text("utf-8")
        except FileNotFoundError as error:
            raise task_error(self._path / name, "", "the file is missing") from error
        except (OSError, UnicodeDecodeError) as error:
            raise task_error(self._path / name, "", f"it can't be read: {error}") from error

    def _wrong(self, key: str, message: str) -> TaskError:
        return task_error(self._path / CONFIG, key, message)

    def _env(self, key: str, table: Mapping[str, str]) -> dict[str, str]:
        """A table of variables, with those of the caller put in."""
        found = {}
        for name, value in table.items():
            if asked := _TEMPLATE.fullmatch(value):
                known = self._variables.get(asked.group(1), asked.group(2))
                if known is None:
                    raise self._wrong(f"{key}.{name}", f"there is no variable {asked.group(1)} to put in")
                value = known
            found[name] = value
        return found

    # where the agent works

    def _recipe(self, key: str, fields: EnvironmentFields, folder: Path) -> Recipe:
        """The image that a table and its folder mean."""
        for name in COMPOSE:
            if (folder / name).exists():
                raise task_error(folder / name, "", "several services (compose) are not supported")
        dockerfile = folder / "Dockerfile"
        if fields.docker_image is not None:
            recipe = Recipe(base=self._bases.get(fields.docker_image, fields.docker_image))
            if folder.is_dir() and not dockerfile.exists() and any(folder.iterdir()):
                if fields.workdir is None:
                    raise self._wrong(f"{key}.workdir", f"say where the files of {folder.name}/ go")
                recipe = replace(recipe, steps=(Put(path=fields.workdir, source=str(folder)),))
        elif dockerfile.exists():
            try:
                recipe = load_dockerfile(
                    dockerfile,
                    bases=self._bases,
                    base_config=self._base_config,
                    network=self._build_network,
                    timeout_s=fields.build_timeout_sec,
                )
            except InvalidSpec as error:
                raise task_error(dockerfile, "", str(error).removeprefix(f"{dockerfile}:")) from error
        else:
            raise task_error(dockerfile, "", f"the file is missing, and {key}.docker_image is not set")
        network, allow_hosts = network_of(recipe)
        command = f"mkdir -p {' '.join(LOGS)} && chmod 777 {' '.join(LOGS)}"
        logs = Run(command=("/bin/sh", "-c", command), cwd="/", network=network, allow_hosts=allow_hosts)
        return replace(recipe, steps=(*recipe.steps, logs))

    def _environment(self, recipe: Recipe) -> Environment:
        fields, agent = self._config.environment, self._config.agent
        baseline = self._baseline("environment", fields)
        network, allow_hosts = self._phase("agent", agent.network_mode, agent.allowed_hosts) or baseline
        return Environment(
            recipe=recipe,
            workdir=fields.workdir,
            user=None if agent.user is None else str(agent.user),
            env=self._env("environment.env", fields.env),
            network=network,
            allow_hosts=allow_hosts,
            memory_mib=self._mib("environment.memory", fields.memory_mb, fields.memory),
            cpus=fields.cpus,
            disk_mib=self._mib("environment.storage", fields.storage_mb, fields.storage),
            services=(_service(fields.healthcheck, fields.workdir),) if fields.healthcheck else (),
        )

    def _mib(self, key: str, mib: int | None, text: str | None) -> int | None:
        """A size, given as a number of MiB, or as text in an older form."""
        if mib is not None or text is None:
            return mib
        size = _SIZE.fullmatch(text.strip())
        if size is None:
            raise self._wrong(key, f"{text!r} is no size like 2G or 512M")
        return int(float(size.group(1)) * _KIB[size.group(2).upper()]) >> 10

    # networks

    def _baseline(self, key: str, fields: EnvironmentFields) -> tuple[Network, tuple[str, ...]]:
        mode = fields.network_mode
        if mode is None and fields.allow_internet is not None:
            mode = "public" if fields.allow_internet else "no-network"
        return self._network(key, mode or "public", fields.allowed_hosts)

    def _phase(self, key: str, mode: Mode | None, hosts: list[str] | None) -> tuple[Network, tuple[str, ...]] | None:
        if mode is None:
            if hosts is not None:
                raise self._wrong(f"{key}.allowed_hosts", 'goes with network_mode = "allowlist"')
            return None
        return self._network(key, mode, hosts)

    def _network(self, key: str, mode: Mode, hosts: list[str] | None) -> tuple[Network, tuple[str, ...]]:
        if mode != "allowlist":
            if hosts:
                raise self._wrong(f"{key}.allowed_hosts", 'goes with network_mode = "allowlist"')
            return ("open" if mode == "public" else "none"), ()
        for host in hosts or ():
            if _is_address(host):
                raise self._wrong(f"{key}.allowed_hosts", f"{host}: addresses are not supported, only names")
        return ("allow" if hosts else "none"), tuple(hosts or ())

    # how it is graded

    def _artifact(self) -> ArtifactSpec:
        """Where Harbor's own default is to grade beside what the agent has left running, the agent's layer is graded
        over a fresh base: only who says `shared` gets that.
        """
        verifier = self._config.verifier
        if verifier.environment_mode == "shared":
            return SharedArtifact()
        if verifier.environment_mode != "separate" and verifier.environment is None:
            return DiffArtifact()
        paths = [ARTIFACTS]
        for source in sources(self._config):
            workdir = self._config.environment.workdir
            if not source.startswith("/") and workdir is None:
                raise self._wrong("artifacts", f"{source}: say environment.workdir, or give an absolute path")
            if (path := posixpath.normpath(posixpath.join(workdir or "/", source))) not in paths:
                paths.append(path)
        return FilesArtifact(paths=tuple(paths))

    def _grader(self, agent_recipe: Recipe) -> ScriptGrader:
        config, verifier, tests = self._config, self._config.verifier, self._path / "tests"
        own = verifier.environment
        recipe = None
        if own is not None and (own.docker_image is not None or (tests / "Dockerfile").exists()):
            recipe = self._recipe("verifier.environment", own, tests)
        script = tests / "test.sh"
        if recipe is None and not script.exists():
            raise task_error(script, "", "the file is missing")
        workdir = config.environment.workdir if own is None else own.workdir or config.environment.workdir
        network, allow_hosts = self._grader_network()
        is_shared = verifier.environment_mode == "shared"
        installs = script.exists() and network != "none" and not is_shared and self._installs("tests/test.sh")
        user = verifier.user if verifier.user is not None else (recipe or agent_recipe).user or "root"
        return ScriptGrader(
            command="/tests/test.sh",
            files=_scripts(script, "/tests") if recipe is None else (),
            recipe=recipe,
            user=str(user),
            cwd=workdir,
            env={
                **self._env("environment.env", config.environment.env if own is None else own.env),
                **self._env("verifier.env", verifier.env),
            },
            network=network,
            allow_hosts=allow_hosts,
            timeout_s=verifier.timeout_sec,
            installs=installs,
            services=recipe is None and config.environment.healthcheck is not None,
        )

    def _installs(self, name: str) -> bool:
        return _INSTALLS.search(self._text(name)) is not None

    def _grader_network(self) -> tuple[Network, tuple[str, ...]]:
        agent, verifier, environment = self._config.agent, self._config.verifier, self._config.environment
        baseline = self._baseline("environment", environment)
        if verifier.environment is not None:
            baseline = self._baseline("verifier.environment", verifier.environment)
        found = self._phase("verifier", verifier.network_mode, verifier.allowed_hosts) or baseline
        agents = self._phase("agent", agent.network_mode, agent.allowed_hosts) or baseline
        if verifier.environment_mode == "shared" and found != agents:
            raise self._wrong(
                "verifier.network_mode", "a sandbox has one network for its life: in shared mode it is the agent's"
            )
        return found

    def _solve(self) -> str:
        env = {"DEBIAN_FRONTEND": "noninteractive", **self._env("solution.env", self._config.solution.env)}
        words = [f"{name}={value}" for name, value in env.items()]
        return shlex.join(["env", *words, "/solution/solve.sh"])


def _scripts(script: Path, target: str) -> tuple[Put, ...]:
    """A folder with its script, which can be run whatever its mode was."""
    return (
        Put(path=target, source=str(script.parent)),
        Put(path=f"{target}/{script.name}", source=str(script), mode=0o755),
    )


def _service(check: Healthcheck, workdir: str | None) -> Service:
    """Nothing starts an image's own program here: what a healthcheck waits for is the environment as it is."""
    return Service(
        name="healthcheck",
        command="true",
        ready=check.command,
        ready_s_max=check.ready_s_max,
        cwd=workdir,
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_network(host, strict=False)
    except ValueError:
        return False
    return True


def _labels(config: Config) -> dict[str, str]:
    """The metadata that fits a table: a line each."""
    labels = {"source": "harbor"}
    if config.task is not None:
        labels["name"] = config.task.name
    for key, value in config.metadata.items():
        if isinstance(value, str | int | float):
            labels[key] = str(value)
        elif isinstance(value, list) and all(isinstance(item, str) for item in value):
            labels[key] = ", ".join(value)
    return labels
