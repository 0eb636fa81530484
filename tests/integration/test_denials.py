"""What a sandbox was refused is told of it, and becomes evidence of its rollout's verdict."""

from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

import barchan
from barchan.model.denials import Denials
from barchan.rollout.calls import call_to
from barchan.rollout.task import Environment
from barchan.sdk.aio.client import AsyncClient
from tests.integration.rollout_hacks import REFERENCE, TASK
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(120), pytest.mark.requires("root", "cgroup", "userns")]

ASK = (
    "import urllib.request\n"
    "for host in ('forbidden.test', 'forbidden.test', 'other.test'):\n"
    "    try: urllib.request.urlopen(f'http://{host}/', timeout=20)\n"
    "    except Exception as error: print(error)\n"
)
SIGSYS = "kill -SYS $$"


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def test_a_sandbox_tells_what_it_was_refused(client: AsyncClient) -> None:
    """Requests of the proxy by place, and programs that ended by SIGSYS; asking wakes nothing. Without a proxy nothing
    of the kind is seen.
    """
    sandbox = await client.create("debian", memory_mib=128, network="allow", allow=["allowed.test"])
    assert await sandbox.denials() == Denials()
    assert "403" in (await sandbox.exec(["python3", "-c", ASK])).text
    assert (await sandbox.exec(SIGSYS)).signal == 31
    await sandbox.pause()
    told = Denials(egress={"forbidden.test:80": 2, "other.test:80": 1}, egress_total=3, sigsys=1)
    assert await sandbox.denials() == told
    assert (await sandbox.info()).phase == "paused"
    apart = await client.create("debian", memory_mib=128)
    assert (await apart.exec(["python3", "-c", ASK])).ok
    assert await apart.denials() == Denials()


async def test_it_becomes_a_sign_and_changes_no_reward(client: AsyncClient) -> None:
    """In the verdict's evidence, beside the reward that the attempt has earned."""
    environment = Environment(network="allow", allow_hosts=("allowed.test",))
    async with client.run("denied", memory_mib=128) as run:
        async for rollout in await run.group(replace(TASK, environment=environment), 1, key="one"):
            await rollout.act([call_to("python", code=ASK)])
            await rollout.act([call_to("submit", solution=REFERENCE)])
            verdict = await rollout.finish()
    assert (verdict.status, verdict.reward) == ("scored", 1.0)
    signs = {item.fact: item.value for item in verdict.evidence if item.source == "integrity"}
    assert signs == {
        "sign: requests that the egress proxy refused": "3 to forbidden.test:80 (2 times), other.test:80",
    }
