"""What the suite knows of each backend: how large and how patient its sandboxes are, and what it declares to lack."""

from typing import Final

from msgspec import Struct

from barchan.errors import InvalidSpec

# What a backend may lack, as its `Capabilities` say: all else is everybody's.
LACKABLE: Final = {
    "fork": "sandboxes that start with another one's files (Capabilities.fork)",
    "memory": "processes that are stored with their memory (Capabilities.memory_snapshot)",
    "zygote": "warm interpreters (Capabilities.zygote)",
    "network allow": "a way out by names (Capabilities.networks)",
    "network open": "a way out (Capabilities.networks)",
    "root capable": "a root with power over other users' files (Capabilities.roots)",
    "bounded root": "a root that is kept from its init and from others' files (Capabilities.bounds_root)",
}
# Nobody asks for these, so there is nothing to refuse: what lacks them is seen not to have them.
NEVER_ASKED_FOR: Final = frozenset({"bounded root"})


class Profile(Struct, frozen=True, kw_only=True):
    """How one backend is checked.

    Attributes:
        memory_mib: Of a sandbox that is to hold a Python.
        patience: Factor of every bound of time; 1 is for containers on an idle machine.
        disk_spare_mib: What the template leaves free on a disk of its own, to which `disk_mib` are added.
        lacks: What of `LACKABLE` it lacks, and why. Strict: what it can do after all fails.
    """

    memory_mib: int = 128
    patience: float = 1.0
    disk_spare_mib: int = 0
    lacks: dict[str, str] = {}


NO_ZYGOTE: Final = {"zygote": "an interpreter of the host's kernel can't be forked into another kernel"}
PROFILES: Final[dict[str, Profile]] = {
    "container": Profile(),
    "function": Profile(
        lacks={
            "memory": "its sandboxes are forks of a warm interpreter, whose namespaces can't be stored",
            "network open": "routes that keep guests from metadata addresses would be the interpreter's",
            "root capable": "a warm interpreter has no capabilities to give",
        }
    ),
    "gvisor": Profile(
        memory_mib=192,
        patience=3.0,
        lacks=NO_ZYGOTE,
    ),
    "microvm": Profile(
        memory_mib=192,
        patience=4.0,
        lacks=NO_ZYGOTE,
    ),
    "vm": Profile(
        memory_mib=512,
        patience=8.0,
        disk_spare_mib=256,
        lacks={**NO_ZYGOTE, "bounded root": "the machine is the guest's: its root is a machine's"},
    ),
}


def profile_of(backend: str, lacks: tuple[str, ...] = ()) -> Profile:
    """The profile of one of ours; for another's, a patient one that lacks what its author says.

    Raises:
        InvalidSpec: Nobody may lack that.
    """
    if unknown := sorted(set(lacks) - set(LACKABLE)):
        raise InvalidSpec(f"no backend may lack {unknown[0]!r}; there are: {', '.join(LACKABLE)}")
    own = PROFILES.get(backend, Profile(memory_mib=256, patience=4.0))
    return Profile(
        memory_mib=own.memory_mib,
        patience=own.patience,
        disk_spare_mib=own.disk_spare_mib,
        lacks={**own.lacks, **dict.fromkeys(lacks, "its author says so")},
    )
