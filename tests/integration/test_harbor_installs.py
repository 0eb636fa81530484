"""Harbor tasks whose verifier installs what it needs: once, in `prepare`, with a network; graded then without one."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import barchan
from barchan.errors import BlobUnavailable
from barchan.rollout.admission import check
from barchan.rollout.calls import call_to
from barchan.rollout.graders.prepared import PREFIX
from barchan.rollout.policies import OraclePolicy, Policy, ScriptPolicy
from barchan.rollout.prepare import prepare_all
from barchan.rollout.record import RolloutRecord
from barchan.rollout.runner import Runner
from barchan.rollout.settings import RunSettings
from barchan.rollout.task import ScriptGrader, Task
from barchan.rollout.tasksets.harbor import load_harbor
from barchan.sdk.aio.client import AsyncClient
from tests.nodes import NodeProcess
from tests.stores import node_of_its_own

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs", "slirp4netns"),
]

# No address of the test's can be reached from a sandbox: what stands for the download is that there is a network.
TEST = """#!/bin/bash
apt-get() {
    grep -q tap0: /proc/net/dev || return 1
    mkdir -p /opt/tool && printf '#!/bin/sh\\ntest "$(cat "$1")" = 42\\n' > /opt/tool/tool
    chmod 755 /opt/tool/tool && chown -R daemon /opt/tool
}
test -x /opt/tool/tool || apt-get install tool
echo ran > /logs/artifacts/noise
if ! test -x /opt/tool/tool; then exit 1; fi
if /opt/tool/tool total.txt; then reward=1; else reward=0; fi
echo '{"reward": '$reward', "networks": '$(grep -c tap0: /proc/net/dev)'}' > /logs/verifier/reward.json
"""
SOLVE = "#!/bin/bash\nprintf 42 > total.txt\n"


def write(folder: Path, toml: str = "", test: str = TEST) -> Path:
    for name, text in {
        "task.toml": toml or '[environment]\nworkdir = "/app"\n[agent]\nnetwork_mode = "no-network"\n',
        "instruction.md": "Write 42 to total.txt.",
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\n",
        "tests/test.sh": test,
        "solution/solve.sh": SOLVE,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    yield from node_of_its_own(images, tmp_path_factory)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client
        for image in await client.images():
            if image.name != "debian":
                await client.remove_image(image.name)


def settings(name: str) -> RunSettings:
    return RunSettings(run_id=f"installs-{name}", template="debian", concurrency=2, graders=2, memory_mib=256)


async def play(client: AsyncClient, tasks: list[Task], policy: Policy, name: str) -> list[RolloutRecord]:
    records: list[RolloutRecord] = []
    await Runner(client, tasks, policy, settings(name), records.append).run()
    return sorted(records, key=lambda record: record.task_id)


async def test_what_a_verifier_installs_is_kept(client: AsyncClient, tmp_path: Path) -> None:
    """Unprepared it is graded with a network; prepared without, over what was installed, be the artifact a diff or
    files. What it said and was given is not in the image, and preparing again starts nothing.
    """
    write(tmp_path / "diff")
    write(
        tmp_path / "files",
        'artifacts = ["total.txt"]\n[environment]\nworkdir = "/app"\n[agent]\nnetwork_mode = "no-network"\n'
        '[verifier]\nenvironment_mode = "separate"\n',
    )
    tasks = load_harbor(tmp_path, build_network="none")
    before = await play(client, tasks, OraclePolicy(), "before")
    assert [(row.verdict.reward, row.verdict.metrics) for row in before] == [(1.0, {"networks": 1.0})] * 2
    prepared = await prepare_all(client, tasks)
    assert [item.why for item in prepared] == ["", ""]
    names = {image for item in prepared for image in item.images if image.startswith(PREFIX)}
    assert len(names) == 1  # both have the same verifier over the same environment
    after = await play(client, tasks, OraclePolicy(), "after")
    assert [(row.verdict.reward, row.verdict.metrics) for row in after] == [(1.0, {"networks": 0.0})] * 2
    async with await client.create(names.pop(), memory_mib=128) as sandbox:
        look = "ls -A /tests /logs/*; stat -c %U /opt/tool/tool"
        seen = await sandbox.exec(look, user="root")
    assert "No such file" in seen.error_text and seen.text.split("\n")[-2] == "daemon"
    assert [line for line in seen.text.split("\n") if line and not line.startswith("/logs/")] == ["daemon"]
    creates = (await client.node_info()).creates_total
    assert [item.why for item in await prepare_all(client, tasks)] == ["", ""]
    assert (await client.node_info()).creates_total == creates
    assert [item.admitted for item in await check(client, tasks, settings("check"), rounds=1)] == [True, True]


async def test_an_artifact_that_is_in_the_way(client: AsyncClient, tmp_path: Path) -> None:
    """A folder of the installs' where the agent has a file: graded as if nothing were prepared, and that is said."""
    (task,) = load_harbor(write(tmp_path / "task"), build_network="none")
    await prepare_all(client, [task])
    policy = ScriptPolicy({task.task_id: [call_to("bash", command="printf 42 > total.txt; echo > /opt/tool")]})
    (record,) = await play(client, [task], policy, "clash")
    assert "its prepared image does not go under it" in [item.fact for item in record.verdict.evidence]


async def test_what_can_not_be_prepared(client: AsyncClient, tmp_path: Path) -> None:
    """A verifier that gives no reward without a network, never ends, or scores the oracle 0: said, and no image of it
    stays. Without an oracle that can't be seen, which is said, too.
    """
    online = TEST.replace("test -x /opt/tool/tool ||", "").replace(
        "if ! test -x", "if ! grep -q tap0: /proc/net/dev || ! test -x"
    )
    write(tmp_path / "online", test=online)
    toml = '[environment]\nworkdir = "/app"\n[verifier]\ntimeout_sec = 1.0\n'
    write(tmp_path / "slow", toml, test="#!/bin/sh\ncurl () { sleep 100; }\necho waits; curl x\n")
    write(tmp_path / "zero", test=TEST.replace("reward=1", "reward=0"))
    found = await prepare_all(client, load_harbor(tmp_path, build_network="none"))
    assert [item.task_id for item in found if not item.ready] == ["online", "slow", "zero"]
    assert "without a network, it gives no reward" in found[0].why
    assert "without a network, it gives the oracle 0:" in found[2].why
    assert found[1].why == "its verifier did not end within 1 s: waits"
    assert [image.name for image in await client.images() if image.name.startswith(PREFIX)] == []
    (tmp_path / "zero/solution/solve.sh").unlink()
    (untested,) = await prepare_all(client, load_harbor(tmp_path / "zero", build_network="none"))
    assert untested.ready and untested.untested
    assert await client.list() == []


async def test_a_dead_store_is_not_asked(
    images: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """For what a node can only have made itself: a verifier that is not prepared is graded with all that is here."""
    (tmp_path / "blobs").mkdir()
    (task,) = load_harbor(write(tmp_path / "task"), build_network="none")
    for node in node_of_its_own(images, tmp_path_factory, "--store", (tmp_path / "blobs").as_uri()):
        async with barchan.connect_async(state_dir=node.state_dir) as client:
            (tmp_path / "blobs").rename(tmp_path / "away")
            with pytest.raises(BlobUnavailable):
                await client.image("nowhere")
            (record,) = await play(client, [task], OraclePolicy(), "alone")
    assert record.verdict.reward == 1.0


def test_who_installs(tmp_path: Path) -> None:
    """A verifier that has a network, and a script that fetches something; not in the agent's own sandbox."""

    def installs(text: str, toml: str = "") -> bool:
        (task,) = load_harbor(write(tmp_path / "task", toml, "#!/bin/sh\n" + text))
        assert isinstance(task.grader, ScriptGrader)
        return task.grader.installs

    workdir = '[environment]\nworkdir = "/app"\n'
    assert installs("apt-get update && apt-get install -y curl\n")
    assert installs("python3 -m pip install pytest\n") and installs("  uvx -w pytest pytest x\n")
    assert not installs("# curl x\npytest /tests\n") and not installs("python3 pip.py; ./curl-x\n")
    assert not installs("curl x\n", workdir + '[verifier]\nnetwork_mode = "no-network"\n')
    assert not installs("curl x\n", workdir + '[verifier]\nenvironment_mode = "shared"\n')
