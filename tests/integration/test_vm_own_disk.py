"""Machines from disks that are not ours: started by a BIOS and GRUB, helped to our agent by what is on them.

With two boots of a distribution under emulation they take minutes: `make test-vm`.
"""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import barchan
from barchan import AsyncClient
from tests import user_disks
from tests.nodes import NodeProcess

USER_DATA = """#cloud-config
hostname: theirs
users:
  - name: tester
    shell: /bin/bash
    sudo: ALL=(ALL) NOPASSWD:ALL
    ssh_authorized_keys: [ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIDT3stkeyt3stkeyt3stkeyt3stkeyt3stkeyt3s tester@there]
write_files:
  - path: /etc/told
    content: by user data
bootcmd:
  - [sh, -c, "echo early > /run/early"]
runcmd:
  - [sh, -c, "echo late > /var/tmp/late"]
"""
WITH_CLOUD_INIT, WITH_GUEST_AGENT = "own-cloud", "own-agent"

pytestmark = [pytest.mark.requires("root", "cgroup", "qemu", "mmdebstrap", "mkfs.ext4"), pytest.mark.timeout(1200)]


def add(images: Path, name: str, disk: Path, *more: str | Path) -> None:
    """As a user has it: by the command."""
    command = [sys.executable, "-m", "barchan.cli", "image", "disk", "add", name, disk, *more]
    subprocess.run(command, env={"BARCHAN_STATE_DIR": str(images.parent), "PATH": "/usr/sbin:/usr/bin"}, check=True)


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two images of the same system, one with each helper; its folder of images."""
    folder = tmp_path_factory.mktemp("own")
    root, raw, packed = folder / "root", folder / "disk.raw", folder / "disk.qcow2"
    images = folder / "state" / "images"
    images.mkdir(parents=True)
    user_disks.bootstrap(root)
    user_disks.without(root, cloud_init=True, guest_agent=False)
    user_disks.make(root, raw)
    add(images, WITH_GUEST_AGENT, raw)
    user_disks.without(root, cloud_init=False, guest_agent=True)
    user_disks.make(root, raw)
    user_disks.convert(raw, packed)
    told = folder / "user-data"
    told.write_text(USER_DATA)
    add(images, WITH_CLOUD_INIT, packed, "--user-data", told, "--user", "tester", "--workdir", "/home/tester")
    return images


@pytest.fixture(scope="module")
def node(disks: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path_factory.mktemp("node"), disks)
    node.start()
    yield node
    assert node.end() == []


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


async def test_cloud_init_does_what_the_owner_of_the_disk_tells_it(client: AsyncClient) -> None:
    """Its user, key, files and commands are there when the machine is; so is our agent, and the room asked for."""
    async with await client.create(WITH_CLOUD_INIT, backend="vm", memory_mib=512, timeout_s=900) as machine:
        assert (await machine.exec("id -un; pwd; cat /etc/told")).text == "tester\n/home/tester\nby user data"
        assert "tester@there" in (await machine.exec("cat .ssh/authorized_keys")).text
        assert (await machine.exec("cat /run/early /var/tmp/late /etc/hostname")).text == "early\nlate\ntheirs\n"
        assert "NoCloud" in (await machine.exec("cat /run/cloud-init/result.json", user="root")).text
        assert (await machine.exec("hostname")).text == "sandbox\n"  # as of every sandbox: what the create says
        assert (await machine.exec("sleep 60", timeout_s=1.0)).timed_out
        await machine.files.write("/home/tester/kept", b"here")
        free_mib = int((await machine.exec("df --output=avail -BM / | tail -1")).text.strip("M \n"))
        assert free_mib > 1024
        async with await client.create(WITH_CLOUD_INIT, backend="vm", memory_mib=512) as other:
            assert (await other.exec("id -un; ls")).text == "tester\n"


async def test_qemu_guest_agent_brings_ours(client: AsyncClient) -> None:
    """Without cloud-init and without our agent on its disk, a machine has commands, users, files and a screen."""
    async with await client.create(WITH_GUEST_AGENT, backend="vm", memory_mib=512, timeout_s=900) as machine:
        assert (await machine.exec("id -un; cat /etc/hostname")).text == "root\ntheirs\n"
        assert not (await machine.exec("ls /run/cloud-init/result.json")).ok
        await machine.files.write("/root/a/b", b"\0data" * 10_000, parents=True)
        assert await machine.files.read("/root/a/b") == b"\0data" * 10_000
        assert (await machine.exec("cat; exit 3", stdin="yes")).exit_code == 3
        assert (await machine.screen.png())[:4] == b"\x89PNG"
