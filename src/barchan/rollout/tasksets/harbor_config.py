"""`task.toml` of a Harbor task folder, schema 1.0 to 1.4: what it may say, and what of that is refused by name."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from barchan.errors import TaskError

CONFIG = "task.toml"
SCHEMA = re.compile(r"1\.[0-4]")
Seconds = Annotated[float, Meta(gt=0, le=31_536_000)]
Count = Annotated[int, Meta(ge=1)]
Mode = Literal["public", "no-network", "allowlist"]


class Fields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table; an unknown key is an error."""


class Healthcheck(Fields, frozen=True, kw_only=True):
    command: str
    interval_sec: float = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3

    @property
    def ready_s_max(self) -> float:
        return self.start_period_sec + self.retries * (self.interval_sec + self.timeout_sec)


class EnvironmentFields(Fields, frozen=True, kw_only=True):
    """`[environment]`, and `[verifier.environment]`, which has the same form."""

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: Annotated[float, Meta(gt=0)] | None = None
    memory_mb: Count | None = None
    storage_mb: Count | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[Any] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: Mode | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None


class AgentFields(Fields, frozen=True, kw_only=True):
    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: Mode | None = None
    allowed_hosts: list[str] | None = None


class VerifierFields(Fields, frozen=True, kw_only=True):
    timeout_sec: Seconds = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentFields | None = None
    collect: list[Any] = []
    network_mode: Mode | None = None
    allowed_hosts: list[str] | None = None


class SolutionFields(Fields, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class ArtifactFields(Fields, frozen=True, kw_only=True):
    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class PackageFields(Fields, frozen=True, kw_only=True):
    name: str
    version: str | None = None
    description: str = ""
    authors: list[dict[str, Any]] = []
    keywords: list[str] = []


class Config(Fields, frozen=True, kw_only=True):
    """The whole file. `version` is an older name of `schema_version`."""

    schema_version: str = "1.4"
    version: str | None = None
    task: PackageFields | None = None
    metadata: dict[str, Any] = {}
    agent: AgentFields = AgentFields()
    verifier: VerifierFields = VerifierFields()
    environment: EnvironmentFields = EnvironmentFields()
    solution: SolutionFields = SolutionFields()
    source: str | None = None
    artifacts: list[str | ArtifactFields] = []
    steps: list[Any] | None = None
    multi_step_reward_strategy: str | None = None


def read_config(folder: Path) -> Config:
    """The checked file of a task folder.

    Raises:
        TaskError: It is missing or broken, or asks for what no sandbox of this kind has; `details` has file and key.
    """
    path = folder / CONFIG
    try:
        config = msgspec.convert(tomllib.loads(path.read_text("utf-8")), Config)
    except FileNotFoundError as error:
        raise task_error(path, "", "the file is missing") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise task_error(path, "", f"it can't be read: {error}") from error
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        raise task_error(path, where.strip(".`"), what) from error
    for key, is_asked, why in _refusals(config):
        if is_asked:
            raise task_error(path, key, why)
    return config


def task_error(path: Path, key: str, message: str) -> TaskError:
    """What is wrong, and where."""
    return TaskError(f"{path}: {f'{key}: ' if key else ''}{message}", file=str(path), key=key)


def _refusals(config: Config) -> list[tuple[str, bool, str]]:
    """What the schema has and this does not: key, whether it is asked for, why not."""
    version = config.version or config.schema_version
    artifacts = [artifact for artifact in config.artifacts if isinstance(artifact, ArtifactFields)]
    verifier = config.verifier
    return [
        ("schema_version", SCHEMA.fullmatch(version) is None, f"{version!r} is not one of 1.0 to 1.4"),
        ("steps", config.steps is not None, "tasks of several steps are not supported"),
        ("multi_step_reward_strategy", config.multi_step_reward_strategy is not None, "there is one step only"),
        *_refusals_of_environment("environment", config.environment),
        *_refusals_of_environment("verifier.environment", verifier.environment or EnvironmentFields()),
        (
            "verifier.environment",
            verifier.environment is not None and verifier.environment_mode == "shared",
            'environment_mode = "shared" has no environment of its own',
        ),
        *(
            (f"verifier.environment.{key}", value is not None, "is not supported; the grader has the agent's limits")
            for key, value in _sizes(verifier.environment or EnvironmentFields())
        ),
        ("verifier.collect", bool(verifier.collect), "commands between agent and verifier are not supported"),
        (
            "artifacts.service",
            any(artifact.service not in (None, "main") for artifact in artifacts),
            "there are no other services",
        ),
        ("artifacts.exclude", any(artifact.exclude for artifact in artifacts), "is not supported"),
        (
            "artifacts.source",
            any(".." in source.split("/") for source in sources(config)),
            "`..` leads out of the folder",
        ),
    ]


def _refusals_of_environment(at: str, fields: EnvironmentFields) -> list[tuple[str, bool, str]]:
    return [
        (f"{at}.os", fields.os.lower() != "linux", f"{fields.os!r} is not supported, only linux"),
        (f"{at}.gpus", bool(fields.gpus), "sandboxes have no GPU"),
        (f"{at}.gpu_types", bool(fields.gpu_types), "sandboxes have no GPU"),
        (f"{at}.tpu", fields.tpu is not None, "sandboxes have no TPU"),
        (f"{at}.mcp_servers", bool(fields.mcp_servers), "MCP servers are not supported"),
        (f"{at}.skills_dir", fields.skills_dir is not None, "no policy here has a folder for skills"),
    ]


def _sizes(fields: EnvironmentFields) -> list[tuple[str, object]]:
    names = ("cpus", "memory_mb", "storage_mb", "memory", "storage", "healthcheck")
    return [(name, getattr(fields, name)) for name in names]


def sources(config: Config) -> list[str]:
    """Paths of the declared artifacts."""
    return [artifact if isinstance(artifact, str) else artifact.source for artifact in config.artifacts]
