"""Builds in which root is root: packages install, owners change, stages take from each other; on a real node."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import barchan
from barchan.cli.main import main
from barchan.errors import TaskError
from barchan.image.store import ImageStore
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.build import build
from barchan.sdk.dockerfile import load_dockerfile
from barchan.sdk.recipe import Recipe, Run, Take
from tests.nodes import NodeProcess
from tests.stores import node_of_its_own

pytestmark = [pytest.mark.timeout(180), pytest.mark.requires("root", "cgroup", "userns", "mkfs.btrfs")]

CONTROL = "Package: thing\\nVersion: 1\\nArchitecture: all\\nMaintainer: x <x@example.org>\\nDescription: a thing\\n"
POSTINST = '#!/bin/sh\\nset -e\\nchown agent:agent /srv/thing\\nsu agent -c "touch /srv/thing/by-agent"\\n'
PACKAGE = f"""FROM debian AS package
RUN mkdir -p /p/DEBIAN /p/srv/thing && printf '{CONTROL}' > /p/DEBIAN/control && \\
    printf '{POSTINST}' > /p/DEBIAN/postinst && chmod 755 /p/DEBIAN/postinst && dpkg-deb -b /p /thing.deb
FROM debian
COPY --from=package /thing.deb /tmp/
RUN dpkg -i /tmp/thing.deb && rm /tmp/thing.deb
RUN chown 1234:5678 /opt && chmod 4755 /opt
USER agent
WORKDIR /srv/thing
ENTRYPOINT ["/bin/cat"]
CMD by-agent
"""


TREE = """
mkdir -p /out/sub /empty && cd /out && echo a > a && chmod 6755 a && ln a sub/hard && ln -s /etc/passwd absolute
truncate -s 2M hole && echo b > .b && chmod 700 sub && chmod 711 .
printf x > /one.txt && printf y > /two.txt && ln -s /one.txt /link
"""
LOOK = """
cd /into && stat -c '%n %a %U' . a sub sub/own hole .b && readlink absolute && stat -c %h a
cd /fresh/deep && stat -c '%n %a %U %h' . a sub .b
cd / && stat -c '%n %a %u:%g' texts texts/* plain empty hostname && ls /tmp
"""


@pytest.fixture(scope="module")
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    yield from node_of_its_own(images, tmp_path_factory)


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        yield client


async def seen(client: AsyncClient, image: str, command: str) -> list[str]:
    async with await client.create(image, memory_mib=128) as sandbox:
        return (await sandbox.exec(command, user="root")).check().text.split("\n")[:-1]


def test_a_package_is_installed(node: NodeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script gives files away and becomes another user; the image keeps what it starts with, also as a base."""
    (tmp_path / "Dockerfile").write_text(PACKAGE)
    monkeypatch.setenv("BARCHAN_STATE_DIR", str(node.state_dir))
    assert main(["image", "build", str(tmp_path), "--name", "thing", "--network", "none"]) == 0
    (tmp_path / "Dockerfile").write_text("FROM thing\nRUN id -un > who\nCOPY --chown=root:5678 Dockerfile in/\n")
    assert main(["image", "build", str(tmp_path), "--name", "more", "--network", "none"]) == 0
    store = ImageStore(node.state_dir / "images")
    for name, cmd in (("thing", ("/bin/sh", "-c", "by-agent")), ("more", ("/bin/sh", "-c", "by-agent"))):
        made = store.resolve(name)
        assert (made.user, made.workdir, made.entrypoint, made.cmd) == ("agent", "/srv/thing", ("/bin/cat",), cmd)
    with barchan.connect(state_dir=node.state_dir) as client, client.create("more") as sandbox:
        look = "stat -c '%n %u:%g %a' /opt by-agent who in in/Dockerfile; cat who; cat /proc/self/status | grep CapEff"
        assert sandbox.exec(look, user="root").check().text.split("\n")[:-1] == [
            "/opt 1234:5678 4755",
            "by-agent 1000:1000 644",
            "who 1000:1000 644",
            "in 0:5678 755",
            "in/Dockerfile 0:5678 644",
            "agent",
            "CapEff:\t0000000000000000",
        ]


async def test_files_of_another_image(client: AsyncClient) -> None:
    """Folders with their links and modes, into folders that keep their own mode; files by pattern; all at the
    owner that was asked for.
    """
    made = Recipe(base="debian", steps=(Run(command=TREE),))
    recipe = Recipe(
        base="debian",
        steps=(
            Run(command="mkdir -m 750 /into /into/sub && echo mine > /into/sub/own"),
            Take(image=made, source="/out", path="/into"),
            Take(image=made, source="/out", path="/fresh/deep", user="agent"),
            Take(image=made, source="/*.txt", path="/texts/", mode=0o600, user="1000:7"),
            Take(image=made, source="/link", path="/plain"),
            Take(image=made, source="/empty", path="/empty/"),
            Take(image="debian", source="/etc/hostname", path="/"),
        ),
    )
    image = await build(client, recipe)
    assert await seen(client, image, LOOK) == [
        *(". 750 root", "a 6755 root", "sub 700 root", "sub/own 644 root", "hole 644 root", ".b 644 root"),
        *("/etc/passwd", "2", ". 755 agent 1", "a 755 agent 2", "sub 700 agent 1", ".b 644 agent 1"),
        *("texts 755 1000:7", "texts/one.txt 600 1000:7", "texts/two.txt 600 1000:7", "plain 644 0:0"),
        *("empty 755 0:0", "hostname 644 0:0"),
    ]


async def test_what_is_not_there_to_take(client: AsyncClient) -> None:
    """It is the step's failure, told with its number; nothing is left running."""
    for source, path, told in (
        ("/no", "/x", "No such file"),
        ("/etc/*.no", "/x/", "there is no such file"),
        ("/etc/host*", "/x", "need a folder to go to"),
        ("/dev/null", "/x", "neither file nor folder"),
    ):
        recipe = Recipe(base="debian", steps=(Take(image="debian", source=source, path=path),))
        with pytest.raises(TaskError, match=f"step 1 of 1, take {source.replace('*', '.')}.*{told}"):
            await build(client, recipe)
    assert await client.list() == []


async def test_what_is_ignored_stays_behind(client: AsyncClient, tmp_path: Path) -> None:
    """Of a folder that is put, and of its digest: changing what is ignored makes no other image."""
    for name in ("keep", "log", "node/a", "node/keep"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text("log\nnode\n!node/keep\nDockerfile\n.dockerignore\n")
    (tmp_path / "Dockerfile").write_text("FROM debian\nCOPY . /ctx\n")
    image = await build(client, load_dockerfile(tmp_path / "Dockerfile"))
    assert await seen(client, image, "cd /ctx; find . -type f | sort") == ["./keep", "./node/keep"]
    (tmp_path / "log").write_text("other")
    assert await build(client, load_dockerfile(tmp_path / "Dockerfile")) == image
