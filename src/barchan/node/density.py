"""What the kernel says of this host's memory and processors."""

from pathlib import Path

from barchan.core.density import Pressure

_MEMINFO = Path("/proc/meminfo")
_STALLS = Path("/proc/pressure")


def pressure() -> Pressure:
    """The host's memory and its programs' waits, as they are now; takes some 100 us."""
    memory = {}
    for line in _MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        memory[name] = int(rest.split()[0]) >> 10
    stalls = _stalls("memory")
    return Pressure(
        memory_total_mib=memory["MemTotal"],
        memory_available_mib=memory["MemAvailable"],
        swap_free_mib=memory["SwapFree"],
        memory_stalled=stalls.get("some"),
        memory_stalled_full=stalls.get("full"),
        cpu_stalled=_stalls("cpu").get("some"),
    )


def _stalls(resource: str) -> dict[str, float]:
    """Shares of the last ten seconds, by `some` and `full`; none where the kernel keeps no account."""
    try:
        text = (_STALLS / resource).read_text()
    except OSError:  # built without, or switched off at boot: then opening or reading fails
        return {}
    lines = (line.split() for line in text.splitlines())
    return {words[0]: float(words[1].partition("=")[2]) / 100 for words in lines if words}
