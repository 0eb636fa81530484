"""What a sandbox with `network="allow"` may reach: names and ports first, then the addresses behind them. Pure.

An allow entry is `HOST` (ports 80 and 443) or `HOST:PORT`. `HOST` is an exact name, `*.example.org` (every name below
example.org, not itself), or an address (`203.0.113.7`, `[2001:db8::1]`). A name never leads to an address inside the
host, its network or its cloud; an address written in the list is the caller's own word, and is reached whatever it is.
"""

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Literal

import idna
from msgspec import Struct

from barchan.errors import InvalidSpec

Address = IPv4Address | IPv6Address
Outcome = Literal["allowed", "denied", "malformed", "failed"]

DEFAULT_PORTS = frozenset({80, 443})
NAME_BYTES_MAX = 253
ENTRIES_MAX = 1000

# Where clouds answer their machines with credentials; no name and no open network leads there.
METADATA_NETWORKS = tuple(
    IPv4Network(text) for text in ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32")
)

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")

_V4_REFUSED: tuple[tuple[IPv4Network | IPv6Network, str], ...] = (
    *((network, "a metadata address") for network in METADATA_NETWORKS),
    (ip_network("0.0.0.0/8"), "unspecified"),
    (ip_network("127.0.0.0/8"), "loopback"),
    (ip_network("10.0.0.0/8"), "private"),
    (ip_network("172.16.0.0/12"), "private"),
    (ip_network("192.168.0.0/16"), "private"),
    (ip_network("100.64.0.0/10"), "carrier-grade NAT"),
    (ip_network("192.0.0.0/24"), "reserved"),
    (ip_network("192.0.2.0/24"), "reserved"),
    (ip_network("192.88.99.0/24"), "reserved"),
    (ip_network("198.18.0.0/15"), "reserved"),
    (ip_network("198.51.100.0/24"), "reserved"),
    (ip_network("203.0.113.0/24"), "reserved"),
    (ip_network("224.0.0.0/4"), "multicast"),
    (ip_network("240.0.0.0/4"), "reserved"),
)
_V6_REFUSED: tuple[tuple[IPv4Network | IPv6Network, str], ...] = (
    (ip_network("fd00:ec2::/32"), "a metadata address"),
    (ip_network("::/128"), "unspecified"),
    (ip_network("::1/128"), "loopback"),
    (ip_network("fc00::/7"), "private"),
    (ip_network("fe80::/10"), "link-local"),
    (ip_network("fec0::/10"), "private"),
    (ip_network("ff00::/8"), "multicast"),
    (ip_network("2001::/23"), "reserved"),  # with Teredo, which can name any IPv4 address
    (ip_network("2001:db8::/32"), "reserved"),
    (ip_network("2002::/16"), "reserved"),  # 6to4, likewise
    (ip_network("3fff::/20"), "reserved"),
)
_V6_GLOBAL = IPv6Network("2000::/3")
_V6_WITH_V4 = (IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))


class Target(Struct, frozen=True):
    """Where a request wants to go. `host` is a normalised name, or the text of `address` where there is one."""

    host: str
    port: int
    address: Address | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class EgressEvent(Struct, frozen=True, kw_only=True):
    """What became of one request of a guest. Names are the guest's word, normalised and bounded; `reason` is ours."""

    outcome: Outcome
    host: str = ""
    port: int = 0
    address: str = ""
    reason: str = ""


def parse_host(text: str) -> tuple[str, Address | None]:
    """Normalise a name or an IPv4 address: lower case, no trailing dot, IDNA as `xn--` labels.

    Raises:
        ValueError: Not a host. Numbers that C libraries read as addresses (`127.1`, `0x7f000001`) are none.
    """
    if not text.isascii():
        try:
            text = idna.encode(text, uts46=True).decode("ascii")
        except idna.IDNAError as error:
            raise ValueError(f"not a host name: {text[:80]!r} ({error})") from error
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if len(name) > NAME_BYTES_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"not a host name: {text[:80]!r}")
    if not _NUMBER.fullmatch(labels[-1]):
        return name, None
    try:
        address = IPv4Address(name)
    except ValueError as error:
        raise ValueError(f"not an address in dotted form: {text[:80]!r}") from error
    return str(address), address


def parse_target(text: str, default_port: int | None) -> Target:
    """Read `HOST`, `HOST:PORT`, `[V6]` or `[V6]:PORT`.

    Raises:
        ValueError: Malformed, or no port where `default_port` is None.
    """
    if text.startswith("["):
        inside, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError(f"not an address in brackets: {text[:80]!r}")
        address: Address | None = _parse_v6(inside)
        host = str(address)
        port_text = rest[1:] if rest else None
    else:
        name, colon, after = text.partition(":")
        host, address = parse_host(name)
        port_text = after if colon else None
    if port_text is None:
        if default_port is None:
            raise ValueError(f"no port in {text[:80]!r}")
        return Target(host, default_port, address)
    if not _PORT.fullmatch(port_text) or not 0 < int(port_text) < 65536:
        raise ValueError(f"not a port: {port_text[:20]!r}")
    return Target(host, int(port_text), address)


def _parse_v6(text: str) -> IPv6Address:
    if "%" in text:
        raise ValueError("an address with a zone is not reachable from here")
    try:
        return IPv6Address(text)
    except ValueError as error:
        raise ValueError(f"not an IPv6 address: {text[:80]!r}") from error


class AllowList(Struct, frozen=True):
    """A parsed allow list: ports by exact host, and ports by the name that `*.` stands below."""

    exact: dict[str, frozenset[int]]
    below: dict[str, frozenset[int]]

    def refusal(self, target: Target) -> str | None:
        """Why `target` may not be asked for, or None if it may."""
        ports = self._ports(target)
        if target.port in ports:
            return None
        if ports:
            return f"port {target.port} of {target.host} is not in the sandbox's allow_hosts"
        if target.address is not None:
            return f"{target.host} is an address, and not itself in the sandbox's allow_hosts"
        return f"{target.host} is not in the sandbox's allow_hosts"

    def _ports(self, target: Target) -> frozenset[int]:
        ports = self.exact.get(target.host, frozenset())
        if target.address is not None:
            return ports
        rest = target.host
        while "." in rest:
            rest = rest.partition(".")[2]
            ports |= self.below.get(rest, frozenset())
        return ports


def parse_allow(entries: Sequence[str]) -> AllowList:
    """Read a spec's `allow_hosts`.

    Raises:
        InvalidSpec: An entry is malformed, or there are more than 1,000.
    """
    if len(entries) > ENTRIES_MAX:
        raise InvalidSpec(f"allow_hosts has {len(entries)} entries, at most {ENTRIES_MAX} are possible")
    exact: dict[str, frozenset[int]] = {}
    below: dict[str, frozenset[int]] = {}
    for entry in entries:
        wildcard = entry.startswith("*.")
        text = entry[2:] if wildcard else entry
        try:
            target = parse_target(f"[{text}]" if text.count(":") > 1 and "[" not in text else text, 443)
        except ValueError as error:
            raise InvalidSpec(f"allow_hosts: {error}", entry=entry[:80]) from error
        if wildcard and target.address is not None:
            raise InvalidSpec("allow_hosts: *. stands before names, not addresses", entry=entry[:80])
        ports = frozenset({target.port}) if _has_port(text) else DEFAULT_PORTS
        table = below if wildcard else exact
        table[target.host] = table.get(target.host, frozenset()) | ports
    return AllowList(exact, below)


def _has_port(text: str) -> bool:
    return "]:" in text if "[" in text else text.count(":") == 1


def address_refusal(address: Address) -> str | None:
    """Why a name may not lead to `address`, as a word or two, or None if it may."""
    if isinstance(address, IPv4Address):
        return next((word for network, word in _V4_REFUSED if address in network), None)
    for network in _V6_WITH_V4:
        if address in network:
            return address_refusal(IPv4Address(int(address) & 0xFFFFFFFF))
    refused = next((word for network, word in _V6_REFUSED if address in network), None)
    return refused or (None if address in _V6_GLOBAL else "reserved")


def reachable(addresses: Iterable[Address]) -> list[Address]:
    """Those of a name's addresses that it may lead to, in their order, without repeats."""
    return [address for address in dict.fromkeys(addresses) if address_refusal(address) is None]
