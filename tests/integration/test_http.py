"""The node over HTTP, by tools that know nothing of Barchan: curl, and schemathesis from the OpenAPI description."""

import json
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from tests.nodes import NodeProcess

pytestmark = pytest.mark.requires("root", "cgroup", "curl")

DETACHED = {"template": "debian", "detach": True, "ttl_s": 300, "memory_mib": 64}


class Curl:
    """curl against one node."""

    def __init__(self, base: str, token: str) -> None:
        self.base = base
        self.token = token

    def __call__(self, method: str, path: str, body: object = None, token: str | None = None) -> tuple[int, Any]:
        """Status and decoded JSON body."""
        command = ["curl", "-s", "-X", method, "-w", "\n%{http_code}", self.base + path]
        command += ["-H", f"Authorization: Bearer {self.token if token is None else token}"]
        if body is not None:
            command += ["-H", "Content-Type: application/json", "--data-binary", json.dumps(body)]
        text, _, status = subprocess.run(command, check=True, capture_output=True, text=True).stdout.rpartition("\n")
        return int(status), json.loads(text)


@pytest.fixture(scope="module")
def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def curl(make_node: Any, free_port: int) -> Iterator[Curl]:
    """A node that also listens on loopback, with a token of its own making."""
    node: NodeProcess = make_node()
    node.start("--listen", f"127.0.0.1:{free_port}")
    token_file = node.state_dir / "token"
    assert token_file.stat().st_mode & 0o777 == 0o600
    yield Curl(f"http://127.0.0.1:{free_port}", token_file.read_text().strip())
    assert node.end() == []


def test_a_sandbox_by_curl(curl: Curl) -> None:
    """Create, run, look, end: JSON in, JSON out, bytes in base64."""
    status, info = curl("POST", "/v1/sandboxes", DETACHED)
    assert (status, info["phase"]) == (200, "ready")
    path = f"/v1/sandboxes/{info['sandbox_id']}"
    status, ran = curl("POST", path + "/exec", {"shell": "echo out; echo err >&2; exit 3"})
    assert (status, ran["exit_code"], ran["stdout"], ran["stderr"]) == (200, 3, "b3V0Cg==", "ZXJyCg==")
    assert curl("DELETE", path) == (200, {"killed": 1})
    status, gone = curl("POST", path + "/exec", {"shell": "true"})
    assert (status, gone["code"], gone["details"]["cause"]) == (410, "sandbox_expired", "killed")


@pytest.mark.parametrize("token", ["", "wrong-token-of-some-length"])
def test_without_the_token_nothing_is_answered(curl: Curl, token: str) -> None:
    """Neither the API nor its description."""
    for path in ("/v1/node", "/openapi.json", "/v1/sandboxes"):
        status, body = curl("GET", path, token=token)
        assert (status, body["code"]) == (403, "denied")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"template": "debian"}, "lease"),
        ({"template": "nope", "detach": True, "ttl_s": 5}, "no image"),
        ({"template": "debian", "detach": True}, "ttl_s"),
        ({**DETACHED, "memory_mib": 1}, "memory_mib"),
        ({**DETACHED, "memory": 1}, "memory"),
        ({**DETACHED, "backend": "jail"}, "backend"),
        ({**DETACHED, "network": "allow"}, "allow_hosts"),
        ({**DETACHED, "allow_hosts": ["example.org"]}, "allow_hosts"),
        ([], "object"),
    ],
)
def test_a_wrong_create_is_refused_and_says_what_is_wrong(curl: Curl, body: object, words: str) -> None:
    """A typed error, nothing started."""
    status, said = curl("POST", "/v1/sandboxes", body)
    assert status in (400, 404)
    assert words in said["message"]
    assert curl("GET", "/v1/sandboxes") == (200, [])


def test_openapi_describes_every_operation(curl: Curl) -> None:
    """So that other languages can generate a client."""
    _, document = curl("GET", "/openapi.json")
    assert document["openapi"].startswith("3.1")
    assert sum(len(operations) for operations in document["paths"].values()) >= 29


# Left out: what ends the node under test, and what answers until the caller leaves.
ENDLESS = {"node_shutdown", "lease_hold", "file_watch"}


@pytest.mark.timeout(400)
def test_no_request_made_from_the_description_is_a_server_error(curl: Curl) -> None:
    """Generated requests, valid and not, to every operation that ends by itself."""
    schema = schemathesis.openapi.from_dict(curl("GET", "/openapi.json")[1])
    schema.config.update(base_url=curl.base)
    operations = [result.ok() for result in schema.get_all_operations()]
    tried = [one for one in operations if one.definition.raw["operationId"] not in ENDLESS]
    assert len(tried) == len(operations) - len(ENDLESS)
    for operation in tried:

        @given(case=operation.as_strategy())
        @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def check(case: schemathesis.Case) -> None:
            response = case.call(headers={"Authorization": f"Bearer {curl.token}"}, timeout=60)
            case.validate_response(response, checks=[not_a_server_error])

        check()
