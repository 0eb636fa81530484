"""What callers pass is checked before anything is sent: time-outs, counts, names of labels, variables and limits."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan.errors import InvalidSpec
from barchan.model.sandbox import ExecRequest, FileInfo, SandboxSpec, StartRequest
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.options import exec_request, sandbox_spec, start_request
from barchan.wire.api import MkdirRequest
from tests.unit.sdk.fake_node import FakeNode

pytestmark = pytest.mark.timeout(60)


async def _consume(items: Any) -> None:
    async for _ in items:
        pass


CALLS: dict[str, Callable[[AsyncClient, AsyncSandbox, Any], Awaitable[Any]]] = {
    "create": lambda client, sandbox, value: client.create("debian", timeout_s=value),
    "create ttl": lambda client, sandbox, value: client.create("debian", ttl_s=value),
    "create idle": lambda client, sandbox, value: client.create("debian", idle_timeout_s=value),
    "create_many": lambda client, sandbox, value: _consume(client.create_many("debian", n=1, timeout_s=value)),
    "exec": lambda client, sandbox, value: sandbox.exec("true", timeout_s=value),
    "start": lambda client, sandbox, value: sandbox.start("true", timeout_s=value),
    "wait": lambda client, sandbox, value: sandbox.process("p").wait(value),
    "output": lambda client, sandbox, value: _consume(sandbox.process("p").output(quiet_timeout_s=value)),
    "write_stdin": lambda client, sandbox, value: sandbox.process("p").write_stdin(b"x", timeout_s=value),
    "read": lambda client, sandbox, value: sandbox.files.read("/f", timeout_s=value),
    "write": lambda client, sandbox, value: sandbox.files.write("/f", b"x", timeout_s=value),
    "upload": lambda client, sandbox, value: sandbox.files.upload("/etc/hostname", "/f", timeout_s=value),
    "download": lambda client, sandbox, value: sandbox.files.download("/f", "/nonexistent", timeout_s=value),
    "watch": lambda client, sandbox, value: sandbox.files.watch("/", quiet_timeout_s=value),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 1e9, "1", True], ids=str)
@pytest.mark.parametrize("name", CALLS)
async def test_what_is_no_duration_is_refused(
    node: FakeNode, client: AsyncClient, sandbox: AsyncSandbox, name: str, value: Any
) -> None:
    """By every call that takes one, without a word to the node."""
    before = node.calls.total()
    with pytest.raises(InvalidSpec, match="seconds"):
        await CALLS[name](client, sandbox, value)
    assert node.calls.total() == before


@pytest.mark.parametrize("value", [float("nan"), -1, "1"], ids=str)
async def test_shells_and_terminals_refuse_what_is_no_duration(sandbox: AsyncSandbox, value: Any) -> None:
    """The shell lives on."""
    async with await sandbox.shell() as shell:
        for options in ({"timeout_s": value}, {"idle_timeout_s": value}):
            with pytest.raises(InvalidSpec, match="seconds"):
                await shell.run("true", **options)
        assert (await shell.run("echo on")).text == "on\n"
    async with await sandbox.terminal() as terminal:
        with pytest.raises(InvalidSpec, match="seconds"):
            await terminal.screen(timeout_s=value)


async def test_an_exec_has_a_bound() -> None:
    """None is no time-out of an exec; a program in the background may have none."""
    with pytest.raises(InvalidSpec, match="timeout_s"):
        exec_request("true", {"timeout_s": None})  # type: ignore[typeddict-item]
    assert start_request("true", {"timeout_s": None}).timeout_s is None


@pytest.mark.parametrize("stdin", [True, 3, ["a"]], ids=repr)
async def test_stdin_is_text_or_bytes(sandbox: AsyncSandbox, stdin: Any) -> None:
    """`bytes()` would make NUL characters of a number, and `stdin=True` is easily written for `stdin_open=True`."""
    for request in (exec_request, start_request):
        with pytest.raises(InvalidSpec, match="stdin is text or bytes"):
            request("cat", {"stdin": stdin})  # type: ignore[operator]
    with pytest.raises(InvalidSpec, match="data is text or bytes"):
        await sandbox.process("p").write_stdin(stdin)


@pytest.mark.parametrize("n", [0, -1, "2", 1.5, True])
async def test_many_are_one_or_more(node: FakeNode, client: AsyncClient, n: Any) -> None:
    """Anything else creates nothing."""
    with pytest.raises(InvalidSpec, match="n="):
        await _consume(client.create_many("debian", n=n))
    assert node.calls["create"] == 0


@pytest.mark.parametrize("labels", [{"a=b": "c"}, {"": "c"}, {1: "c"}, ["a"]], ids=str)
async def test_names_of_labels_hold_no_equals_sign(node: FakeNode, client: AsyncClient, labels: Any) -> None:
    """Else `a=b` with `c` and `a` with `b=c` would be one query, and a kill would hit the wrong sandbox."""
    for refused in (lambda: client.create("debian", labels=labels), lambda: client.kill(labels=labels)):
        with pytest.raises(InvalidSpec, match="label"):
            await refused()
    with pytest.raises(InvalidSpec, match="label"):
        await client.list(labels=labels)
    assert node.calls["create"] + node.calls["kill_many"] + node.calls["list"] == 0
    assert sandbox_spec("debian", {"labels": {"a": "b=c"}}).labels == {"a": "b=c"}


@pytest.mark.parametrize("env", [{"A=B": "c"}, {"": "c"}, {"A\0": "c"}, {1: "c"}, ["A"]], ids=repr)
async def test_names_of_variables(sandbox: AsyncSandbox, env: Any) -> None:
    """They are text, not empty, and hold neither `=` nor NUL: for a sandbox, a program, a shell and a terminal."""
    with pytest.raises(InvalidSpec, match="env"):
        sandbox_spec("debian", {"env": env})
    with pytest.raises(InvalidSpec, match="env"):
        exec_request("true", {"env": env})
    with pytest.raises(InvalidSpec, match="env"):
        await sandbox.shell(env=env)
    with pytest.raises(InvalidSpec, match="env"):
        await sandbox.terminal(env=env)


def test_names_of_limits_may_be_upper_case() -> None:
    """They reach the node in lower case; naming one twice is refused."""
    assert exec_request("true", {"rlimits": {"NOFILE": (1, 2)}}).rlimits == {"nofile": (1, 2)}
    with pytest.raises(InvalidSpec, match="twice"):
        exec_request("true", {"rlimits": {"NOFILE": (1, 2), "nofile": (3, 4)}})


async def test_names_of_signals_may_be_lower_case(sandbox: AsyncSandbox) -> None:
    """`term` is SIGTERM."""
    process = await sandbox.start(["sleep", "60"])
    assert await process.signal("term") == 1
    assert (await process.wait(10)).exit_code == 128 + 15


@pytest.mark.parametrize("data", [5, None, ["x"], {"a": 1}], ids=str)
async def test_data_of_other_types_is_refused(node: FakeNode, sandbox: AsyncSandbox, data: Any) -> None:
    """The message names the types that can be written."""
    with pytest.raises(InvalidSpec, match=f"bytes, str or a file .*not {type(data).__name__}"):
        await sandbox.files.write("/f", data)
    assert node.files == {}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (SandboxSpec, {"template": "x", "labels": {"a=b": "c"}}),
        (SandboxSpec, {"template": "x", "env": {"A=": "c"}}),
        (SandboxSpec, {"template": "x", "ttl_s": 31_536_001}),
        (SandboxSpec, {"template": "x", "idle_timeout_s": 1e300}),
        (ExecRequest, {"shell": "x", "timeout_s": 1e300}),
        (ExecRequest, {"shell": "x", "env": {"": "c"}}),
        (ExecRequest, {"shell": "x", "rlimits": {"nofile": (-2, 1)}}),
        (StartRequest, {"shell": "x", "rlimits": {"nofile": (1, 1 << 63)}}),
        (StartRequest, {"shell": "x", "timeout_s": float("nan")}),
        (StartRequest, {"shell": "x", "env": {"A\0": "c"}}),
        (MkdirRequest, {"path": "x", "mode": 0o10000}),
        (MkdirRequest, {"path": "x", "mode": -1}),
    ],
    ids=str,
)
def test_the_types_themselves_have_these_bounds(kind: type[msgspec.Struct], fields: dict[str, Any]) -> None:
    """Other clients than this one get them from the node and its OpenAPI description."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=kind)


async def test_a_local_place_that_cannot_be_written(node: FakeNode, sandbox: AsyncSandbox, tmp_path: Path) -> None:
    """A download says which local path is in the way."""
    node.entries = {"/f": _entry("/f", "file"), "/d": _entry("/d", "directory")}
    node.files["/f"] = b"x"
    (tmp_path / "taken").write_text("a file")
    for remote in ("/f", "/d"):
        with pytest.raises(InvalidSpec, match=f"can't write {tmp_path}/taken.* here"):
            await sandbox.files.download(remote, tmp_path / "taken/below")
    with pytest.raises(InvalidSpec, match="/proc/nope"):
        await sandbox.files.download("/f", "/proc/nope/f")
    assert (tmp_path / "taken").read_text() == "a file"


async def test_a_download_follows_the_links_of_its_path(node: FakeNode, sandbox: AsyncSandbox, tmp_path: Path) -> None:
    """Absolute and relative ones, from the directory of the link; the local name is the one asked for."""
    node.entries = {
        "/a/link": _entry("/a/link", "symlink", "../b/next"),
        "/a/../b/next": _entry("next", "symlink", "/real"),
        "/real": _entry("/real", "file"),
        "/loop": _entry("/loop", "symlink", "loop"),
    }
    node.files["/real"] = b"content"
    await sandbox.files.download("/a/link", tmp_path)
    assert (tmp_path / "link").read_bytes() == b"content"
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o755
    with pytest.raises(InvalidSpec, match="40 symbolic links"):
        await sandbox.files.download("/loop", tmp_path)


def _entry(path: str, kind: Any, target: str = "") -> Any:
    return FileInfo(path=path, kind=kind, size=0, mode=0o755, uid=0, gid=0, mtime_unix_s=0, target=target)
