"""What an agent's sandbox was refused. Pure. Honest programs look for updates, too: it changes no reward."""

from barchan.model.denials import Denials
from barchan.model.verdict import Evidence
from barchan.rollout.integrity.signs import SOURCE

PLACES_TOLD_MAX = 10


def signs_of_denials(denials: Denials) -> tuple[Evidence, ...]:
    """Requests that the egress proxy refused, and programs that ended by SIGSYS."""
    found: tuple[Evidence, ...] = ()
    if denials.egress_total:
        most = sorted(denials.egress.items(), key=lambda place: (-place[1], place[0]))[:PLACES_TOLD_MAX]
        places = ", ".join(f"{place} ({times} times)" if times > 1 else place for place, times in most)
        told = f"{denials.egress_total} to {places}"[:400]
        found += (Evidence(source=SOURCE, fact="sign: requests that the egress proxy refused", value=told),)
    if denials.sigsys:
        fact = "sign: programs that ended by SIGSYS, as for a system call that none may make"
        found += (Evidence(source=SOURCE, fact=fact, value=denials.sigsys),)
    return found
