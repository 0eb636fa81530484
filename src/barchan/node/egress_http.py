"""The proxy's HTTP: bytes of one request head in, what to do and what to send on out. No I/O.

Strict towards the guest: whatever two parsers could read in two ways is refused, so that the server behind the proxy
sees exactly the request that was judged. Answers of servers go to the guest itself and are only freed of what belongs
to the other connection.
"""

import re
from http import HTTPStatus

from msgspec import Struct

from barchan.core.egress import Target, parse_target
from barchan.errors import RemoteProtocolError, TransportError

HEAD_BYTES_MAX = 16 << 10
ANSWER_HEAD_BYTES_MAX = 64 << 10
FIELDS_MAX = 100
CHUNK_LINE_BYTES_MAX = 16
TRAILER_BYTES_MAX = 8 << 10

# Each pattern has one unbounded repetition over one class: hostile input can't make it backtrack.
_REQUEST_LINE = re.compile(rb"([A-Za-z]{1,32}) ([!-~]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n]*)?")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([\t -~\x80-\xff]*)")
_ABSOLUTE = re.compile(rb"[Hh][Tt][Tt][Pp]://([^/?#]+)([^#]*)")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,12}")

_HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization",
    b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
_REWRITTEN = frozenset({b"host", b"content-length"})
_ANSWER_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade"})

TUNNEL_OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"

Fields = list[tuple[bytes, bytes, bytes]]  # name in lower case, name as sent, value


class Request(Struct, frozen=True):
    """One judged request. A `tunnel` has no head to send on; `body_bytes` None says that the body is chunked."""

    target: Target
    tunnel: bool
    head: bytes = b""
    body_bytes: int | None = 0


def _malformed(message: str, status: int = 400) -> RemoteProtocolError:
    return RemoteProtocolError(message, status=status)


def parse_request(head: bytes) -> Request:
    """Read a request head, up to and with its empty line.

    Raises:
        RemoteProtocolError: `details["status"]` is the HTTP status to answer with.
    """
    line, *lines = head[:-4].split(b"\r\n")
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise _malformed("the request line is malformed")
    method, uri, minor = match[1], match[2], int(match[3])
    fields = _parse_fields(lines)
    body_bytes = _framing(fields, minor)
    if method.upper() == b"CONNECT":
        target = _target(uri.decode("ascii"), None)
        _check_host(fields, target, default_port=target.port)
        if body_bytes != 0:
            raise _malformed("a CONNECT request has no body")
        return Request(target, tunnel=True)
    match = _ABSOLUTE.fullmatch(uri)
    if match is None:
        raise _malformed("this is a proxy: ask with CONNECT host:port, or with the whole http:// URL")
    target = _target(match[1].decode("ascii"), 80)
    if not _check_host(fields, target, default_port=80) and minor == 1:
        raise _malformed("an HTTP/1.1 request has a Host header")
    return Request(target, False, _upstream_head(method, match[2], minor, target, fields, body_bytes), body_bytes)


def _parse_fields(lines: list[bytes]) -> Fields:
    if len(lines) > FIELDS_MAX:
        raise _malformed(f"more than {FIELDS_MAX} headers", 431)
    fields: Fields = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        if match is None:
            raise _malformed("a header is malformed")
        fields.append((match[1].lower(), match[1], match[2].strip(b" \t")))
    return fields


def _target(text: str, default_port: int | None) -> Target:
    try:
        return parse_target(text, default_port)
    except ValueError as error:
        raise _malformed(str(error)) from error


def _check_host(fields: Fields, target: Target, *, default_port: int) -> bool:
    """Whether there is a Host header; one that disagrees with the request line is an error."""
    values = [value for name, _, value in fields if name == b"host"]
    if len(values) > 1:
        raise _malformed("more than one Host header")
    for value in values:
        if not value.isascii() or _target(value.decode("ascii"), default_port) != target:
            raise _malformed(f"the Host header does not agree with {target}")
    return bool(values)


def _framing(fields: Fields, minor: int) -> int | None:
    encodings = [value.lower() for name, _, value in fields if name == b"transfer-encoding"]
    lengths = [value for name, _, value in fields if name == b"content-length"]
    if encodings:
        if encodings != [b"chunked"] or lengths or minor == 0:
            raise _malformed("the body's length is ambiguous")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise _malformed("the body's length is ambiguous")
    return int(lengths[0])


def _upstream_head(
    method: bytes, path: bytes, minor: int, target: Target, fields: Fields, body_bytes: int | None
) -> bytes:
    named = {token.strip().lower() for name, _, value in fields if name == b"connection" for token in value.split(b",")}
    dropped = named | _HOP_BY_HOP | _REWRITTEN
    if not path:
        path = b"*" if method.upper() == b"OPTIONS" else b"/"
    elif not path.startswith(b"/"):
        path = b"/" + path
    host = str(target) if target.port != 80 else str(target).removesuffix(":80")
    lines = [b"%s %s HTTP/1.%d" % (method, path, minor), b"Host: " + host.encode("ascii")]
    lines += [raw + b": " + value for name, raw, value in fields if name not in dropped]
    if body_bytes is None:
        lines.append(b"Transfer-Encoding: chunked")
    elif body_bytes or any(name == b"content-length" for name, _, _ in fields):
        lines.append(b"Content-Length: %d" % body_bytes)
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])


class ChunkedBody:
    """Checks a chunked body and frames it anew. Extensions are refused, trailers dropped; holds at most 8 KiB."""

    def __init__(self) -> None:
        self.is_done = False
        self._held = b""
        self._chunk_left = 0
        self._chunk_end = False  # the CRLF after a chunk's data is due
        self._trailer_bytes: int | None = None

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the guest and return those to send on. What follows the body is dropped.

        Raises:
            RemoteProtocolError: The framing is malformed.
        """
        data, self._held = self._held + data, b""
        out: list[bytes] = []
        at = 0
        while at < len(data) and not self.is_done:
            if self._chunk_left:
                piece = data[at : at + self._chunk_left]
                at += len(piece)
                self._chunk_left -= len(piece)
                self._chunk_end = self._chunk_left == 0
                out.append(b"%x\r\n%s\r\n" % (len(piece), piece))
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                self._hold(data[at:])
                break
            out.append(self._line(data[at:end]))
            at = end + 2
        return b"".join(out)

    def _hold(self, data: bytes) -> None:
        bound = CHUNK_LINE_BYTES_MAX if self._trailer_bytes is None else TRAILER_BYTES_MAX
        if len(data) > bound:
            raise _malformed("a line of the chunked body is too long")
        self._held = data

    def _line(self, line: bytes) -> bytes:
        if self._chunk_end:
            if line:
                raise _malformed("a chunk is longer than its size")
            self._chunk_end = False
        elif self._trailer_bytes is not None:
            self._trailer_bytes += len(line) + 2
            if self._trailer_bytes > TRAILER_BYTES_MAX:
                raise _malformed("the trailers are too long")
            if not line:
                self.is_done = True
                return b"0\r\n\r\n"
        elif not _CHUNK_SIZE.fullmatch(line):
            raise _malformed("a chunk's size is malformed")
        elif (size := int(line, 16)) == 0:
            self._trailer_bytes = 0
        else:
            self._chunk_left = size
        return b""


class SizedBody:
    """The same for a body of `left` bytes."""

    def __init__(self, left: int) -> None:
        self._left = left

    @property
    def is_done(self) -> bool:
        return self._left == 0

    def feed(self, data: bytes) -> bytes:
        piece = data[: self._left]
        self._left -= len(piece)
        return piece


def body_of(request: Request) -> ChunkedBody | SizedBody:
    """What takes this request's body off the guest's bytes."""
    return ChunkedBody() if request.body_bytes is None else SizedBody(request.body_bytes)


def answer_status(head: bytes) -> int:
    """The status code of a server's answer.

    Raises:
        TransportError: Not an HTTP/1 answer, or a switch to another protocol, which was not asked for.
    """
    match = _STATUS_LINE.match(head)
    if match is None or int(match[1]) == 101:
        raise TransportError("the server did not answer with HTTP/1.1")
    return int(match[1])


def answer_head(head: bytes) -> bytes:
    """A server's final answer head for the guest: without the upstream connection's own headers, and closing."""
    line, *lines = head[:-4].split(b"\r\n")
    kept: list[bytes] = []
    dropping = False
    for field in lines:
        if not field.startswith((b" ", b"\t")):  # else it continues the header before it
            dropping = field.partition(b":")[0].strip().lower() in _ANSWER_HOP_BY_HOP
        if not dropping:
            kept.append(field)
    return b"\r\n".join([line, *kept, b"Connection: close", b"", b""])


def own_answer(status: int, reason: str) -> bytes:
    """The proxy's own answer: a status and one line of text."""
    body = reason.replace("\n", " ").encode("utf-8", "replace") + b"\n"
    return (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode("ascii") + body
