"""What a sandbox has tried that it may not."""

from msgspec import Struct


class Denials(Struct, frozen=True, kw_only=True):
    """What the node and the host's kernel have refused a sandbox, as far as either tells; since its node began.

    What is refused with an error number leaves no trace: most system calls, and all ways out but the proxy of
    `network="allow"`.

    Attributes:
        egress: Requests that the proxy refused, by `HOST:PORT`, for the first hundred of these; names are the guest's
            word.
        egress_total: All of them.
        sigsys: Programs, of those that clients started, that ended by SIGSYS: so the kernel ends those that make system
            calls of another kind of program than the host's; a program may end itself like that.
    """

    egress: dict[str, int] = {}
    egress_total: int = 0
    sigsys: int = 0
