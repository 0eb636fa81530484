"""Who a registry takes us for, and who is told."""

import base64
import json
from pathlib import Path

import pytest
from aiohttp import web

from barchan.errors import (
    BlobCorrupt,
    Denied,
    InvalidSpec,
    RemoteProtocolError,
)
from barchan.image.registry_auth import Credentials, parse_challenge, read_credentials
from tests.unit.image.conftest import DATA, OpenRegistry, Server, fetched


async def test_a_token_is_fetched_as_the_registry_asks(
    server: Server, other: Server, open_registry: OpenRegistry
) -> None:
    """Realm, service and scope come from the challenge; the user's name goes to the token server, the token back."""

    async def tokens(request: web.Request) -> web.StreamResponse:
        basic = base64.b64encode(b"me:secret").decode()
        if request.headers.get("Authorization") != f"Basic {basic}":
            return web.Response(status=401)
        assert dict(request.query) == {"service": "reg", "scope": "repository:a/b:pull", "x": "1"}
        return web.json_response({"token": "t0ken"})

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") == "Bearer t0ken":
            return web.Response(body=b"{}")
        asked = f'Bearer realm="http://{other.host}/token?x=1",service="reg",scope="repository:a/b:pull"'
        return web.Response(status=401, headers={"WWW-Authenticate": asked})

    server.handler, other.handler = answer, tokens
    registry = open_registry(Credentials("me", "secret"))
    for _ in range(3):
        await registry.manifest("a/b", "1")
    assert (len(server.seen), len(other.seen)) == (4, 1)
    with pytest.raises(Denied, match="refuses us") as caught:
        await open_registry(Credentials("me", "wrong")).manifest("a/b", "1")
    assert "wrong" not in str(caught.value)


async def test_an_identity_token_is_exchanged(server: Server, other: Server, open_registry: OpenRegistry) -> None:
    """What `docker login` may leave instead of a password is sent in a form, never in an address."""

    async def tokens(request: web.Request) -> web.StreamResponse:
        form = await request.post()
        assert (form["grant_type"], form["refresh_token"], form["service"]) == ("refresh_token", "long", "reg")
        assert "long" not in request.path_qs
        return web.json_response({"access_token": "short"})

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") == "Bearer short":
            return web.Response(body=b"{}")
        asked = f'Bearer realm="http://{other.host}/",service="reg"'
        return web.Response(status=401, headers={"WWW-Authenticate": asked})

    server.handler, other.handler = answer, tokens
    await open_registry(Credentials(identity_token="long")).manifest("a/b", "1")


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b'{"token": 1}', b'{"token": "a\\r\\nX: y"}', b'{"token": "' + b"x" * 70_000 + b'"}'],
)
async def test_a_token_server_s_nonsense_is_refused(server: Server, open_registry: OpenRegistry, answer: bytes) -> None:
    """No token, one of another kind, one that would add a header, and an endless one."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/token":
            return web.Response(body=answer)
        return web.Response(status=401, headers={"WWW-Authenticate": f'Bearer realm="http://{server.host}/token"'})

    server.handler = handle
    with pytest.raises((RemoteProtocolError, BlobCorrupt)):
        await open_registry().manifest("a/b", "1")


async def test_a_redirect_takes_no_authorization_along(
    server: Server, other: Server, open_registry: OpenRegistry
) -> None:
    """Where the bytes lie elsewhere, elsewhere does not learn who we are."""
    basic = Credentials("me", "secret")

    async def storage(request: web.Request) -> web.StreamResponse:
        return web.Response(body=DATA)

    async def answer(request: web.Request) -> web.StreamResponse:
        if "Authorization" not in request.headers:
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})
        return web.Response(status=307, headers={"Location": f"http://{other.host}/there?signed=1"})

    server.handler, other.handler = answer, storage
    assert await fetched(open_registry(basic)) == DATA
    assert "Authorization" in server.headers[-1]
    assert "Authorization" not in other.headers[0]


def test_challenges_are_read() -> None:
    """The first that can be answered, with quoted commas and escapes."""
    challenge = parse_challenge('Negotiate, Bearer realm="https://x/t,u",service="a\\"b", scope=plain')
    assert challenge == ("bearer", {"realm": "https://x/t,u", "service": 'a"b', "scope": "plain"})
    assert parse_challenge('Basic realm="x"') == ("basic", {"realm": "x"})
    assert parse_challenge("Negotiate") is None
    assert parse_challenge("") is None


def test_credentials_come_from_docker_s_file(tmp_path: Path) -> None:
    """By host, in any of the forms that are in use; a damaged file is said without what is in it."""
    auth = base64.b64encode(b"me:a:b").decode()
    path = tmp_path / "config.json"
    entries = {
        "h.x:5": {"auth": auth},
        "https://index.x/v1/": {"username": "u", "password": "p"},
        "i.x": {"identitytoken": "t"},
        "n.x": {},
    }
    path.write_text(json.dumps({"auths": entries, "credsStore": "x"}))
    assert read_credentials(path, "h.x:5") == ("me", "a:b", "")
    assert read_credentials(path, "index.x") == ("u", "p", "")
    assert read_credentials(path, "i.x") == ("", "", "t")
    assert read_credentials(path, "n.x") is None
    assert read_credentials(path, "other") is None
    assert read_credentials(tmp_path / "none", "h.x") is None
    assert "secret" not in repr(Credentials("me", "secret"))
    for damaged in ("secret!", "secr\u00e9t", base64.b64encode(b"secret\xff").decode()):
        path.write_text(json.dumps({"auths": {"h.x": {"auth": damaged}}}))
        with pytest.raises(InvalidSpec, match="no config file of Docker's") as caught:
            read_credentials(path, "h.x")
        assert "secr" not in str(caught.value)
