"""What handlers make of a request's query, and responses of values."""

import re
from typing import Any, get_args, get_type_hints

import msgspec
from aiohttp import web
from msgspec import Struct

from barchan.errors import InvalidSpec
from barchan.node.live import Live
from barchan.wire import api
from barchan.wire.api import MSGPACK

OFFSET_MAX = (1 << 63) - 1
STREAMING = web.RequestKey("streaming", web.StreamResponse)


_UNKNOWN = re.compile(r"unknown field `[^`]*`(?: - at `\$((?:\.\w+)*)`)?$")


def known(kind: Any, error: str) -> str:
    """The fields there are, where a body of that kind has an unknown one."""
    found = _UNKNOWN.search(error)
    for name in (found[1] or "").split(".")[1:] if found is not None else ():
        kind = get_type_hints(kind).get(name)
        kind = next((part for part in get_args(kind) if isinstance(part, type) and issubclass(part, Struct)), kind)
    fields = getattr(kind, "__struct_fields__", ()) if found is not None else ()
    return f" (there are: {', '.join(fields)})" if fields else ""


def is_packed(request: web.Request) -> bool:
    return request.headers.get("Accept") == MSGPACK


def reply(request: web.Request, value: object, status: int = 200) -> web.Response:
    if is_packed(request):
        return web.Response(body=msgspec.msgpack.encode(value), content_type=MSGPACK, status=status)
    return web.Response(body=msgspec.json.encode(value), content_type=api.JSON, status=status)


async def begin_stream(request: web.Request, content_type: str = "") -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_type = content_type or (MSGPACK if is_packed(request) else "application/x-ndjson")
    await response.prepare(request)
    request[STREAMING] = response
    return response


def labels_of(request: web.Request) -> dict[str, str]:
    return pairs_of(request, "label")


def pairs_of(request: web.Request, parameter: str) -> dict[str, str]:
    """A parameter that repeats, with KEY=VALUE each time."""
    pairs = {}
    for item in request.query.getall(parameter, []):
        name, separator, value = item.partition("=")
        if not separator:
            raise InvalidSpec(f"{parameter}={item!r} is not {parameter}=KEY=VALUE")
        pairs[name] = value
    return pairs


def guest_path(live: Live, request: web.Request, name: str) -> str:
    if name not in request.query:
        raise InvalidSpec(f"the query needs {name}=")
    return live.processes.path(request.query[name])


def number(request: web.Request, name: str, default: int, *, least: int = 0, most: int = OFFSET_MAX) -> int:
    raw = request.query.get(name)
    if raw is None:
        return default
    try:
        value = int(raw)
    except ValueError as error:
        raise InvalidSpec(f"{name}={raw[:40]!r} is not a whole number") from error
    if not least <= value <= most:
        raise InvalidSpec(f"{name}={value} is out of range")
    return value


def seconds(request: web.Request, name: str) -> float:
    raw = request.query.get(name, "0")
    try:
        value = float(raw)
    except ValueError as error:
        raise InvalidSpec(f"{name}={raw!r} is not a number") from error
    if not 0 <= value < float("inf"):
        raise InvalidSpec(f"{name}={raw!r} is not a duration")
    return value


def flag(request: web.Request, name: str, *, default: bool) -> bool:
    raw = request.query.get(name)
    if raw is None:
        return default
    if raw.lower() in ("true", "1"):
        return True
    if raw.lower() in ("false", "0"):
        return False
    raise InvalidSpec(f"{name}={raw!r} is neither true nor false")
