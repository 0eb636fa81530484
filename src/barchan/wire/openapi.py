"""The OpenAPI 3.1 description of the node's interface, made from the route table and its types."""

import re
from typing import Any

import msgspec

from barchan.wire.api import JSON, MSGPACK, ROUTES, ErrorBody, Route

_TYPES: dict[type, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    list: {"type": "array", "items": {"type": "string"}},
}


def describe() -> dict[str, Any]:
    """The whole document, ready for JSON."""
    types = [ErrorBody, *(route.reply for route in ROUTES if route.reply is not bytes)]
    types += [route.body for route in ROUTES if route.body_kind == "value"]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    known = dict(zip(map(repr, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, known)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Barchan node", "version": "1", "description": "Sandboxes of one machine."},
        "components": {"schemas": components, "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}}},
        "security": [{"bearer": []}],
        "paths": paths,
    }


def _operation(route: Route, known: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", route.path)
        ]
        + [
            {"name": name, "in": "query", "required": name in route.required, "schema": _TYPES[kind]}
            for name, kind in route.query.items()
        ],
        "responses": {
            "200": {"description": "Done.", "content": _reply(route, known)},
            "default": {"description": "Not done, and why.", "content": {JSON: {"schema": known[repr(ErrorBody)]}}},
        },
    }
    if route.body_kind == "value":
        schema = known[repr(route.body)]
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema} for kind in (JSON, MSGPACK)}}
    elif route.body_kind == "bytes":
        operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {}}}
    return operation


def _reply(route: Route, known: dict[str, Any]) -> dict[str, Any]:
    if route.reply_kind == "bytes":
        return {"application/octet-stream": {}}
    schema = {"schema": known[repr(route.reply)]}
    return {"application/x-ndjson" if route.reply_kind == "stream" else JSON: schema, MSGPACK: schema}
