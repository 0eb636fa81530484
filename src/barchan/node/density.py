"""What the kernel says of this host's memory and processors, and what of it the sandboxes have."""

import re
from typing import TYPE_CHECKING

from barchan.core.density import Pressure, step
from barchan.model.node import NodeMemory

if TYPE_CHECKING:
    from barchan.node.sandboxes import Sandboxes

_MEMINFO = "/proc/meminfo"
_WANTED = re.compile(r"^(MemTotal|MemAvailable|SwapFree):\s+(\d+)", re.MULTILINE)
_STALLS = "/proc/pressure"


def pressure() -> Pressure:
    """The host's memory and its programs' waits, as they are now; takes some 100 us."""
    with open(_MEMINFO, encoding="ascii") as file:
        memory = {name: int(kib) >> 10 for name, kib in _WANTED.findall(file.read())}
    stalls = _stalls("memory")
    return Pressure(
        memory_total_mib=memory["MemTotal"],
        memory_available_mib=memory["MemAvailable"],
        swap_free_mib=memory["SwapFree"],
        memory_stalled=stalls.get("some"),
        memory_stalled_full=stalls.get("full"),
        cpu_stalled=_stalls("cpu").get("some"),
    )


def awake_mib(sandboxes: "Sandboxes") -> int:
    """The memory limits of all sandboxes that may use theirs now, added up, with what storing some takes beside."""
    awake = ("booting", "ready")
    everybody = sandboxes.live.values()
    return sum(live.rest.storing_mib + (live.spec.memory_mib if live.phase in awake else 0) for live in everybody)


def memory(sandboxes: "Sandboxes") -> NodeMemory:
    """What this node's sandboxes ask for and take of the host's memory."""
    now = pressure()
    used = cached = 0
    for backend in sandboxes.running_backends():
        backend_used, backend_cached = backend.memory_use()
        used, cached = used + backend_used, cached + backend_cached
    asleep = sum(live.rest.memory_bytes for live in sandboxes.live.values() if live.phase == "paused")
    limits = sandboxes.admission.limits
    return NodeMemory(
        total_mib=now.memory_total_mib,
        available_mib=now.memory_available_mib,
        requested_mib=awake_mib(sandboxes),
        requested_max_mib=int(now.memory_total_mib * limits.memory_overcommit),
        used_mib=used >> 20,
        reclaimable_mib=min(used, cached + asleep) >> 20,
        step=step(now, limits.memory_reserve_mib),
        memory_stalled=now.memory_stalled,
        cpu_stalled=now.cpu_stalled,
    )


def _stalls(resource: str) -> dict[str, float]:
    """Shares of the last ten seconds, by `some` and `full`; none where the kernel keeps no account."""
    try:
        with open(f"{_STALLS}/{resource}", encoding="ascii") as file:
            text = file.read()
    except OSError:  # built without, or switched off at boot: then opening or reading fails
        return {}
    lines = (line.split() for line in text.splitlines())
    return {words[0]: float(words[1].partition("=")[2]) / 100 for words in lines if words}
