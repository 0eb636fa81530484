"""A blob store in an object store: a real server of S3's protocol, on this machine."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import barchan
from barchan.errors import BlobCorrupt, ConnectionLost, NotFound
from barchan.image.blobs import PART_BYTES, BlobStore
from barchan.image.remote import pull, push
from barchan.image.store import ImageStore
from tests.nodes import NodeProcess
from tests.stores import copy_base

pytestmark = [pytest.mark.requires("moto"), pytest.mark.timeout(120)]

START_S = 30


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, for whoever has this process's environment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
    words = {"ENDPOINT_URL": endpoint, "ACCESS_KEY_ID": "me", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}
    for name, value in words.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", endpoint.rpartition(":")[2]]
    with (tmp_path / "moto.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            _make_bucket(endpoint, server)
            yield "s3://bucket"
        finally:
            server.kill()


def _make_bucket(endpoint: str, server: "subprocess.Popen[bytes]") -> None:
    give_up = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket", method="PUT"), timeout=5).close()
        except OSError:
            assert server.poll() is None and time.monotonic() < give_up
            time.sleep(0.1)
        else:
            return


async def test_each_operation(bucket: str, tmp_path: Path) -> None:
    """Blobs of any size, ranges of them, their list; one winner among those who would be first; what is missing."""
    store = BlobStore.open(f"{bucket}/some/where")
    await store.put("a/x", b"0123456789")
    assert await store.get("a/x", 10) == b"0123456789"
    assert await store.get_range("a/x", 2, 5) == b"234"
    for start, end in ((5, 50), (50, 60)):
        with pytest.raises(BlobCorrupt, match=r"before byte 50|is shorter"):
            await store.get_range("a/x", start, end)
    with pytest.raises(BlobCorrupt, match="no such blob more than 9"):
        await store.get("a/x", 9)
    with pytest.raises(NotFound, match="no a/none in"):
        await store.get("a/none", 9)
    first = await asyncio.gather(*(store.put_new("a/first", b"%d" % number) for number in range(8)))
    assert sorted(first) == [*[False] * 7, True]
    assert await store.get("a/first", 9) == b"%d" % first.index(True)
    big = tmp_path / "big"
    big.write_bytes(os.urandom(2 * PART_BYTES + 5))
    await store.put_file("a/big", big)
    assert await store.size("a/big") == 2 * PART_BYTES + 5
    assert await store.get_range("a/big", PART_BYTES - 3, PART_BYTES + 3) == big.read_bytes()[PART_BYTES - 3 :][:6]
    assert await store.keys("a") == ["a/big", "a/first", "a/x"]
    for _ in range(2):
        await store.delete("a/x")
    assert not await store.exists("a/x")
    with pytest.raises(NotFound, match="no such bucket or container"):
        await BlobStore.open("s3://another/x").put("a", b"")


@pytest.mark.requires("root", "cgroup", "fuse")
async def test_an_image_is_read_on_demand(bucket: str, images: Path, tmp_path: Path) -> None:
    """Pushed, started from on a node without images, its record of first reads put beside it; and pulled whole."""
    machine, url = ImageStore(copy_base(images, tmp_path / "machine")), f"{bucket}/images"
    store = BlobStore.open(url)
    pushed = await push(machine, "debian", store, lambda what, done, total: None)
    assert pushed.layers_sent == 1
    (tmp_path / "images").mkdir()
    node = NodeProcess(tmp_path / "node", tmp_path / "images")
    node.start("--store", url)
    try:
        async with barchan.connect_async(url=f"unix://{node.socket}") as client:
            async with await client.create("debian") as sandbox:
                assert (await sandbox.exec(["python3", "-c", "print(6*7)"])).text == "42\n"
            (layer,) = await client.layers()
            assert 0 < layer.local_bytes < layer.size_bytes // 2
    finally:
        assert node.end() == []
    other = ImageStore(tmp_path / "other")
    assert (await pull(other, "debian", store, lambda what, done, total: None)).digest == machine.resolve(
        "debian"
    ).digest


async def test_a_server_that_is_gone_is_no_missing_image(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at its address: that is told from a blob that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{probe.getsockname()[1]}")
    with pytest.raises(ConnectionLost, match="no connection"):
        await BlobStore.open(bucket, timeout_s=2).get("a", 9)
