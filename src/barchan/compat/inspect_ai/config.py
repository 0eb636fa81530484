"""What a task says of its sandbox, in a file, in Python, or in one word."""

from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field

from barchan.errors import InvalidSpec
from barchan.sdk.options import CreateOptions

FILES = ("barchan.yaml", "barchan.yml", "barchan.json")
_SUFFIXES = (".yaml", ".yml", ".json")
_ELSEWHERE = ("url", "token_file", "state_dir", "capacity_wait_s", "grace_s")  # not the sandbox's own


class BarchanConfig(BaseModel):
    """A sandbox of a sample; the fields are those of `client.create()` where their names are.

    Attributes:
        template: Name or digest of an image the node has.
        backend: `auto`: the strongest isolation that the template and the host allow.
        start_within_s: What `auto` may choose takes at most this long to start.
        root: `capable`: programs run as root may change owners and users, as tools that install packages do.
        setup: A shell script that the sandbox's user runs before the sample's own files come.
        url: Of the node; None: this user's own, whose state is in `state_dir`.
        token_file: Where the token of that node is: what is here stands in inspect's logs, and a token must not.
        capacity_wait_s: How long a sample waits for room on the node.
        grace_s: How long sandboxes outlive an inspect that was killed, or told to clean nothing up.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str = "debian"
    layers: tuple[str, ...] = ()
    backend: str = "container"
    start_within_s: float | None = Field(default=None, gt=0)
    needs: tuple[str, ...] = ()
    memory_mib: int = 1024
    cpus: float = 1.0
    pids_max: int = 512
    disk_mib: int = 4096
    network: Literal["none", "open", "allow"] = "none"
    allow: tuple[str, ...] = ()
    user: str | None = None
    root: Literal["plain", "capable"] = "capable"
    workdir: str | None = None
    env: dict[str, str] = {}
    setup: str | None = None
    ttl_s: float | None = None
    url: str | None = None
    token_file: str | None = None
    state_dir: str | None = None
    capacity_wait_s: float = Field(default=300.0, ge=0)
    grace_s: float = Field(default=10.0, ge=0, le=86_400)

    def __hash__(self) -> int:
        """inspect_ai starts a task once for each distinct configuration."""
        return hash(self.model_dump_json())

    def options(self) -> CreateOptions:
        """Keywords of `client.create()`; those left as they are in Barchan are left out."""
        fields: dict[str, Any] = self.model_dump(exclude={"template", *_ELSEWHERE})
        if self.allow and self.network == "none":
            fields["network"] = "allow"
        left_out = {name for name, value in fields.items() if value is None or value == () or value == {}}
        return cast(CreateOptions, {name: value for name, value in fields.items() if name not in left_out})


def config_of(given: BaseModel | str | None) -> BarchanConfig:
    """Of what inspect_ai passes on: nothing, our own model, the path of a file, or the name of a template.

    Raises:
        InvalidSpec: It is a file that can't be read or says what it can't, or the model of another provider.
    """
    if given is None:
        return BarchanConfig()
    if isinstance(given, BarchanConfig):
        return given
    if not isinstance(given, str):
        raise InvalidSpec(f"a {type(given).__name__} does not configure a sandbox of Barchan: give a BarchanConfig")
    if not given.endswith(_SUFFIXES):
        return BarchanConfig(template=given)
    try:
        said = yaml.safe_load(Path(given).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidSpec(f"the sandbox configuration {given} can't be read: {error}") from error
    if not isinstance(said, dict | None):
        raise InvalidSpec(f"the sandbox configuration {given} is not a mapping of names to values")
    return validated(said or {}, given)


def validated(said: dict[str, Any], origin: str) -> BarchanConfig:
    """`origin` is named where it says what it can't."""
    try:
        return cast(BarchanConfig, BarchanConfig.model_validate(said))
    except ValueError as error:
        raise InvalidSpec(f"{origin}: {error}") from error
