"""What is to go wrong, when, and to whom: read from words or a file, and decided by a seed alone. Pure.

A fault either happens at moments (to everything that runs then), or to rollouts (each that is chosen, as soon as it has
a sandbox of the role). Both come from the seed and the fault's place in the plan, so that a plan repeats itself.
"""

import itertools
import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct

from barchan.errors import InvalidSpec

Kind = Literal[
    "node-kill",
    "node-stop",
    "client-kill",
    "connection-cut",
    "connection-silent",
    "init-kill",
    "grader-kill",
    "grader-stop",
    "oom-host",
    "disk-full",
    "image-missing",
    "store-slow",
    "store-corrupt",
    "store-down",
    "endpoint-429",
    "endpoint-500",
    "endpoint-hang",
    "endpoint-garbage",
    "endpoint-cut",
]
Role = Literal["agent", "grader", "control"]
Who = Literal["all", "first", "last"]
WHO: tuple[Who, ...] = get_args(Who)


class KindRule(NamedTuple):
    """What a kind of fault is.

    Attributes:
        means: How it is done.
        for_s: How long it lasts unless the plan says; 0: it is over at once.
        role: Of faults to rollouts: the sandbox that is meant unless the plan says. None: it happens at moments.
    """

    means: str
    for_s: float = 0.0
    role: Role | None = None


KINDS: dict[Kind, KindRule] = {
    "node-kill": KindRule("SIGKILL to the node; the next one of its state directory starts", 0.5),
    "node-stop": KindRule("SIGSTOP to the node, then SIGCONT", 5.0),
    "client-kill": KindRule("SIGKILL to the process that drives the run; the next one resumes it", 0.5),
    "connection-cut": KindRule("every connection between SDK and node is closed in the middle"),
    "connection-silent": KindRule("nothing passes between SDK and node; then those connections are closed", 3.0),
    "init-kill": KindRule("SIGKILL to the init of a sandbox, by its pid on the host", role="agent"),
    "grader-kill": KindRule("SIGKILL to the programs in a grader's sandbox", role="grader"),
    "grader-stop": KindRule("SIGSTOP to the programs in a grader's sandbox, then SIGCONT", 60.0, role="grader"),
    "oom-host": KindRule("the memory of all sandboxes together is bounded to what they use at that moment", 2.0),
    "disk-full": KindRule("the file system of the node's state has no byte left", 5.0),
    "image-missing": KindRule("the images of the node's store are gone, then there again", 2.0),
    "store-slow": KindRule("each piece of data of the blob store comes a second late, in drips", 10.0),
    "store-corrupt": KindRule("one bit of each piece of data of the blob store is another", 10.0),
    "store-down": KindRule("the blob store closes each connection that asks for data", 10.0),
    "endpoint-429": KindRule("the model's server answers 429", 5.0),
    "endpoint-500": KindRule("the model's server answers 500", 5.0),
    "endpoint-hang": KindRule("the model's server takes requests and says nothing, then hangs up", 5.0),
    "endpoint-garbage": KindRule("the model's server answers 200 with what is no completion", 5.0),
    "endpoint-cut": KindRule("the model's server hangs up in the middle of each answer", 5.0),
}
assert set(KINDS) == set(get_args(Kind))
AFTERMATH_S = 1.0  # so long after its end somebody may still be hit: clients wait to ask a node that is back again
SPREAD = (0.5, 1.5)  # a gap is its mean times something between
DELAY_S_MAX = 0.1  # a chosen rollout is hit so long after its sandbox is seen, so that each stage of it is met
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_UNITS = {"ms": 1e-3, None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SHARE = re.compile(r"(\d+(?:\.\d+)?)(%?)")


class Fault(Struct, frozen=True, kw_only=True):
    """One line of a plan.

    Attributes:
        every_s: Mean time from one to the next; None: once.
        after_s: When the first may come, since the run's first rollout began; None: one gap after that.
        each: In place of moments: so many rollouts are over, on average, from one to the next. The first comes early.
        times: At most so often; None: as long as the run goes on. Of faults to rollouts: in each chosen rollout.
        for_s: How long each lasts.
        share: Of faults to rollouts: how many of them are chosen.
        role: Of faults to rollouts: whose sandbox.
    """

    kind: Kind
    for_s: float
    every_s: float | None = None
    after_s: float | None = None
    each: int | None = None
    times: int | None = None
    share: float = 0.0
    role: Role | None = None

    @property
    def is_of_rollouts(self) -> bool:
        return KINDS[self.kind].role is not None


class Choice(NamedTuple):
    """What becomes of one rollout.

    Attributes:
        times: How often a sandbox of it is hit; 0: never.
        delay_s: How long after it is seen.
        who: Which of the programs in it, where there are several.
    """

    times: int
    delay_s: float
    who: Who


class Plan(Struct, frozen=True, kw_only=True):
    """What is to go wrong in one run."""

    seed: int
    faults: tuple[Fault, ...]

    def needs(self, prefix: str) -> bool:
        """Whether a kind of that prefix is in it."""
        return any(fault.kind.startswith(prefix) for fault in self.faults)

    def moments(self, index: int) -> Iterator[float]:
        """When a fault at moments happens, in seconds since the run's first rollout began, in order."""
        fault = self.faults[index]
        dice = random.Random(f"{self.seed}/{index}/{fault.kind}/moments")
        gap_s = fault.every_s
        now_s = fault.after_s if fault.after_s is not None else 0.0 if gap_s is None else gap_s * dice.uniform(*SPREAD)
        count = 0
        while fault.times is None or count < fault.times:
            yield now_s
            count += 1
            if gap_s is None:
                return
            now_s += gap_s * dice.uniform(*SPREAD)

    def counts(self, index: int) -> Iterator[int]:
        """When a fault with `each` happens: at how many rollouts that are over, in order."""
        fault = self.faults[index]
        assert fault.each is not None
        dice = random.Random(f"{self.seed}/{index}/{fault.kind}/counts")
        now = dice.uniform(0.0, 0.5) * fault.each
        for _ in itertools.count() if fault.times is None else range(fault.times):
            yield int(now)
            now += max(1.0, fault.each * dice.uniform(*SPREAD))

    def chosen(self, index: int, place: str) -> Choice:
        """What a fault to rollouts does to one.

        Args:
            place: Which rollout of its run, as the end of its id says.
        """
        fault = self.faults[index]
        dice = random.Random(f"{self.seed}/{index}/{fault.kind}/{place}")
        is_chosen = dice.random() < fault.share
        return Choice((fault.times or 1) if is_chosen else 0, dice.uniform(0.0, DELAY_S_MAX), dice.choice(WHO))


def read_plan(words: Sequence[str], seed: int | None = None) -> Plan:
    """A plan from words such as `node-kill:every=20s,times=3`, or the path of a TOML file with `seed` and tables
    `[[fault]]` of the same members; several are one plan.

    Args:
        seed: In place of the files' own; 0 where nothing says another.

    Raises:
        InvalidSpec: There is no such file, fault or member, or a value that it can't have; the message names it.
    """
    faults: list[Fault] = []
    told = 0
    for word in words:
        if word.endswith(".toml"):
            file_seed, found = _read_file(Path(word))
            told = file_seed if file_seed is not None else told
            faults += found
        else:
            faults.append(_read_words(word))
    if not faults:
        raise InvalidSpec(
            "a plan without faults; give one as node-kill:every=20s, or a .toml file with [[fault]] tables"
        )
    return Plan(seed=told if seed is None else seed, faults=tuple(faults))


def _read_file(path: Path) -> tuple[int | None, list[Fault]]:
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidSpec(f"plan {path}: {error}") from error
    if unknown := sorted(set(found) - {"seed", "fault"}):
        raise InvalidSpec(f"plan {path}: no {unknown[0]!r} here; it has a seed and [[fault]] tables")
    tables = found.get("fault", [])
    seed = found.get("seed")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidSpec(f"plan {path}: fault is a list of tables, each written as [[fault]]")
    if seed is not None and type(seed) is not int:
        raise InvalidSpec(f"plan {path}: the seed is a whole number")
    return seed, [_fault({name: str(value) for name, value in table.items()}, f"plan {path}") for table in tables]


def _read_words(word: str) -> Fault:
    kind, _, rest = word.partition(":")
    members = {"kind": kind}
    for item in rest.split(",") if rest else ():
        name, separator, value = item.partition("=")
        if not separator or name in members:
            raise InvalidSpec(f"--inject {word}: write KIND:NAME=VALUE,NAME=VALUE, each name once")
        members[name] = value
    return _fault(members, f"--inject {word}")


def _fault(members: dict[str, str], where: str) -> Fault:
    kind = members.pop("kind", "")
    if kind not in KINDS:
        raise InvalidSpec(f"{where}: no fault {kind!r}; there are: {', '.join(KINDS)}")
    rule = KINDS[kind]
    names = ("for", "times", *(("share", "role") if rule.role else ("every", "after", "each")))
    if unknown := sorted(set(members) - set(names)):
        raise InvalidSpec(f"{where}: {kind} has no {unknown[0]!r}; it may have {', '.join(names)}")
    given: dict[str, Any] = {"kind": kind, "for_s": rule.for_s}
    for name in ("for", "every", "after"):
        if name in members:
            given[f"{name}_s"] = _seconds(members[name], f"{where}: {name}")
    if given.get("every_s") == 0.0:
        raise InvalidSpec(f"{where}: every=0 leaves no time between")
    if "each" in members and ("every" in members or "after" in members):
        raise InvalidSpec(f"{where}: each counts rollouts, and goes with no time; leave every and after away")
    for name in ("times", "each"):
        if name in members:
            given[name] = _count(members[name], f"{where}: {name}")
    if rule.role:
        given["share"] = _share(members.get("share", "10%"), where)
        given["role"] = members.get("role", rule.role)
    try:
        return msgspec.convert(given, Fault)
    except msgspec.ValidationError as error:
        raise InvalidSpec(f"{where}: {error}; a role is one of {', '.join(get_args(Role))}") from error


def _seconds(text: str, where: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise InvalidSpec(f"{where}={text}: a time is a number with ms, s, m or h behind it")
    return float(found[1]) * _UNITS[found[2]]


def _count(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise InvalidSpec(f"{where}={text}: a whole number, at least 1")
    return int(text)


def _share(text: str, where: str) -> float:
    found = _SHARE.fullmatch(text)
    share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0.0 < share <= 1.0:
        raise InvalidSpec(f"{where}: share={text}: more than 0, at most 1 or 100%")
    return share
