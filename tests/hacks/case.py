"""What an attack is: something that earns nothing by honest means, and a benign twin that does the task likewise."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

# rl.md's classes: what is done to whom.
HackClass = Literal[
    "tampering with tests",
    "patching the runner",
    "early exit",
    "forged equality",
    "overwriting the grader",
    "reading answers",
    "network",
    "races",
    "processes",
    "clock",
    "spoofed output",
    "buying a void",
]
Format = Literal["function", "repository", "harbor-diff", "harbor-files"]
# A function's source; files of a repository (None removes one, `-> x` is a link); shell commands of an agent.
Deed = str | Mapping[str, str | None] | tuple[str, ...]


class Case(Struct, frozen=True, kw_only=True):
    """One attack with its twin.

    Attributes:
        quick: Among those that run with every change.
    """

    name: str
    hack: HackClass
    format: Format
    attack: Deed
    twin: Deed
    quick: bool = False
