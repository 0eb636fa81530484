"""A Dockerfile as a recipe. Reads the Dockerfile and looks at the context's names; builds nothing.

What is supported, and what differs from Docker: docs/images.md.
"""

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from barchan.errors import InvalidSpec
from barchan.model.sandbox import Network
from barchan.sdk.dockerwords import expand, split_words
from barchan.sdk.recipe import Put, Recipe, Run

# What Docker, and every image of ours, starts with: the only variable of a base that is known before it is built.
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELL = ("/bin/sh", "-c")
NO_EFFECT = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL")  # they say how a container is started, and nothing starts one here
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.\w+)$", re.IGNORECASE)
_HEREDOC = re.compile(r"(?:^|\s)\d*<<-?[\"']?[A-Za-z_]")
_FLAG = re.compile(r"--([a-z]+)(?:=(\S*))?(?:\s+|$)")
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)")


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
    network: Network = "open",
    allow_hosts: tuple[str, ...] = (),
    timeout_s: float = 1800.0,
) -> Recipe:
    """The recipe of a Dockerfile on this machine.

    Args:
        context: Where COPY and ADD find their sources; by default the Dockerfile's folder.
        args: For its ARG instructions.
        bases: Names of the node's images by what FROM says, where that is another name.
        network, allow_hosts: What its RUN steps may reach: a Docker build has a network.
        timeout_s: Of one step.

    Raises:
        InvalidSpec: It can't be read, or holds what is not supported; the message names file, line and instruction.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"the Dockerfile {path} can't be read: {error}") from error
    reader = _Reader(context or path.parent, args, bases, network, allow_hosts, timeout_s)
    try:
        for line in lines_of(text):
            reader.take(line)
        return reader.recipe()
    except _At as error:
        raise InvalidSpec(f"{path}:{error}") from error


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


class _Reader:
    """Takes the instructions in order, and knows what a step's surroundings are at each point."""

    def __init__(
        self,
        context: Path,
        args: Mapping[str, str],
        bases: Mapping[str, str],
        network: Network,
        allow_hosts: tuple[str, ...],
        timeout_s: float,
    ) -> None:
        self._context = context.resolve()
        self._given = args
        self._bases = bases
        self._network: Network = network
        self._allow_hosts = allow_hosts
        self._timeout_s = timeout_s
        self._args: dict[str, str] = {}
        self._declared: set[str] = set()
        self._env: dict[str, str] = {}
        self._base = ""
        self._user = "root"
        self._workdir = "/"
        self._shell: tuple[str, ...] = SHELL
        self._steps: list[Run | Put] = []
        self._has_run = False
        self._takers: dict[str, Callable[[Line], None]] = {
            "FROM": self._from,
            "RUN": self._run,
            "COPY": self._copy,
            "ADD": self._copy,
            "ENV": self._set_env,
            "ARG": self._arg,
            "WORKDIR": self._set_workdir,
            "USER": self._set_user,
            "SHELL": self._set_shell,
        }

    def take(self, line: Line) -> None:
        taker = self._takers.get(line.name)
        if not self._base and line.name not in ("FROM", "ARG"):
            raise _At(line, "comes before FROM")
        if taker is None:
            if line.name not in NO_EFFECT:
                raise _At(line, "is not supported")
            return
        try:
            taker(line)
        except _At:
            raise
        except ValueError as error:
            raise _At(line, error) from error

    def recipe(self) -> Recipe:
        """What was taken, as a recipe. Folders are made with the network that the commands have, so that one sandbox
        does for all; without a command there is no need of any.
        """
        if not self._base:
            raise _At(Line(1, "FROM", ""), "is missing")
        if unknown := sorted(set(self._given) - self._declared):
            raise _At(Line(1, "ARG", ""), f"nothing declares the argument {unknown[0]}")
        steps = [
            step if self._has_run or isinstance(step, Put) else replace(step, network="none", allow_hosts=())
            for step in self._steps
        ]
        return Recipe(base=self._base, steps=tuple(steps), env=self._env, user=self._user, workdir=self._workdir)

    @property
    def _variables(self) -> dict[str, str]:
        return {"PATH": PATH, **self._args, **self._env}

    # one instruction each

    def _from(self, line: Line) -> None:
        if self._base:
            raise ValueError("a second stage is not supported")
        _, rest = _flags(line, "platform")
        words = split_words(rest, self._args)
        if len(words) != 1 and not (len(words) == 3 and words[1].lower() == "as"):
            raise ValueError("give IMAGE, or IMAGE AS NAME")
        if words[0] == "scratch":
            raise ValueError("an empty base is not supported")
        if not words[0]:
            raise ValueError(f"{rest!r} names no image: give the build argument")
        self._base = self._bases.get(words[0], words[0])
        self._args = {}  # those from before FROM are for FROM alone, until they are declared again

    def _run(self, line: Line) -> None:
        _, rest = _flags(line)
        _refuse_heredoc(rest)
        if not rest:
            raise ValueError("give a command")
        argv = _json_words(rest)
        self._has_run = True
        self._steps.append(
            Run(
                command=argv if argv is not None else (*self._shell, rest),
                user=self._user,
                cwd=self._workdir,
                env={**self._args, **self._env},
                network=self._network,
                allow_hosts=self._allow_hosts,
                timeout_s=self._timeout_s,
            )
        )

    def _copy(self, line: Line) -> None:
        flags, rest = _flags(line, "chown", "chmod", "link")
        _refuse_heredoc(rest)
        given = _json_words(rest)
        words = [expand(word, self._variables) for word in given] if given else split_words(rest, self._variables)
        if len(words) < 2:
            raise ValueError("give SOURCE... TARGET")
        *patterns, target = words
        sources = [source for pattern in patterns for source in self._sources(line, pattern)]
        into = target.endswith(("/", "/.")) or target == "."
        if len(sources) > 1 and not into:
            raise ValueError(f"{len(sources)} sources need a folder to go to: let the target end with a slash")
        path = posixpath.normpath(posixpath.join(self._workdir, target))
        mode = flags.get("chmod")
        for source in sources:
            is_file = not source.is_dir()
            if is_file and line.name == "ADD" and _ARCHIVE.search(source.name):
                raise ValueError(f"{source.name}: unpacking archives is not supported; use COPY and RUN tar")
            put = Put(
                path=posixpath.join(path, source.name) if is_file and into else path,
                source=str(source),
                mode=None if mode is None else _mode(expand(mode, self._variables)),
                user=expand(flags.get("chown") or "root", self._variables),
            )
            self._steps.append(put)

    def _sources(self, line: Line, pattern: str) -> list[Path]:
        """The files and folders of the context that a source names, which may hold `*`, `?` and `[...]`."""
        if re.match(r"[a-z]+://|git@", pattern):
            raise ValueError(f"{pattern}: only files of the context are supported")
        relative = posixpath.normpath("/" + pattern).lstrip("/")
        if not re.search(r"[*?\[]", relative):
            found = [self._context / relative]
        else:
            found = sorted(self._context.glob(relative))
        for path in found:
            if not path.resolve().is_relative_to(self._context):
                raise ValueError(f"{pattern} leads out of the context {self._context}")
        if not found or not all(path.exists() for path in found):
            raise ValueError(f"{pattern}: there is no such file in the context {self._context}")
        return found

    def _set_env(self, line: Line) -> None:
        first = line.rest.split(None, 1)
        if first and "=" not in first[0]:
            if len(first) != 2:
                raise ValueError("give NAME=VALUE")
            self._env[expand(first[0], self._variables)] = expand(first[1], self._variables)
            return
        pairs = [word.partition("=") for word in split_words(line.rest, self._variables)]
        if not pairs or not all(name and equals for name, equals, _ in pairs):
            raise ValueError("give NAME=VALUE")
        self._env.update((name, value) for name, _, value in pairs)

    def _arg(self, line: Line) -> None:
        for word in split_words(line.rest, self._variables):
            name, equals, default = word.partition("=")
            self._declared.add(name)
            if name in self._given:
                self._args[name] = self._given[name]
            elif equals:
                self._args[name] = default

    def _set_workdir(self, line: Line) -> None:
        path = expand(line.rest, self._variables)
        if not path:
            raise ValueError("give a path")
        self._workdir = posixpath.normpath(posixpath.join(self._workdir, path))
        self._steps.append(
            Run(
                command=("mkdir", "-p", self._workdir),
                cwd="/",
                network=self._network,
                allow_hosts=self._allow_hosts,
                timeout_s=self._timeout_s,
            )
        )

    def _set_user(self, line: Line) -> None:
        self._user = expand(line.rest, self._variables)
        if not self._user:
            raise ValueError("give a user")

    def _set_shell(self, line: Line) -> None:
        argv = _json_words(line.rest)
        if not argv:
            raise ValueError('give a list: ["/bin/bash", "-c"]')
        self._shell = argv


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
    return tuple(words) if words and all(isinstance(word, str) for word in words) else None


def _refuse_heredoc(rest: str) -> None:
    if _HEREDOC.search(rest):
        raise ValueError("here-documents are not supported")


def _mode(text: str) -> int:
    if not re.fullmatch(r"[0-7]{3,4}", text):
        raise ValueError(f"--chmod={text}: give an octal number")
    return int(text, 8)
