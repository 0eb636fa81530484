"""Files and watches over the fake node: what the SDK itself adds to the node's answers."""

import io
from pathlib import Path

import pytest

from barchan.errors import ConnectionLost, InvalidSpec, NotFound, QuotaExceeded, ReadTimeout
from barchan.sdk.aio import files as files_module
from barchan.sdk.aio.sandbox import AsyncSandbox
from tests.unit.sdk.fake_node import FakeNode


async def test_data_of_every_kind_is_written(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """Bytes, text and open files arrive as they are; parts are read back."""
    await sandbox.files.write("bytes", b"\xff\x00")
    await sandbox.files.write("text", "grün")
    await sandbox.files.write("file", io.BytesIO(b"x" * 3_000_000))
    assert node.files == {"bytes": b"\xff\x00", "text": "grün".encode(), "file": b"x" * 3_000_000}
    assert await sandbox.files.read("text", 2, 2) == "ü".encode()
    assert await sandbox.files.read_text("text") == "grün"


async def test_a_file_in_text_mode_is_refused(sandbox: AsyncSandbox) -> None:
    """Writing from an open text file is the caller's mistake, told as such."""
    with pytest.raises(InvalidSpec, match="binary"):
        await sandbox.files.write("x", io.StringIO("text"))  # type: ignore[arg-type]


async def test_a_write_is_sent_again_only_if_it_can_be(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """Bytes are sent again after a lost connection; an open file, which can't be read twice, is not."""
    node.drop_before["file_write"] = 1
    await sandbox.files.write("x", b"again")
    assert node.files["x"] == b"again"
    node.drop_before["file_write"] = 1
    with pytest.raises(ConnectionLost):
        await sandbox.files.write("x", io.BytesIO(b"once"))


async def test_a_file_too_large_to_hold_is_refused(
    node: FakeNode, sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """read() is bounded unless the caller says how much is wanted."""
    monkeypatch.setattr(files_module, "READ_BYTES_MAX", 1000)
    node.files["large"] = bytes(1001)
    with pytest.raises(QuotaExceeded):
        await sandbox.files.read("large")
    assert len(await sandbox.files.read("large", 0, 1001)) == 1001


async def test_an_upload_of_what_is_not_there_is_refused(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    """A local path that can't be read is the caller's mistake."""
    with pytest.raises(InvalidSpec):
        await sandbox.files.upload(tmp_path / "none", "x")
    with pytest.raises(NotFound):
        await sandbox.files.read("x")


async def test_a_watch_goes_on_after_a_lost_connection(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """One `overflow` tells of each outage, however often the connection is lost in it, then changes go on."""
    node.watches = [["a"], [], [], ["b"], ["c"]]
    async with await sandbox.files.watch(".") as changes:
        seen = [(change.kind, change.path) async for change in changes]
    assert seen == [
        ("created", "a"),
        ("overflow", ""),
        ("created", "b"),
        ("overflow", ""),
        ("created", "c"),
    ]


async def test_a_watch_that_never_gets_anywhere_ends(
    node: FakeNode, sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening it again is bounded."""
    monkeypatch.setattr(files_module, "RESEND_S", 0.3)
    node.watches = [[] for _ in range(1000)]
    changes = await sandbox.files.watch(".")
    assert (await anext(changes)).kind == "overflow"
    with pytest.raises(ConnectionLost):
        await anext(changes)
    assert node.calls["file_watch"] < 20
    assert await changes.next() is None


async def test_a_watch_in_which_nothing_changes_says_so(sandbox: AsyncSandbox) -> None:
    """The time-out names the directory, and ends the watch."""
    watch = await sandbox.files.watch("/quiet", quiet_timeout_s=0.2)
    with pytest.raises(ReadTimeout, match=r"nothing changed below /quiet for 0.2 s"):
        await watch.next()
    assert await watch.next() is None
