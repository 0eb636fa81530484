"""A Dockerfile as a recipe. Reads the Dockerfile and looks at the context's names; builds nothing.

What is supported, and what differs from Docker: docs/images.md.
"""

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from barchan.errors import InvalidSpec
from barchan.model.image import NEEDS_LABEL, needs_of
from barchan.model.sandbox import Need, Network
from barchan.sdk.dockerignore import Ignored, read_ignored
from barchan.sdk.dockerwords import expand, split_words
from barchan.sdk.recipe import Put, Recipe, Run, Step, Take

# What Docker, and every image of ours, starts with: the variable of a base of which nothing is known.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELL = ("/bin/sh", "-c")
NO_EFFECT = ("EXPOSE",)  # a note for who runs a container
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$", re.IGNORECASE)
_HEREDOC = re.compile(r"(?:^|\s)\d*<<-?[\"']?[A-Za-z_]")
_FLAG = re.compile(r"--([a-z]+)(?:=(\S*))?(?:\s+|$)")
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)")


class BaseConfig(NamedTuple):
    """What the image that FROM names starts with, as far as its Dockerfile goes on from there."""

    user: str = "root"
    workdir: str = "/"
    env: Mapping[str, str] = {"PATH": PATH}
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class Line(NamedTuple):
    """One instruction: where it begins, its name in capitals, and all that follows."""

    number: int
    name: str
    rest: str


def load_dockerfile(
    path: Path,
    *,
    context: Path | None = None,
    args: Mapping[str, str] = {},
    bases: Mapping[str, str] = {},
    base_config: Callable[[str], BaseConfig | None] = lambda name: None,
    network: Network = "open",
    allow_hosts: tuple[str, ...] = (),
    timeout_s: float = 1800.0,
) -> Recipe:
    """The recipe of a Dockerfile on this machine: of its last stage, which has those that it needs in it.

    Args:
        context: Where COPY and ADD find their sources; by default the Dockerfile's folder.
        args: For its ARG instructions.
        bases: Names of the node's images by what FROM says, where that is another name.
        base_config: What an image of the node starts with, by its name; None where it is not known: root in `/`.
        network, allow_hosts: What its RUN steps may reach: a Docker build has a network.
        timeout_s: Of one step.

    Raises:
        InvalidSpec: It can't be read, or holds what is not supported; the message names file, line and instruction.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"the Dockerfile {path} can't be read: {error}") from error
    context = (context or path.parent).resolve()
    ignored = read_ignored(context, path)
    reader = _Reader(path.name, context, ignored, args, bases, base_config, network, allow_hosts, timeout_s)
    try:
        for line in lines_of(text):
            reader.take(line)
        return reader.recipe()
    except _At as error:
        raise InvalidSpec(f"{path}:{error}") from error


def where_named(path: Path, image: str) -> str:
    """Where a Dockerfile names an image, as `FILE:LINE: INSTRUCTION`; empty if nowhere in so many words."""
    for line in lines_of(path.read_text("utf-8")):
        if line.name in ("FROM", "COPY") and image in re.split(r"[\s=]", line.rest):
            return f"{path}:{line.number}: {line.name}"
    return ""


class _At(ValueError):
    """Something at a line of a Dockerfile."""

    def __init__(self, line: Line, message: object) -> None:
        super().__init__(f"{line.number}: {line.name}: {message}")


def lines_of(text: str) -> Iterator[Line]:
    """The instructions, with continued lines joined and comments left out."""
    raw = text.splitlines()
    for number, line in enumerate(raw, 1):
        directive = _DIRECTIVE.match(line)
        if directive is None:
            break
        if directive.group(1).lower() == "escape" and directive.group(2) != "\\":
            raise _At(Line(number, "escape", ""), "only the backslash is supported")
    begin, pieces = 0, list[str]()
    for number, line in enumerate(raw, 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        begin = begin if pieces else number
        stripped = line.rstrip()
        if stripped.endswith("\\"):
            pieces.append(stripped[:-1])
            continue
        yield _line(begin, "".join([*pieces, line]))
        pieces = []
    if pieces:
        yield _line(begin, "".join(pieces))


def _line(number: int, text: str) -> Line:
    name, _, rest = text.strip().partition(" ")
    name, tab, more = name.partition("\t")
    return Line(number, name.upper(), (more + tab + rest).strip())


@dataclass
class _Stage:
    """What the lines from one FROM to the next have come to. `known`: variables of the base and its own."""

    base: str | Recipe
    user: str
    workdir: str
    known: dict[str, str]
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    needs: tuple[Need, ...] = ()
    shell: tuple[str, ...] = SHELL
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    has_run: bool = False
    has_cmd: bool = False

    @property
    def variables(self) -> dict[str, str]:
        return {**self.known, **self.args, **self.env}

    def recipe(self) -> Recipe:
        """What was taken, as a recipe. Folders are made with the network that the commands have, so that one sandbox
        does for all; without a command there is no need of any.
        """
        steps = [
            replace(step, network="none", allow_hosts=()) if isinstance(step, Run) and not self.has_run else step
            for step in self.steps
        ]
        return Recipe(
            base=self.base,
            steps=tuple(steps),
            env=dict(self.env),
            user=self.user,
            workdir=self.workdir,
            entrypoint=self.entrypoint,
            cmd=self.cmd,
            needs=self.needs,
        )


class _Reader:
    """Takes the instructions in order, and knows what a step's surroundings are at each point."""

    def __init__(
        self,
        name: str,
        context: Path,
        ignored: Ignored,
        args: Mapping[str, str],
        bases: Mapping[str, str],
        base_config: Callable[[str], BaseConfig | None],
        network: Network,
        allow_hosts: tuple[str, ...],
        timeout_s: float,
    ) -> None:
        self._name = name
        self._context = context
        self._ignored = ignored
        self._given = args
        self._bases = bases
        self._base_config = base_config
        self._network: Network = network
        self._allow_hosts = allow_hosts
        self._timeout_s = timeout_s
        self._declared: set[str] = set()
        self._before_from: dict[str, str] = {}
        self._stages: dict[str, _Stage] = {}  # by name and by number
        self._count = 0
        self._now: _Stage | None = None
        self._takers: dict[str, Callable[[Line, _Stage], None]] = {
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
            "ENV": self._set_env,
            "WORKDIR": self._set_workdir,
            "USER": self._set_user,
            "SHELL": self._set_shell,
            "ENTRYPOINT": self._set_entrypoint,
            "CMD": self._set_cmd,
            "LABEL": self._set_label,
        }

    def take(self, line: Line) -> None:
        taker = self._takers.get(line.name)
        try:
            if line.name == "FROM":
                self._from(line)
            elif line.name == "ARG":
                self._arg(line)
            elif self._now is None:
                raise ValueError("comes before FROM")
            elif taker is not None:
                taker(line, self._now)
            elif line.name not in NO_EFFECT:
                raise ValueError("is not supported")
        except ValueError as error:
            raise error if isinstance(error, _At) else _At(line, error) from error

    def recipe(self) -> Recipe:
        """Of the last stage."""
        if self._now is None:
            raise _At(Line(1, "FROM", ""), "is missing")
        if unknown := sorted(set(self._given) - self._declared):
            raise _At(Line(1, "ARG", ""), f"nothing declares the argument {unknown[0]}")
        return self._now.recipe()

    # one instruction each

    def _from(self, line: Line) -> None:
        _, rest = _flags(line, "platform")
        words = split_words(rest, self._before_from)
        if len(words) != 1 and not (len(words) == 3 and words[1].lower() == "as"):
            raise ValueError("give IMAGE, or IMAGE AS NAME")
        if words[0] == "scratch":
            raise ValueError("an empty base is not supported")
        if not words[0]:
            raise ValueError(f"{rest!r} names no image: give the build argument")
        before = self._stages.get(words[0].lower())
        if before is not None:
            stage = _Stage(
                base=before.recipe(),
                user=before.user,
                workdir=before.workdir,
                known={**before.known, **before.env},
                entrypoint=before.entrypoint,
                cmd=before.cmd,
                needs=before.needs,
                shell=before.shell,
            )
        else:
            name = self._bases.get(words[0], words[0])
            base = self._base_config(name) or BaseConfig()
            stage = _Stage(
                base=name,
                user=base.user,
                workdir=base.workdir,
                known=dict(base.env),
                entrypoint=base.entrypoint,
                cmd=base.cmd,
            )
        if len(words) == 3:
            if words[2].lower() in self._stages:
                raise ValueError(f"there is a stage {words[2]} already")
            self._stages[words[2].lower()] = stage
        self._stages[str(self._count)] = stage
        self._count += 1
        self._now = stage

    def _run(self, line: Line, stage: _Stage) -> None:
        _, rest = _flags(line)
        _refuse_heredoc(rest)
        if not rest:
            raise ValueError("give a command")
        argv = _json_words(rest)
        stage.has_run = True
        stage.steps.append(
            Run(
                command=argv or (*stage.shell, rest),
                user=stage.user,
                cwd=stage.workdir,
                env={**stage.args, **stage.env},
                network=self._network,
                allow_hosts=self._allow_hosts,
                timeout_s=self._timeout_s,
                place=f"{self._name}:{line.number}",
            )
        )

    def _copy(self, line: Line, stage: _Stage) -> None:
        flags, rest = _flags(line, "chown", "chmod", "link", *(("from",) if line.name == "COPY" else ()))
        _refuse_heredoc(rest)
        given = _json_words(rest)
        words = [expand(word, stage.variables) for word in given] if given else split_words(rest, stage.variables)
        if len(words) < 2:
            raise ValueError("give SOURCE... TARGET")
        *patterns, target = words
        into = target.endswith(("/", "/.")) or target == "."
        path = posixpath.normpath(posixpath.join(stage.workdir, target))
        mode = _mode(expand(flags["chmod"], stage.variables)) if "chmod" in flags else None
        user = expand(flags.get("chown") or "root", stage.variables)
        if "from" in flags:
            if len(patterns) > 1 and not into:
                raise ValueError("several sources need a folder to go to: let the target end with a slash")
            image = self._image(flags["from"])
            folder = f"{path.rstrip('/')}/" if into else path
            stage.steps += [
                Take(image=image, source=_absolute(pattern), path=folder, mode=mode, user=user) for pattern in patterns
            ]
            return
        sources = [source for pattern in patterns for source in self._sources(line, pattern)]
        if len(sources) > 1 and not into:
            raise ValueError(f"{len(sources)} sources need a folder to go to: let the target end with a slash")
        for source in sources:
            is_file = not source.is_dir()
            if is_file and line.name == "ADD" and _ARCHIVE.search(source.name):
                raise ValueError(f"{source.name}: unpacking archives is not supported; use COPY and RUN tar")
            left = () if is_file else tuple(self._ignored.below(self._context, self._relative(source)))
            put = Put(
                path=posixpath.join(path, source.name) if is_file and into else path,
                source=str(source),
                mode=mode,
                user=user,
                without=left,
            )
            stage.steps.append(put)

    def _image(self, name: str) -> str | Recipe:
        """What COPY --from names: an earlier stage, or an image."""
        stage = self._stages.get(name.lower())
        if stage is self._now:
            raise ValueError(f"--from={name}: that is this stage itself")
        return stage.recipe() if stage is not None else self._bases.get(name, name)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._context).as_posix()

    def _sources(self, line: Line, pattern: str) -> list[Path]:
        """The files and folders of the context that a source names, which may hold `*`, `?` and `[...]`."""
        if re.match(r"[a-z]+://|git@", pattern):
            raise ValueError(f"{pattern}: only files of the context are supported")
        relative = _absolute(pattern).lstrip("/")
        if not re.search(r"[*?\[]", relative):
            found = [self._context / relative]
        else:
            found = sorted(self._context.glob(relative))
        found = [path for path in found if path == self._context or self._relative(path) not in self._ignored]
        for path in found:
            if not path.resolve().is_relative_to(self._context):
                raise ValueError(f"{pattern} leads out of the context {self._context}")
        if not found or not all(path.exists() for path in found):
            raise ValueError(f"{pattern}: there is no such file in the context {self._context}, or it is ignored")
        return found

    def _set_env(self, line: Line, stage: _Stage) -> None:
        first = line.rest.split(None, 1)
        if first and "=" not in first[0]:
            if len(first) != 2:
                raise ValueError("give NAME=VALUE")
            stage.env[expand(first[0], stage.variables)] = expand(first[1], stage.variables)
            return
        pairs = [word.partition("=") for word in split_words(line.rest, stage.variables)]
        if not pairs or not all(name and equals for name, equals, _ in pairs):
            raise ValueError("give NAME=VALUE")
        stage.env.update((name, value) for name, _, value in pairs)

    def _arg(self, line: Line) -> None:
        """Those from before FROM are for FROM alone, until a stage declares them again."""
        args = self._now.args if self._now is not None else self._before_from
        variables = self._now.variables if self._now is not None else self._before_from
        words = split_words(line.rest, variables)
        if not words:
            raise ValueError("give NAME or NAME=VALUE")
        for word in words:
            name, equals, default = word.partition("=")
            self._declared.add(name)
            if name in self._given:
                args[name] = self._given[name]
            elif equals:
                args[name] = default
            elif name in self._before_from:
                args[name] = self._before_from[name]

    def _set_workdir(self, line: Line, stage: _Stage) -> None:
        path = expand(line.rest, stage.variables)
        if not path:
            raise ValueError("give a path")
        stage.workdir = posixpath.normpath(posixpath.join(stage.workdir, path))
        stage.steps.append(
            Run(
                command=("mkdir", "-p", stage.workdir),
                cwd="/",
                network=self._network,
                allow_hosts=self._allow_hosts,
                timeout_s=self._timeout_s,
                place=f"{self._name}:{line.number}",
            )
        )

    def _set_user(self, line: Line, stage: _Stage) -> None:
        stage.user = expand(line.rest, stage.variables)
        if not stage.user:
            raise ValueError("give a user")

    def _set_shell(self, line: Line, stage: _Stage) -> None:
        argv = _json_words(line.rest)
        if not argv:
            raise ValueError('give a list: ["/bin/bash", "-c"]')
        stage.shell = argv

    def _set_entrypoint(self, line: Line, stage: _Stage) -> None:
        """The base's CMD was for the base's own."""
        stage.entrypoint = _started(line, stage)
        if not stage.has_cmd:
            stage.cmd = ()

    def _set_cmd(self, line: Line, stage: _Stage) -> None:
        stage.cmd, stage.has_cmd = _started(line, stage), True

    def _set_label(self, line: Line, stage: _Stage) -> None:
        """One of them means something here; the others are notes for who runs a container."""
        for word in split_words(line.rest, stage.variables):
            name, _, value = word.partition("=")
            if name == NEEDS_LABEL:
                try:
                    stage.needs = needs_of(value, "LABEL")
                except InvalidSpec as error:
                    raise ValueError(str(error)) from error


def _absolute(pattern: str) -> str:
    """A source's path from the top of where it is looked for."""
    return "/" + posixpath.normpath(f"/{pattern}").lstrip("/")


def _started(line: Line, stage: _Stage) -> tuple[str, ...]:
    argv = _json_words(line.rest)
    if argv is not None:
        return argv
    return (*stage.shell, line.rest) if line.rest else ()


def _flags(line: Line, *known: str) -> tuple[dict[str, str], str]:
    """The `--name=value` words that an instruction begins with, and the rest of it."""
    found, rest = {}, line.rest
    while flag := _FLAG.match(rest):
        if flag.group(1) not in known:
            raise ValueError(f"--{flag.group(1)} is not supported")
        found[flag.group(1)] = flag.group(2) or ""
        rest = rest[flag.end() :]
    return found, rest


def _json_words(rest: str) -> tuple[str, ...] | None:
    """The words of the form with brackets; None for anything else, which is then the shell's."""
    if not rest.startswith("["):
        return None
    try:
        words = json.loads(rest)
    except ValueError:
        return None
    return tuple(words) if all(isinstance(word, str) for word in words) else None


def _refuse_heredoc(rest: str) -> None:
    if _HEREDOC.search(rest):
        raise ValueError("here-documents are not supported")


def _mode(text: str) -> int:
    if not re.fullmatch(r"[0-7]{3,4}", text):
        raise ValueError(f"--chmod={text}: give an octal number")
    return int(text, 8)
