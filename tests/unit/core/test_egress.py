"""Egress decisions: names and ports, then addresses."""

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.core.egress import AllowList, address_refusal, parse_allow, parse_host, parse_target, reachable
from barchan.errors import InvalidSpec


def permits(allow: AllowList, text: str) -> bool:
    return allow.refusal(parse_target(text, 443)) is None


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Example.ORG", "example.org"),
        ("example.org.", "example.org"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("straße.example", "xn--strae-oqa.example"),
        ("a。example", "a.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("_srv.my-host_1.example", "_srv.my-host_1.example"),
        ("localhost", "localhost"),
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.1.", "192.0.2.1"),
        ("\uff11\uff19\uff12.0.2.1", "192.0.2.1"),
    ],
)
def test_hosts_have_one_form(text: str, host: str) -> None:
    """Case, a trailing dot and Unicode forms make no difference between hosts."""
    assert parse_host(text)[0] == host


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", "a..b", ".a", "-a.example", "a-.example", "a b", "a/b", "a@b", "a%2eb", "a\\b", "a\0b", "a\n",
        "x" * 64 + ".example", ".".join(["x" * 50] * 6), "127.1", "2130706433", "0x7f000001", "0x7f.0.0.1",
        "0177.0.0.1", "127.0.0.01", "1.2.3.4.5", "a.0x", "256.1.1.1", "\u00ad", "xn--\u2603.example",
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused(text: str) -> None:
    """Above all the number forms that C libraries read as addresses."""
    with pytest.raises(ValueError):
        parse_host(text)


@pytest.mark.parametrize(
    "text",
    ["a:", "a:0", "a:65536", "a:-1", "a:+1", "a:8 0", "a:\u0661", "[::1", "[::1]x", "[::1]:", "[fe80::1%lo]:1", "::1"],
)
def test_malformed_targets_are_refused(text: str) -> None:
    """Ports are 1..65535 in plain digits, IPv6 stands in brackets and has no zone."""
    with pytest.raises(ValueError):
        parse_target(text, 443)


def test_a_missing_port_is_refused_where_there_is_no_default() -> None:
    """CONNECT has to name its port."""
    with pytest.raises(ValueError, match="no port"):
        parse_target("example.org", None)


@given(st.from_regex(r"[a-zA-Z0-9._\[\]:-]{1,30}", fullmatch=True))
def test_the_text_of_a_target_reads_back(text: str) -> None:
    """What is judged and what is written to the server and to events is the same target."""
    try:
        target = parse_target(text, 80)
    except ValueError:
        return
    assert parse_target(str(target), None) == target


ALLOW = parse_allow(
    ("example.org", "*.pypi.example", "Bücher.example:8443", "*.w.example:1", "203.0.113.7", "127.0.0.1:9000",
     "2001:db8::1", "[2001:db8::2]:70", "example.org:22")
)  # fmt: skip


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("example.org:443", True),
        ("EXAMPLE.org.:80", True),
        ("example.org:22", True),
        ("example.org:23", False),
        ("www.example.org:443", False),
        ("badexample.org:443", False),
        ("example.org.evil.example:443", False),
        ("a.pypi.example:443", True),
        ("a.b.pypi.example:80", True),
        ("pypi.example:443", False),
        ("xpypi.example:443", False),
        ("xn--bcher-kva.example:8443", True),
        ("xn--bcher-kva.example:443", False),
        ("a.w.example:1", True),
        ("a.w.example:443", False),
        ("203.0.113.7:443", True),
        ("203.0.113.8:443", False),
        ("127.0.0.1:9000", True),
        ("127.0.0.1:443", False),
        ("[2001:DB8:0::1]:443", True),
        ("[2001:db8::2]:70", True),
        ("[2001:db8::2]:443", False),
        ("[::ffff:203.0.113.7]:443", False),
    ],
)
def test_allow_entries(target: str, expected: bool) -> None:
    """Exact names, names below a wildcard, literal addresses; 80 and 443 unless an entry names a port."""
    assert permits(ALLOW, target) is expected


@pytest.mark.parametrize(
    "entry",
    ["", "*", "*.", "*.*.example", "a.*.example", "https://example.org", "a/b", "a:b", "*.10.0.0.1", "a:0", "a b"],
)
def test_malformed_allow_entries_are_the_callers_error(entry: str) -> None:
    """A list that could mean less or more than its author thinks doesn't start a sandbox."""
    with pytest.raises(InvalidSpec):
        parse_allow((entry,))


def test_an_endless_allow_list_is_refused() -> None:
    """At most 1,000 entries."""
    with pytest.raises(InvalidSpec):
        parse_allow(("example.org",) * 1001)


def test_a_refusal_says_what_would_have_to_be_in_the_list() -> None:
    """Name, port and address are told apart."""
    targets = ("example.org:23", "evil.example:443", "10.0.0.1:80")
    assert [ALLOW.refusal(parse_target(text, None)) for text in targets] == [
        "port 23 of example.org is not in the sandbox's allow_hosts",
        "evil.example is not in the sandbox's allow_hosts",
        "10.0.0.1 is an address, and not itself in the sandbox's allow_hosts",
    ]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("127.0.0.1", "loopback"), ("127.255.255.254", "loopback"), ("0.0.0.0", "unspecified"),
        ("10.1.2.3", "private"), ("172.31.0.1", "private"), ("192.168.1.1", "private"),
        ("169.254.169.254", "a metadata address"), ("169.254.1.1", "a metadata address"),
        ("100.64.0.1", "carrier-grade NAT"), ("100.127.255.255", "carrier-grade NAT"),
        ("100.100.100.200", "a metadata address"), ("168.63.129.16", "a metadata address"),
        ("192.0.0.192", "a metadata address"), ("224.0.0.1", "multicast"), ("239.1.1.1", "multicast"),
        ("255.255.255.255", "reserved"), ("240.0.0.1", "reserved"), ("198.18.0.1", "reserved"),
        ("::", "unspecified"), ("::1", "loopback"), ("::127.0.0.1", "reserved"), ("fe80::1", "link-local"),
        ("fd00:ec2::254", "a metadata address"), ("fc00::1", "private"), ("fec0::1", "private"),
        ("ff02::1", "multicast"),
        ("::ffff:127.0.0.1", "loopback"), ("::ffff:169.254.169.254", "a metadata address"),
        ("64:ff9b::a00:1", "private"), ("64:ff9b:1::1", "reserved"), ("2002:7f00:1::", "reserved"),
        ("2001:0:1::1", "reserved"), ("2001:db8::1", "reserved"), ("100::1", "reserved"), ("4000::1", "reserved"),
        ("93.184.216.34", None), ("8.8.8.8", None), ("172.32.0.1", None), ("100.63.255.255", None),
        ("2606:2800:220:1::1", None), ("::ffff:8.8.8.8", None), ("64:ff9b::808:808", None),
    ],
)  # fmt: skip
def test_where_a_name_may_lead(text: str, word: str | None) -> None:
    """Nowhere inside the host, its network or its cloud, in whatever form."""
    assert address_refusal(ip_address(text)) == word


@given(st.ip_addresses(v=4))
def test_an_address_in_ipv6_clothes_is_judged_as_itself(address: IPv4Address) -> None:
    """Mapped and NAT64 forms reach the same machine."""
    mapped = IPv6Address(f"::ffff:{address}")
    translated = IPv6Address(int(IPv6Address("64:ff9b::")) + int(address))
    assert address_refusal(mapped) == address_refusal(translated) == address_refusal(address)


@given(st.ip_addresses())
def test_only_global_addresses_are_reachable(address: IPv4Address | IPv6Address) -> None:
    """Whatever Python's own tables call private, loopback, link-local, multicast or unspecified is refused."""
    plain = getattr(address, "ipv4_mapped", None) or address
    inside = plain.is_private or plain.is_loopback or plain.is_link_local or plain.is_multicast or plain.is_unspecified
    assert not (inside and reachable([address]))


def test_the_reachable_keep_their_order() -> None:
    """The resolver's order is its preference."""
    texts = ["9.9.9.9", "10.0.0.1", "8.8.8.8", "9.9.9.9", "::1"]
    assert [str(address) for address in reachable(map(ip_address, texts))] == ["9.9.9.9", "8.8.8.8"]
