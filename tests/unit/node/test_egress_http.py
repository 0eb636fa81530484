"""The egress proxy's HTTP parser: one judged request in, the bytes for the server out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from barchan.core.egress import Target
from barchan.errors import RemoteProtocolError, TransportError
from barchan.node.egress_http import (
    ChunkedBody,
    Request,
    SizedBody,
    answer_head,
    answer_status,
    body_of,
    own_answer,
    parse_request,
)


def head(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def test_a_connect_names_its_target() -> None:
    """With and without a Host header, in any case, also in HTTP/1.0."""
    expected = Request(Target("example.org", 443), tunnel=True)
    assert parse_request(head("CONNECT Example.org:443 HTTP/1.1", "Host: example.ORG:443")) == expected
    assert parse_request(head("CONNECT example.org:443 HTTP/1.1", "Host: example.org")) == expected
    assert parse_request(head("connect example.org.:443 HTTP/1.0")) == expected


def test_a_plain_request_is_written_anew() -> None:
    """The server sees the judged name as Host, no header of this connection, and that it will close."""
    got = parse_request(
        head(
            "GET http://Example.org/a?b=%20 HTTP/1.1", "Host: example.org:80", "Accept:  */* ", "X-Secret: 1",
            "Connection: keep-alive, X-Secret", "Keep-Alive: 5", "Proxy-Connection: keep-alive",
            "Proxy-Authorization: Basic eA==", "TE: trailers", "Upgrade: h2c", "Trailer: X",
        )
    )  # fmt: skip
    assert got.head == head("GET /a?b=%20 HTTP/1.1", "Host: example.org", "Accept: */*", "Connection: close")
    assert (got.target, got.tunnel, got.body_bytes) == (Target("example.org", 80), False, 0)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("GET http://a.example:8080 HTTP/1.1", ["GET / HTTP/1.1", "Host: a.example:8080"]),
        ("GET HTTP://a.example:8080?q HTTP/1.1", ["GET /?q HTTP/1.1", "Host: a.example:8080"]),
        ("OPTIONS http://a.example:8080 HTTP/1.1", ["OPTIONS * HTTP/1.1", "Host: a.example:8080"]),
        ("GET http://a.example:8080/x HTTP/1.0", ["GET /x HTTP/1.0", "Host: a.example:8080"]),
    ],
)
def test_the_path_of_an_url(line: str, expected: list[str]) -> None:
    """What follows host and port is the request for the server."""
    assert parse_request(head(line, "Host: a.example:8080")).head == head(*expected, "Connection: close")


def test_bodies_keep_their_framing() -> None:
    """A length stays a length, chunks stay chunks, and no header says both."""
    post, host = "POST http://a.example/ HTTP/1.1", "Host: a.example"
    sized = parse_request(head(post, host, "Content-Length: 5"))
    assert (sized.body_bytes, isinstance(body_of(sized), SizedBody)) == (5, True)
    assert sized.head == head("POST / HTTP/1.1", host, "Content-Length: 5", "Connection: close")
    chunked = parse_request(head(post, host, "Transfer-Encoding: Chunked"))
    assert (chunked.body_bytes, isinstance(body_of(chunked), ChunkedBody)) == (None, True)
    assert chunked.head == head("POST / HTTP/1.1", host, "Transfer-Encoding: chunked", "Connection: close")
    unframed = parse_request(head(post, host, "Connection: content-length, host", "Content-Length: 0"))
    assert unframed.head == head("POST / HTTP/1.1", host, "Content-Length: 0", "Connection: close")


GET, HOST = "GET http://a.example/ HTTP/1.1", "Host: a.example"
CONNECT = "CONNECT a.example:443 HTTP/1.1"


@pytest.mark.parametrize(
    "lines",
    [
        [""], ["", GET, HOST], ["GET"], ["GET http://a.example/"], ["GET  http://a.example/ HTTP/1.1", HOST],
        ["GET http://a.example/ HTTP/2.0", HOST], ["GET http://a.example/ HTTP/1.1 ", HOST],
        [" " + GET, HOST], ["GET http://a.example/ x HTTP/1.1", HOST], ["GET http://a.example/\x7f HTTP/1.1", HOST],
        ["GET / HTTP/1.1", HOST], ["GET //a.example/ HTTP/1.1", HOST], ["GET https://a.example/ HTTP/1.1", HOST],
        ["GET ftp://a.example/ HTTP/1.1", HOST], ["GET http:///x HTTP/1.1", HOST],
        ["GET http://u:p@a.example/ HTTP/1.1", HOST], ["GET http://a.example/#f HTTP/1.1", HOST],
        ["GET http://a.example\\@b.example/ HTTP/1.1", HOST], ["GET http://a.ex%61mple/ HTTP/1.1", HOST],
        [GET], [GET, "Host: b.example"], [GET, "Host: a.example:81"], [GET, HOST, HOST], [GET, HOST, "Host: b.example"],
        [GET, "Host: "], [GET, "Host: a.example, b.example"], [GET, "Host: \xe4.example"],
        [GET, HOST, "X : 1"], [GET, HOST, "X: 1\0"], [GET, HOST, "X: 1\rY: 2"], [GET, HOST, "X: 1\nY: 2"],
        [GET, HOST, " folded"], [GET, HOST, "no colon"], [GET, HOST, ": empty"], [GET, HOST, "X\xe4: 1"],
        [GET, HOST, "Content-Length: 1", "Content-Length: 1"], [GET, HOST, "Content-Length: 1, 1"],
        [GET, HOST, "Content-Length: +1"], [GET, HOST, "Content-Length: 0x1"], [GET, HOST, "Content-Length: "],
        [GET, HOST, "Content-Length: 1", "Transfer-Encoding: chunked"], [GET, HOST, "Transfer-Encoding: identity"],
        [GET, HOST, "Transfer-Encoding: gzip, chunked"], [GET, HOST, "Transfer-Encoding: \x0bchunked"],
        [GET, HOST, "Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
        ["GET http://a.example/ HTTP/1.0", HOST, "Transfer-Encoding: chunked"],
        ["CONNECT a.example HTTP/1.1"], ["CONNECT http://a.example:443 HTTP/1.1"], ["CONNECT a.example:443/ HTTP/1.1"],
        ["CONNECT u@a.example:443 HTTP/1.1"], [CONNECT, "Host: b.example:443"], [CONNECT, "Host: a.example:80"],
        [CONNECT, "Content-Length: 3"], [CONNECT, "Transfer-Encoding: chunked"],
    ],
)  # fmt: skip
def test_what_could_be_read_in_two_ways_is_refused(lines: list[str]) -> None:
    """Request smuggling lives on two parsers disagreeing: nothing ambiguous passes the first one."""
    with pytest.raises(RemoteProtocolError) as caught:
        parse_request(head(*lines))
    assert caught.value.details["status"] == 400


def test_too_many_headers_are_refused() -> None:
    """At most 100, whatever their size."""
    with pytest.raises(RemoteProtocolError) as caught:
        parse_request(head(GET, HOST, *["A: 1"] * 100))
    assert caught.value.details["status"] == 431


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    """A hostile head raises nothing but the error that is answered."""
    for prefix in (b"", b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n", b"CONNECT "):
        try:
            request = parse_request(prefix + data + b"\r\n\r\n")
        except RemoteProtocolError:
            continue
        assert request.tunnel or request.head.count(b"\r\n\r\n") == 1


def test_hostile_headers_cost_linear_time() -> None:
    """16 KiB of white space before a bad byte is decided at once, not by backtracking."""
    with pytest.raises(RemoteProtocolError):
        parse_request(head(GET, HOST, "X:" + " \t" * 8000 + "\x01"))


def feed_all(data: bytes, cuts: list[int]) -> tuple[bytes, bool]:
    body = ChunkedBody()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    sent = b"".join(body.feed(data[start:end]) for start, end in itertools.pairwise(edges))
    return sent, body.is_done


def unchunk(data: bytes) -> bytes:
    out, rest = b"", data
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        out, rest = out + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return out


@given(st.lists(st.binary(min_size=1, max_size=50)), st.binary(max_size=40), st.lists(st.integers(0, 4000), max_size=8))
def test_a_chunked_body_passes_in_any_pieces(chunks: list[bytes], after: bytes, cuts: list[int]) -> None:
    """The server gets the same bytes; trailers and what follows the body don't reach it."""
    wire = b"".join(b"%X\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"000\r\nX-Trailer: 1\r\n\r\n"
    sent, is_done = feed_all(wire + after, cuts)
    assert is_done
    assert unchunk(sent) == b"".join(chunks)
    assert sent.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n", b"g\r\n", b"-1\r\n", b"0x1\r\n", b" 1\r\n", b"1 \r\n", b"1;x=y\r\n", b"1\n\r\n", b"1" * 13 + b"\r\n",
        b"1" * 17, b"1\r\nab\r\n", b"0\r\n" + b"X: 1\r\n" * 2000, b"0\r\n" + b"x" * 9000,
    ],
)  # fmt: skip
def test_a_malformed_chunked_body_is_refused(data: bytes) -> None:
    """Sizes are plain hexadecimal, chunks end where they say, lines and trailers are bounded."""
    with pytest.raises(RemoteProtocolError):
        ChunkedBody().feed(data)


def test_a_sized_body_ends_at_its_size() -> None:
    """What follows is not part of this request."""
    body = SizedBody(5)
    assert [body.feed(b"abc"), body.is_done, body.feed(b"defg"), body.is_done] == [b"abc", False, b"de", True]


def test_an_answer_closes_and_keeps_the_rest() -> None:
    """The server's own connection headers, folded ones too, don't reach the guest."""
    answer = head(
        "HTTP/1.1 200 OK", "Connection: keep-alive", " x", "Content-Length: 2", "Keep-Alive: 5", "Set-Cookie: a"
    )
    assert answer_head(answer) == head("HTTP/1.1 200 OK", "Content-Length: 2", "Set-Cookie: a", "Connection: close")
    assert [answer_status(answer), answer_status(b"HTTP/1.0 404\r\n\r\n")] == [200, 404]


@pytest.mark.parametrize("line", ["SSH-2.0-x", "HTTP/1.1 101 Switching Protocols", "HTTP/1.1 999 x", "HTTP/2 200", ""])
def test_an_answer_in_another_protocol_is_the_servers_failure(line: str) -> None:
    """Upgrades were not sent on, so that none can be answered."""
    with pytest.raises(TransportError):
        answer_status(head(line))


def test_the_proxys_own_answer_is_one_line() -> None:
    """Whatever the reason holds, it can't add headers or lines."""
    assert own_answer(403, "no\r\nway") == (
        b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 8\r\n"
        b"Connection: close\r\n\r\nno\r way\n"
    )
