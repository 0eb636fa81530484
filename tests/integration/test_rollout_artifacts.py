"""Artifacts of every kind out of real sandboxes, also out of those that are set against it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import barchan
from barchan.errors import NotFound, SandboxExpired, TaskError
from barchan.model.verdict import Evidence
from barchan.rollout import patching
from barchan.rollout.artifact import TOO_LARGE, take
from barchan.rollout.graders.base import Artifact
from barchan.rollout.graders.placing import PATCH_FILE, place
from barchan.rollout.ports import NoLog
from barchan.rollout.services import start_services
from barchan.rollout.task import (
    ArtifactSpec,
    FileArtifact,
    FilesArtifact,
    PatchArtifact,
    ScriptGrader,
    Service,
    Task,
)
from barchan.rollout.tools import Workspace
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.sandbox import AsyncSandbox
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns")]

REPO = "/home/agent/repo"
SET_UP = """
mkdir repo && cd repo && git init -q . && printf '*.log\\n' >.gitignore && mkdir src
printf 'one\\ntwo\\n' >src/a.txt && printf gone >src/old.txt && ln -s a.txt src/link && printf '\\0\\1\\2' >bin
printf 'secret*\\n' >.git/info/exclude
git add -A && git -c user.name=t -c user.email=t@t commit -qm base && git rev-parse HEAD
"""
WORK = """
cd repo && printf 'one\\n2\\n' >src/a.txt && rm src/old.txt && printf new >'src/new file' && printf '\\0\\3' >bin
printf x >noise.log && printf x >secret.txt && ln -sf old.txt src/link && chmod +x src/a.txt
"""
STATE = 'cd repo && rm -rf .git && find . -type f -o -type l | sort | while read f; do ls -l "$f" | cut -c1-10; '
STATE += 'echo "$f $(readlink "$f" || od -c "$f")"; done'


def a_task(spec: ArtifactSpec) -> Task:
    return Task(task_id="t", instruction="", grader=ScriptGrader(command="true"), artifact=spec)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


@asynccontextmanager
async def repository(client: AsyncClient, image: str) -> AsyncIterator[tuple[AsyncSandbox, PatchArtifact]]:
    async with await client.create(image, memory_mib=512) as sandbox:
        base = (await sandbox.exec(SET_UP, cwd="/home/agent")).check().text.strip()
        yield sandbox, PatchArtifact(repo=REPO, base=base, bytes_max=1 << 20)


async def taken(sandbox: AsyncSandbox, spec: ArtifactSpec) -> Artifact | Evidence:
    return await take(Workspace(sandbox, 1000), a_task(spec), "artifact-test")


async def applied(client: AsyncClient, image: str, patch: bytes) -> str:
    """What a fresh repository with the patch holds."""
    async with repository(client, image) as (sandbox, spec):
        await place(sandbox, Artifact(kind="patch", data=patch), a_task(spec))
        (await sandbox.exec(f"git apply {PATCH_FILE}", cwd=REPO)).check()
        return (await sandbox.exec(STATE, cwd="/home/agent")).check().text


async def test_a_patch_is_all_that_differs(client: AsyncClient, with_pytest: str) -> None:
    """Changed, new, removed, binary, links and modes; what the repository ignores stays. Commits and the index of the
    agent's make no difference, and the repository is left as it was.
    """
    commands = (
        "true",
        "git add -A && git -c user.name=t -c user.email=t@t commit -qm work",
        "printf garbage >.git/index",
        "git rm -rq --cached .",
    )
    for command in commands:
        async with repository(client, with_pytest) as (sandbox, spec):
            (await sandbox.exec(WORK, cwd="/home/agent")).check()
            (await sandbox.exec(command, cwd=REPO)).check()
            patch = await taken(sandbox, spec)
            assert isinstance(patch, Artifact), patch
            (await sandbox.exec("rm -f noise.log secret.txt", cwd=REPO)).check()
            expected = (await sandbox.exec(STATE, cwd="/home/agent")).check().text
        assert b"noise" not in patch.data
        assert b"secret" not in patch.data
        assert await applied(client, with_pytest, patch.data) == expected


TRAPS = """
cat >trap.sh <<'X'
#!/bin/sh
echo "$0 $*" >>/tmp/trapped
exec sleep 1000
X
chmod +x trap.sh && T=$PWD/trap.sh
for hook in post-index-change pre-commit post-checkout reference-transaction fsmonitor-watchman; do
    cp trap.sh .git/hooks/$hook
done
git config core.hooksPath .git/hooks && git config core.fsmonitor "$T" && git config diff.external "$T"
git config diff.evil.textconv "$T" && git config diff.evil.command "$T" && git config core.pager "$T"
git config filter.evil.clean "$T" && git config filter.evil.process "$T" && git config filter.evil.required true
git config alias.diff "!$T" && git config alias.add "!$T" && git config core.sshCommand "$T"
git config core.attributesFile $PWD/attributes && echo '* filter=evil diff=evil' >attributes
echo '* filter=evil diff=evil' >.git/info/attributes && echo '* filter=evil diff=evil' >.gitattributes
printf '[include]\\npath = /home/agent/more\\n[core]\\nworktree = /\\nexcludesFile = /dev/null\\n' >>.git/config
ln -sf .git/config /home/agent/.gitconfig; printf '#!/bin/sh\\nexec %s' "$T" >/home/agent/git; chmod +x /home/agent/git
"""


async def test_a_repository_that_is_set_against_it_runs_nothing(client: AsyncClient, with_pytest: str) -> None:
    """Hooks, monitors, filters, diff drivers, aliases and configuration of the agent's are not so much as read."""
    async with repository(client, with_pytest) as (sandbox, spec):
        (await sandbox.exec(WORK, cwd="/home/agent")).check()
        (await sandbox.exec(TRAPS, cwd=REPO)).check()
        patch = await taken(sandbox, spec)
        assert isinstance(patch, Artifact), patch
        assert b"trap.sh" in patch.data
        assert not await sandbox.files.exists("/tmp/trapped")
        sprung = await sandbox.exec("git add -A", cwd=REPO, timeout_s=5.0)
        assert not sprung.ok
        assert await sandbox.files.exists("/tmp/trapped")  # the traps are real


@pytest.mark.parametrize(
    "deed",
    [
        "rm -rf .git",
        "rm -rf .git/objects && mkdir .git/objects",
        "cd .. && rm -rf repo",
        "cd .. && mv repo r && printf x >repo",
        "rm -rf .git && printf 'gitdir: /nowhere' >.git",
        "rm -f .gitignore && mkfifo .gitignore",
        "head -c 3000000 /dev/urandom >large",
        "for n in $(seq 40); do head -c 1000000 /dev/zero >z$n; done; head -c 2000000 /dev/urandom >large",
    ],
)
async def test_a_repository_that_gives_no_patch_is_the_policys_doing(
    client: AsyncClient, with_pytest: str, deed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken, gone, endless or too much: there is evidence in place of a patch, and nobody waits for ever."""
    monkeypatch.setattr(patching, "DIFF_TIMEOUT_S", 20.0)
    async with repository(client, with_pytest) as (sandbox, spec):
        (await sandbox.exec(deed, cwd=REPO)).check()
        found = await taken(sandbox, spec)
        assert isinstance(found, Evidence)
        assert (found.fact == TOO_LARGE) == ("urandom" in deed)


async def test_what_git_can_not_add_is_left_out(client: AsyncClient, with_pytest: str) -> None:
    """A nested repository without a commit, or a file nobody may read, does not cost the rest."""
    async with repository(client, with_pytest) as (sandbox, spec):
        deed = f"{WORK}\nmkdir sub && git init -q sub && printf x >shut && chmod 0 shut"
        (await sandbox.exec(deed, cwd="/home/agent")).check()
        patch = await taken(sandbox, spec)
        assert isinstance(patch, Artifact), patch
        assert b"new file" in patch.data
        assert b"shut" not in patch.data
        assert [item.source for item in patch.notes] == ["artifact: git"]


async def test_no_change_is_no_patch(client: AsyncClient, with_pytest: str) -> None:
    """An untouched repository hands in nothing."""
    async with repository(client, with_pytest) as (sandbox, spec):
        found = await taken(sandbox, spec)
        assert isinstance(found, Evidence)
        assert found.fact == "empty, of bytes"


@pytest.mark.parametrize(
    ("deed", "fact"),
    [
        ("mkfifo solution.py", "not readable"),
        ("mkdir solution.py", "not readable"),
        ("ln -s /dev/zero solution.py", "not readable"),
        ("truncate -s 2G solution.py", TOO_LARGE),
        ("printf x >solution.py && chmod 0 solution.py", "not readable"),
        ("true", "not readable"),
        (": >solution.py", "empty, of bytes"),
    ],
)
async def test_a_file_that_is_none(client: AsyncClient, deed: str, fact: str) -> None:
    """Pipes, devices, folders and files without end are evidence, at once."""
    async with await client.create("debian", memory_mib=128, disk_mib=64) as sandbox:
        (await sandbox.exec(deed)).check()
        found = await taken(sandbox, FileArtifact())
        assert isinstance(found, Evidence)
        assert found.fact == fact


FIGHTER = """
import os, signal
keep = {name for name in os.listdir("/proc") if name.isdigit()}
print("fights", flush=True)
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and name not in keep:
            try:
                os.kill(int(name), signal.SIG%s)
            except OSError:
                pass
"""


async def is_hit(sandbox: AsyncSandbox, process_id: str, signal: str) -> bool:
    """Whether a program of the agent's that started later has felt it."""
    if signal == "KILL":
        return any(one.process_id == process_id and one.signal == 9 for one in await sandbox.processes())
    return ") T " in (await sandbox.exec("cat /proc/[0-9]*/stat", user="root")).text


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
async def test_fighting_the_platform_does_not_keep_the_artifact(client: AsyncClient, signal: str) -> None:
    """A program that kills or stops every other process of its user meets none of the platform's."""
    for spec in (FileArtifact(bytes_max=64 << 20), FilesArtifact(paths=("tree",))):
        async with await client.create("debian", memory_mib=256, disk_mib=256) as sandbox:
            (
                await sandbox.exec("mkdir tree; head -c 40000000 /dev/zero | tr '\\\\0' x | tee tree/x >solution.py")
            ).check()
            fighter = await sandbox.start(["setsid", "--wait", "python3", "-c", FIGHTER % signal])
            async for _ in fighter.output():
                break
            victim = await sandbox.start(["sleep", "600"])
            async with asyncio.timeout(60):  # the fight is real
                while not await is_hit(sandbox, victim.id, signal):
                    await asyncio.sleep(0.05)
            found = await taken(sandbox, spec)
            assert isinstance(found, Artifact), found
            assert len(found.data) >= 40000000


FILES = """
mkdir -p out/deep && printf 1 >out/one && chmod 4755 out/one && printf 2 >out/deep/two && chmod 600 out/deep/two
ln -s deep/two out/inside && ln -s ../one out/deep/up && ln -s /etc/passwd out/absolute && ln -s ../../x out/escapes
mkfifo out/pipe && ln out/one out/hard && printf note >note.txt && mkdir out/empty
"""
FILES_SPEC = FilesArtifact(paths=("/home/agent/out", "note.txt", "missing"), bytes_max=1 << 20)


async def test_files_arrive_in_another_sandbox(client: AsyncClient) -> None:
    """Folders and files by path; links stay in their folder; what lay there before is replaced; the rest is told."""
    async with await client.create("debian", memory_mib=128) as sandbox:
        (await sandbox.exec(FILES)).check()
        found = await taken(sandbox, FILES_SPEC)
    assert isinstance(found, Artifact), found
    assert [(item.fact, item.value) for item in found.notes] == [
        ("missing", "missing"),
        ("left out", "home/agent/out/absolute, home/agent/out/escapes"),
    ]
    async with await client.create("debian", memory_mib=128) as sandbox:
        (await sandbox.exec("mkdir -p out/deep && printf old >out/old && printf x >out/one")).check()
        await place(sandbox, found, a_task(FILES_SPEC))
        listed = (await sandbox.exec("find out note.txt | sort; cat out/one out/inside out/deep/up note.txt")).check()
        assert listed.text.split() == [
            *("note.txt", "out", "out/deep", "out/deep/two", "out/deep/up", "out/empty", "out/hard", "out/inside"),
            *("out/one", "121note"),
        ]
        assert (await sandbox.files.stat("out/one")).mode == 0o755
        assert (await sandbox.files.stat("out/deep/two")).mode == 0o644


@pytest.mark.parametrize(
    ("deed", "fact"),
    [
        ("mkdir out && truncate -s 2G out/hole", TOO_LARGE),
        ("mkdir out && head -c 2000000 /dev/zero >out/x", TOO_LARGE),
        ("truncate -s 2G note.txt", TOO_LARGE),
        ("mkdir -p out/shut && chmod 0 out/shut", "not readable"),
        ("ln -s / out", "none of the declared paths is there"),
        ("true", "none of the declared paths is there"),
    ],
)
async def test_files_that_do_not_come(client: AsyncClient, deed: str, fact: str) -> None:
    """Too much, unreadable or nothing: evidence."""
    async with await client.create("debian", memory_mib=128) as sandbox:
        (await sandbox.exec(deed)).check()
        found = await taken(sandbox, FILES_SPEC)
        assert isinstance(found, Evidence)
        assert found.fact == fact


async def test_a_sandbox_that_is_gone_is_nobodys_artifact(client: AsyncClient) -> None:
    """Then nothing is evidence against the policy: it is raised."""
    sandbox = await client.create("debian", memory_mib=128)
    await sandbox.kill()
    for spec in (FileArtifact(), FILES_SPEC, PatchArtifact(repo="/", base="HEAD")):
        with pytest.raises((NotFound, SandboxExpired)):
            await taken(sandbox, spec)


SERVER = "exec python3 -m http.server 8123 --bind 127.0.0.1"


async def test_services_are_ready_when_it_is_said(client: AsyncClient) -> None:
    """One listens, one answers a command, one has gone to the background; each after the one before."""
    services = (
        Service(name="web", command=f"sleep 1; mkdir -p /tmp/web && cd /tmp/web && {SERVER}", port=8123),
        Service(
            name="mark",
            command="test -d /tmp/web && sleep 0.5 && touch /tmp/mark; sleep 600",
            ready="test -f /tmp/mark",
        ),
        Service(
            name="daemon", command="setsid sh -c 'sleep 1; touch /tmp/daemon; sleep 600' &", ready="test -f /tmp/daemon"
        ),
        Service(name="plain", command="sleep 600", user="agent", env={"A": "b"}, cwd="/tmp"),
    )
    async with await client.create("debian", memory_mib=256) as sandbox:
        await start_services(sandbox, services, NoLog())
        fetched = await sandbox.exec(
            "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8123\").status)'"
        )
        assert fetched.check().text == "200\n"
        running = {item.process_id for item in await sandbox.processes() if item.running}
        assert {"service-web", "service-mark", "service-plain"} <= running


@pytest.mark.parametrize(
    ("service", "why", "output"),
    [
        (
            Service(name="s", command="echo starting; sleep 600", port=81, ready_s_max=1.0),
            "not ready after 1 s",
            "starting",
        ),
        (
            Service(name="s", command="echo up; sleep 600", ready="false", ready_s_max=1.0),
            "its check gave exit code 1",
            "up",
        ),
        (Service(name="s", command="echo no such file >&2; exit 3", port=81), "ended with exit code 3", "no such file"),
        (Service(name="s", command="sleep 600", ready="sleep 600", ready_s_max=1.0), "no answer", ""),
        (Service(name="s", command="echo " + "x" * 9000 + " end; exit 1", ready="true"), "exit code 1", "end"),
    ],
)
async def test_a_service_that_is_not_ready(client: AsyncClient, service: Service, why: str, output: str) -> None:
    """Not in its time, or dead before: the task's fault, with the end of what it wrote."""
    async with await client.create("debian", memory_mib=128) as sandbox:
        with pytest.raises(TaskError, match=why) as raised:
            await start_services(sandbox, (service,), NoLog())
        assert raised.value.details["cause"] == "service_not_ready"
        assert str(raised.value.details["output"]).endswith(output)
        assert len(str(raised.value.details["output"])) <= 400
