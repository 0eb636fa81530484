"""The keywords of creating and running, once for both faces, and the requests they become."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from msgspec.structs import replace

from barchan.errors import InvalidSpec
from barchan.model.sandbox import CpuClass, ExecRequest, Need, Network, Root, SandboxSpec, StartRequest, Zygote
from barchan.model.tiers import Waiting
from barchan.sdk.checks import check_seconds, checked_bytes, checked_env, checked_labels, checked_rlimits
from barchan.wire.api import STDIN_INLINE_BYTES_MAX

Command = str | Sequence[str]
Request = TypeVar("Request", ExecRequest, StartRequest)


class CreateOptions(TypedDict, total=False):
    """Fields of `SandboxSpec`; `allow` is short for `network="allow"` with these `allow_hosts`."""

    layers: Sequence[str]
    backend: str
    start_within_s: float | None
    needs: Sequence[Need]
    memory_mib: int
    cpus: float
    cpu_class: CpuClass
    pids_max: int
    disk_mib: int
    network: Network
    allow: Sequence[str]
    ttl_s: float | None
    idle_timeout_s: float | None
    env: Mapping[str, str]
    labels: Mapping[str, str]
    user: str | None
    root: Root
    workdir: str | None
    hostname: str
    zygote: Zygote | None
    setup: str | None
    setup_timeout_s: float
    create_id: str | None
    lease_id: str | None
    detach: bool
    waiting: Waiting


class _RunOptions(TypedDict, total=False):
    process_id: str | None
    stdin: bytes | str | None
    env: Mapping[str, str]
    cwd: str | None
    user: str | None
    rlimits: Mapping[str, tuple[int, int]]
    merge_stderr: bool
    platform: bool
    restrained: bool


class ExecOptions(_RunOptions, total=False):
    """Fields of `ExecRequest`; text given as `stdin` is sent in UTF-8."""

    timeout_s: float
    max_output_bytes: int


class StartOptions(_RunOptions, total=False):
    """Fields of `StartRequest`; text given as `stdin` is sent in UTF-8."""

    timeout_s: float | None
    stdin_open: bool
    pty: bool
    rows: int
    cols: int
    overflow: Literal["drop", "block"]
    spool_bytes: int


def sandbox_spec(template: str | SandboxSpec, options: CreateOptions) -> SandboxSpec:
    """The spec a caller means, with a create id."""
    fields = spec_fields(options)
    spec = (
        replace(template, **fields) if isinstance(template, SandboxSpec) else SandboxSpec(template=template, **fields)
    )
    return spec if spec.create_id is not None else replace(spec, create_id=uuid.uuid4().hex)


def spec_fields(options: CreateOptions) -> dict[str, Any]:
    """What options say as fields of a spec, checked."""
    fields: dict[str, Any] = {**options}
    if (allow := fields.pop("allow", None)) is not None:
        if fields.get("network", "allow") != "allow" or isinstance(allow, str):
            raise InvalidSpec('allow= is a list of host names and means network="allow"')
        fields |= {"network": "allow", "allow_hosts": tuple(allow)}
    for name, what in (("layers", "names of images"), ("needs", "words")):
        if name in fields:
            if isinstance(fields[name], str):
                raise InvalidSpec(f"{name}= is a list of {what}")
            fields[name] = tuple(fields[name])
    for name, checked in (("env", checked_env), ("labels", checked_labels)):
        if name in fields:
            fields[name] = checked(fields[name])
    check_seconds(ttl_s=fields.get("ttl_s"), idle_timeout_s=fields.get("idle_timeout_s"))
    check_seconds(start_within_s=fields.get("start_within_s"))
    return fields


def exec_request(command: Command, options: ExecOptions) -> ExecRequest:
    if "timeout_s" in options and options["timeout_s"] is None:
        raise InvalidSpec("an exec has a bound: give timeout_s a number of seconds, or start() it")
    return _request(ExecRequest, command, {**options})


def start_request(command: Command, options: StartOptions) -> StartRequest:
    return _request(StartRequest, command, {**options})


def python_request(
    kind: type[Request], source: str, arguments: Sequence[str], options: ExecOptions | StartOptions
) -> Request:
    """Source for the warm interpreter."""
    if isinstance(arguments, str):
        raise InvalidSpec("args= is a list of words")
    return _finished(kind, {**options, "python": source, "argv": tuple(arguments) or None})


def zygote_spec(template: str, imports: Sequence[str], python: str) -> SandboxSpec:
    if isinstance(imports, str):
        raise InvalidSpec("imports= is a list of names of modules")
    return SandboxSpec(template=template, zygote=Zygote(imports=tuple(imports), python=python))


def _request(kind: type[Request], command: Command, fields: dict[str, Any]) -> Request:
    """A string runs in a shell, a sequence is the program and its arguments. Every request gets a process id."""
    if isinstance(command, str):
        fields["shell"] = command
        return _finished(kind, fields)
    what = "a command is a string for the shell, or a list of strings: a program and its arguments"
    given: object = command  # whatever its type says
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise InvalidSpec(f"{what}; not {type(given).__name__}")
    fields["argv"] = argv = tuple(given)
    for word in argv:
        if not isinstance(word, str):
            raise InvalidSpec(f"{what}; {word!r:.80} is {type(word).__name__}")
    if not argv:
        raise InvalidSpec(f"{what}; this one is empty")
    return _finished(kind, fields)


def _finished(kind: type[Request], fields: dict[str, Any]) -> Request:
    check_seconds(timeout_s=fields.get("timeout_s"))
    stdin = fields.get("stdin")
    if stdin is None:
        fields.pop("stdin", None)
    else:
        fields["stdin"] = stdin = checked_bytes("stdin", stdin)
        if len(stdin) > STDIN_INLINE_BYTES_MAX:
            raise InvalidSpec(
                f"{len(stdin)} bytes of stdin, more than {STDIN_INLINE_BYTES_MAX}: start() it and use write_stdin()"
            )
    for name, checked in (("env", checked_env), ("rlimits", checked_rlimits)):
        if name in fields:
            fields[name] = checked(fields[name])
    if fields.get("process_id") is None:
        fields["process_id"] = uuid.uuid4().hex
    return kind(**fields)


class ShellOptions(TypedDict, total=False):
    """Where and as whom a shell or terminal runs."""

    env: Mapping[str, str]
    cwd: str | None
    user: str | None
