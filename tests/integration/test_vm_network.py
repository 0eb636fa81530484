"""Ways out of a whole machine: none, by names, open. In `make test-vm`, for one with a network card boots first."""

import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient, AsyncSandbox
from barchan.errors import NotFound
from barchan.image.store import ImageStore
from barchan.testing.conformance.isolation import CONNECT, FETCH, PROXY_FOR_ALL, web
from tests.nodes import NodeProcess

DISK = "debian-disk"

pytestmark = [pytest.mark.requires("root", "cgroup", "qemu", "mmdebstrap", "slirp4netns"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def node(make_node: Callable[[], NodeProcess], images: Path) -> Iterator[NodeProcess]:
    try:
        ImageStore(images).resolve(DISK)
    except NotFound:
        subprocess.run([sys.executable, "-m", "barchan.cli", "image", "disk", "debian"], check=True)
    node = make_node()
    node.start()
    yield node
    assert node.end() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def said(machine: AsyncSandbox, program: str, *arguments: str, **env: str) -> str:
    """What a program of Python's says in the machine."""
    return (await machine.exec(["python3", "-c", program, *arguments], env=env)).text


async def test_names_that_are_allowed_are_reached_and_nothing_else(client: AsyncClient) -> None:
    """By the platform's proxy, which refuses other names, and says what was asked for; around it is no way, not even
    for root. So it is in a machine that was copied from the first.
    """
    with web() as port:
        allow = [f"127.0.0.1:{port}"]
        for _ in range(2):
            async with await client.create(DISK, backend="vm", memory_mib=512, allow=allow) as machine:
                for host, answer in ((f"127.0.0.1:{port}", "hello\n"), ("127.0.0.1:9", "refused 403\n")):
                    assert await said(machine, FETCH, f"http://{host}/", **PROXY_FOR_ALL) == answer
                for address in ("127.0.0.1", "10.0.3.2", "192.0.2.1"):
                    assert await said(machine, CONNECT, address, str(port)) != "reached\n"


async def test_an_open_network_leads_out_and_not_into_the_host(client: AsyncClient) -> None:
    """There are a route and a resolver; the host's loopback stays closed, also by the address of the gateway."""
    async with await client.create(DISK, backend="vm", memory_mib=512, network="open") as machine:
        routes = [line.split() for line in (await machine.exec("cat /proc/net/route")).text.splitlines()[1:]]
        assert any(route[1] == "00000000" for route in routes), routes
        assert "nameserver" in (await machine.exec("cat /etc/resolv.conf")).text
        with socket.create_server(("127.0.0.1", 0)) as host:
            port = str(host.getsockname()[1])
            for address in ("127.0.0.1", "10.0.3.2", "10.0.2.2"):
                assert await said(machine, CONNECT, address, port) != "reached\n"


async def test_without_a_network_a_machine_has_no_card(client: AsyncClient) -> None:
    """Only its loopback, which leads nowhere else."""
    async with await client.create(DISK, backend="vm", memory_mib=512) as machine:
        cards = (await machine.exec("ls /sys/class/net")).text.split()
        assert [name for name in cards if name not in ("lo", "sit0", "tunl0", "ip6tnl0")] == []
        with socket.create_server(("127.0.0.1", 0)) as host:
            assert await said(machine, CONNECT, "127.0.0.1", str(host.getsockname()[1])) != "reached\n"
