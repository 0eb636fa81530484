"""The registry client against servers that refuse, fail, cut, limit and lie."""

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from barchan.errors import (
    BarchanError,
    BlobCorrupt,
    CapacityError,
    ConnectionLost,
    Denied,
    InvalidSpec,
    NotFound,
    RemoteProtocolError,
    TransportError,
)
from barchan.image import registry, sources
from barchan.image.oci import Descriptor, sha256
from barchan.image.registry import Registry
from barchan.image.registry_image import RegistryImage, RegistrySource
from barchan.image.registry_rules import is_loopback, new_session
from barchan.image.store import ImageStore
from barchan.image.template import Template
from tests.layouts import MACHINE, Layout, tar_of
from tests.unit.image.conftest import BLOB, DATA, QUICK, OpenRegistry, Server, fetched


async def test_a_blob_that_is_cut_goes_on_where_it_was(server: Server, open_registry: OpenRegistry) -> None:
    """Each cut is followed by a request for the rest; a server that knows no ranges is read again from the start."""
    for knows_ranges in (True, False):
        cuts = iter((300_000, 900_000, None))
        server.headers.clear()

        async def cutting(
            request: web.Request, cuts: AsyncIterator[int] = cuts, knows_ranges: bool = knows_ranges
        ) -> web.StreamResponse:
            asked = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
            start = int(asked[1]) if asked and knows_ranges else 0
            response = web.StreamResponse(status=206 if start else 200)
            response.content_length = len(DATA) - start
            if start:
                response.headers["Content-Range"] = f"bytes {start}-{len(DATA) - 1}/{len(DATA)}"
            await response.prepare(request)
            end = next(cuts)
            await response.write(DATA[start:end])
            if end is not None:
                await asyncio.sleep(0.05)  # what was written arrives before the end does
                assert request.transport is not None
                request.transport.abort()
            return response

        server.handler = cutting
        assert await fetched(open_registry()) == DATA
        assert len(server.headers) == 3
        assert "Range" not in server.headers[0]
        assert all("Range" in headers for headers in server.headers[1:])


async def test_a_cut_after_the_last_byte_is_none(server: Server, open_registry: OpenRegistry) -> None:
    """Nothing is left to ask for: a registry would have no answer to that."""

    async def cutting(request: web.Request) -> web.StreamResponse:
        if "Range" in request.headers:
            return web.Response(status=416)
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(DATA)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    server.handler = cutting
    assert await fetched(open_registry()) == DATA
    assert len(server.seen) == 1


async def test_bytes_that_come_again_are_progress(
    server: Server, open_registry: OpenRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without ranges sends all of them before the first new one, and may take its time for each part."""
    monkeypatch.setattr(registry, "PROGRESS_BYTES", 1000)
    monkeypatch.setattr(registry, "PROGRESS_S_MAX", 0.4)
    whole = False

    async def slow(request: web.Request) -> web.StreamResponse:
        nonlocal whole
        response = web.StreamResponse()
        response.content_length = len(DATA)
        await response.prepare(request)
        part = len(DATA) // 8
        for number in range(8):
            await response.write(DATA[part * number : part * (number + 1)])
            if number == 6 and not whole:
                await asyncio.sleep(0.05)
                whole = True
                assert request.transport is not None
                request.transport.abort()
                return response
            if "Range" in request.headers:
                await asyncio.sleep(0.1)
        return response

    server.handler = slow
    assert await fetched(open_registry()) == DATA
    assert len(server.seen) == 2


async def test_a_blob_that_is_cut_without_end_is_given_up(server: Server, open_registry: OpenRegistry) -> None:
    """Attempts are bounded where nothing comes; the failure names registry and blob."""

    async def cutting(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = len(DATA)
        await response.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        return response

    server.handler = cutting
    with pytest.raises(ConnectionLost, match=f"{server.host}/a/b@sha256:.*try: again later"):
        await fetched(open_registry())
    assert len(server.seen) == QUICK.attempts


@pytest.mark.parametrize(
    ("body", "said"), [(DATA + b"x", "more than the 1048576 bytes"), (DATA[:-1], "has 1048575 bytes")]
)
async def test_a_blob_of_another_size_is_corrupt(
    server: Server, open_registry: OpenRegistry, body: bytes, said: str
) -> None:
    """Neither too much nor too little is taken, and no second try is made."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body)

    server.handler = answer
    with pytest.raises(BlobCorrupt, match=said):
        await fetched(open_registry())
    assert len(server.seen) == 1


async def test_other_bytes_than_asked_for_are_refused(server: Server, open_registry: OpenRegistry) -> None:
    """A document that has not its digest, and a range that is not the one that was asked for."""

    async def wrong(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"{}")

    server.handler = wrong
    with pytest.raises(BlobCorrupt, match="other bytes"):
        await open_registry().manifest("a/b", BLOB.digest)
    with pytest.raises(BlobCorrupt, match="other bytes"):
        await open_registry().document("a/b", Descriptor("x", BLOB.digest, 2))
    with pytest.raises(InvalidSpec, match="at most 4194304 are read"):
        await open_registry().document("a/b", Descriptor("x", BLOB.digest, 5 << 20))


@pytest.mark.parametrize(
    ("status", "headers", "requests", "error"),
    [
        (429, {}, 3, CapacityError),
        (429, {"Retry-After": "0"}, 3, CapacityError),
        (429, {"Retry-After": "3600"}, 1, CapacityError),
        (429, {"Retry-After": "Fri, 31 Dec 2100 23:59:59 GMT"}, 1, CapacityError),
        (500, {}, 3, TransportError),
        (503, {"Retry-After": "soon"}, 3, TransportError),
        (404, {}, 1, NotFound),
        (403, {}, 1, Denied),
        (401, {}, 1, Denied),
        (418, {}, 1, BarchanError),
    ],
)
async def test_statuses_mean_what_they_say(
    server: Server,
    open_registry: OpenRegistry,
    status: int,
    headers: dict[str, str],
    requests: int,
    error: type[BarchanError],
) -> None:
    """A limit is the platform's fault and never "not found"; what may pass is tried again, what may not is not."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, headers=headers)

    server.handler = answer
    with pytest.raises(error, match=server.host) as caught:
        await open_registry().manifest("a/b", "1")
    assert len(server.seen) == requests
    if status == 429:
        assert caught.value.fault == "platform"
        assert int(caught.value.details["retry_after_ms"]) >= 0
        if headers.get("Retry-After") == "3600":
            assert caught.value.details["retry_after_ms"] == 3_600_000


async def test_what_passes_is_waited_for(server: Server, open_registry: OpenRegistry) -> None:
    """Failures and limits that end in time are not seen."""
    statuses = iter((503, 429, 200))

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=next(statuses), headers={"Retry-After": "0"}, body=b"{}")

    server.handler = answer
    assert await open_registry().manifest("a/b", "1") == (b"{}", "application/octet-stream")


async def test_an_endless_manifest_is_not_read(server: Server, open_registry: OpenRegistry) -> None:
    """4 MiB are enough."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b" " * (5 << 20))

    server.handler = answer
    with pytest.raises(BlobCorrupt, match="more than 4194304 bytes"):
        await open_registry().manifest("a/b", "1")


LONG_LABEL = f"http://{'x' * 64}.example/"  # no name server can be asked for it


@pytest.mark.parametrize(
    "location", ["", "ftp://x/", "file:///etc/passwd", "/loop", "http://", "http://[::bad/", LONG_LABEL]
)
async def test_redirects_to_nowhere_are_refused(server: Server, open_registry: OpenRegistry, location: str) -> None:
    """Neither other protocols nor circles are followed."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": location})

    server.handler = answer
    with pytest.raises(RemoteProtocolError):
        await open_registry().manifest("a/b", "1")
    assert len(server.seen) <= 6


async def test_mirrors_come_first_and_failing_ones_are_left_alone(
    server: Server, other: Server, open_registry: OpenRegistry
) -> None:
    """A mirror that lacks a blob is asked for the next; one that fails is not; the registry has the last word."""
    config = json.dumps({"architecture": MACHINE, "os": "linux", "rootfs": {"diff_ids": []}}).encode()
    described = {"mediaType": "x", "digest": sha256(config), "size": len(config)}
    manifest = json.dumps({"schemaVersion": 2, "config": described, "layers": []}).encode()

    async def origin(request: web.Request) -> web.StreamResponse:
        return web.Response(body=manifest if "/manifests/" in request.path else config)

    async def mirror(request: web.Request) -> web.StreamResponse:
        return web.Response(body=manifest) if "/manifests/" in request.path else web.Response(status=404)

    image = RegistryImage(server.host, "a/b", "1")
    server.handler, other.handler = origin, mirror
    found = await RegistrySource(image, [open_registry(host=other.host), open_registry()]).image()
    assert found.config.architecture == MACHINE
    assert (len(other.seen), server.seen) == (2, [f"GET /v2/a/b/blobs/{sha256(config)}"])

    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(status=500)

    other.handler = broken
    other.seen.clear()
    await RegistrySource(image, [open_registry(host=other.host), open_registry()]).image()
    assert len(other.seen) == QUICK.attempts

    server.handler = Server.nothing
    with pytest.raises(NotFound, match=server.host):
        await RegistrySource(image, [open_registry(host=other.host), open_registry()]).image()


async def test_an_upload_goes_on_after_a_cut(server: Server, open_registry: OpenRegistry, tmp_path: Path) -> None:
    """What has come is asked for, and the rest is sent; an upload that the registry forgot begins again."""
    data = DATA * 20  # three parts
    blob = Descriptor("x", sha256(data), len(data))
    (tmp_path / "blob").write_bytes(data)
    held = bytearray()
    done: list[bytes] = []
    troubles = ["cut", "", "forget", ""]

    async def answer(request: web.Request) -> web.StreamResponse:
        here = {"Location": f"/upload?state={len(held)}"}
        if request.method == "HEAD":
            return web.Response(status=404)
        if request.method == "POST":
            held.clear()
            return web.Response(status=202, headers=here)
        if request.method == "GET":
            return web.Response(status=204, headers={**here, "Range": f"0-{max(0, len(held) - 1)}"})
        if request.method == "PUT":
            done.append(bytes(held))
            return web.Response(status=201)
        part = b"".join([piece async for piece in request.content.iter_any()])
        assert request.headers["Content-Range"] == f"{len(held)}-{len(held) + len(part) - 1}"
        held.extend(part)
        trouble = troubles.pop(0) if troubles else ""
        if trouble == "cut":
            assert request.transport is not None
            request.transport.abort()
        if trouble == "forget":
            return web.Response(status=404)
        return web.Response(status=202, headers={"Location": f"/upload?state={len(held)}"})

    server.handler = answer
    await open_registry().upload("a/b", tmp_path / "blob", blob)
    assert done == [data]
    assert sum(seen.startswith("POST") for seen in server.seen) == 2


async def test_an_upload_that_the_registry_forgets_again_and_again_ends(
    server: Server, open_registry: OpenRegistry, tmp_path: Path
) -> None:
    """A part that was taken and is gone is no progress."""
    data = DATA * 20
    (tmp_path / "blob").write_bytes(data)
    parts = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal parts
        here = {"Location": "/upload"}
        if request.method == "HEAD":
            return web.Response(status=404)
        if request.method == "GET":
            return web.Response(status=204, headers={**here, "Range": "0-0"})
        if request.method == "PATCH":
            async for _ in request.content.iter_any():
                pass
            parts += 1
            return web.Response(status=202 if parts % 2 and parts < 200 else 500, headers=here)
        return web.Response(status=202, headers=here)

    server.handler = answer
    with pytest.raises(TransportError, match="status 500"):
        await open_registry().upload("a/b", tmp_path / "blob", Descriptor("x", sha256(data), len(data)))
    assert parts < 50


async def test_a_registry_that_fails_in_a_layer_is_not_called_corrupt(
    server: Server, other: Server, tmp_path: Path
) -> None:
    """A cut without end and a limit in the middle of a layer are what they are, and leave nothing; a mirror goes on."""
    layout = Layout(tmp_path / "layout", tar_of(("a", os.urandom(1 << 20))))
    big = layout.layers[0]["digest"]
    limited = False

    async def failing(request: web.Request) -> web.StreamResponse:
        reference = request.path.rpartition("/")[2]
        data = layout.blob(layout.manifest["digest"] if reference == "1" else reference).read_bytes()
        if reference != big:
            return web.Response(body=data)
        if limited:
            return web.Response(status=429)
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[:500_000])
        assert request.transport is not None
        request.transport.abort()
        return response

    async def whole(request: web.Request) -> web.StreamResponse:
        if request.path.endswith(big):
            return web.Response(body=layout.blob(big).read_bytes())
        return await failing(request)

    server.handler = other.handler = failing
    store = ImageStore(tmp_path / "images")

    async def pull(*mirrors: str) -> Template:
        return await sources.pull(
            store,
            f"docker://{server.host}/a:1",
            kind="erofs",
            progress=lambda said: None,
            registries=sources.RegistryOptions(mirrors=mirrors, retries=QUICK),
        )

    with pytest.raises(ConnectionLost):
        await pull()
    limited = True
    with pytest.raises(CapacityError):
        await pull()
    assert [path for name in ("tmp", "layers", "templates") for path in (store.root / name).iterdir()] == []
    limited = False
    server.handler = whole
    assert len((await pull(other.host)).layers) == 1


@pytest.mark.parametrize("host", [f"{'x' * 64}.example", "a..b", "h:99999999"])
async def test_a_host_that_is_none_is_said(host: str) -> None:
    """Before anything is sent."""
    async with new_session() as session:
        with pytest.raises(InvalidSpec, match="is no HOST"):
            Registry(host, session)


def test_only_loopback_is_without_tls() -> None:
    """By address or name, with and without a port."""
    assert all(map(is_loopback, ("localhost", "localhost:5000", "127.0.0.1:5000", "127.1.2.3", "[::1]:80", "[::1]")))
    assert not any(map(is_loopback, ("localhost.x", "10.0.0.1:5000", "h.x:127", "[::2]:80")))
