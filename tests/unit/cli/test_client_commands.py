"""Commands that ask a node: what they ask, what they print, what their exit code is. The node is a stand-in."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from barchan.cli.cp import Remote, parse
from barchan.cli.main import main
from barchan.errors import CapacityError, NotFound, SandboxLost
from barchan.model.lease import LeaseEnd
from barchan.model.node import LeaseInfo, LeaseUse
from barchan.model.sandbox import FileInfo, ProcessInfo, SandboxInfo, SandboxSpec


def lease(lease_id: str, run: str = "", end: LeaseEnd | None = None, **facts: Any) -> LeaseInfo:
    labels = {"run": run} if run else {}
    return LeaseInfo(lease_id=lease_id, grace_s=10.0, labels=labels, end=end, **facts)


LEASES = [
    lease("le_orphan", end=LeaseEnd(cause="abandoned", at_unix_s=1.0, sandboxes=2)),
    lease("le_over", end=LeaseEnd(cause="ended", at_unix_s=2.0, sandboxes=1)),
    lease("le_idle"),
    lease("le_run", "r", used=LeaseUse(sandboxes=1)),
    lease("le_gone", used=LeaseUse(sandboxes=1), phase="abandoned", ends_unix_s=time.time() + 100),
    lease("le_new", "s", phase="abandoned", ends_unix_s=time.time() + 100),
]


class FakeProcess:
    """Has written "out" and "err" and ended with 7."""

    async def output(self, *, quiet_timeout_s: float | None) -> AsyncIterator[tuple[str, int, bytes]]:
        yield "stdout", 0, b"out"
        yield "stderr", 0, b"err"

    async def wait(self, timeout_s: float | None) -> ProcessInfo:
        return ProcessInfo(process_id="p", pid=2, running=False, exit_code=7)

    async def write_stdin(self, data: bytes, *, eof: bool, timeout_s: float) -> None:
        assert eof

    async def kill(self) -> int:
        raise AssertionError("it ended by itself")


class FakeFiles:
    def __init__(self, calls: list[Any], user: str | None = None) -> None:
        self.calls, self.user = calls, user

    def as_user(self, user: str | None) -> "FakeFiles":
        return FakeFiles(self.calls, user)

    def stat(self, path: str) -> FileInfo:
        if path != "/tmp/.":
            raise NotFound(path)
        return FileInfo(path=path, kind="directory", size=0, mode=0o777, uid=0, gid=0, mtime_unix_s=0)

    def upload(self, local: str, remote: str) -> None:
        self.calls.append(("upload", local, remote, self.user))

    def download(self, remote: str, local: str) -> None:
        self.calls.append(("download", remote, local, self.user))


class FakeSandbox:
    def __init__(self, calls: list[Any], sandbox_id: str) -> None:
        self.calls, self.id, self.files = calls, sandbox_id, FakeFiles(calls)

    async def start(self, command: tuple[str, ...], **options: Any) -> FakeProcess:
        self.calls.append(("start", self.id, command, options))
        return FakeProcess()


class FakeAsyncSandbox(FakeSandbox):
    async def kill(self) -> bool:
        self.calls.append(("kill", self.id))
        return True


class FakeSyncSandbox(FakeSandbox):
    def kill(self) -> bool:
        self.calls.append(("kill", self.id))
        return self.id != "sb_ended"


class FakeClient:
    """Both faces of a client; what is asked of it goes to `calls`."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append("closed")

    def list(self, *, labels: dict[str, str]) -> "list[SandboxInfo]":
        self.calls.append(("list", labels))
        spec = SandboxSpec(template="debian", labels={"job": "x"})
        return [
            SandboxInfo(
                sandbox_id="sb_1",
                node_id="n",
                phase="ready",
                template="debian",
                template_digest="d",
                spec=spec,
                created_unix_s=0,
                age_s=130,
                idle_s=3,
                create_ms=2,
                processes_running=1,
            )
        ]

    def leases(self, *, ended: bool) -> "list[LeaseInfo]":
        return LEASES

    def kill(self, *, labels: dict[str, str]) -> int:
        self.calls.append(("kill_many", labels))
        return 3

    def attach(self, sandbox_id: str) -> FakeSyncSandbox:
        if sandbox_id == "sb_none":
            raise NotFound(sandbox_id)
        if sandbox_id == "sb_lost":
            raise SandboxLost(sandbox_id)
        return FakeSyncSandbox(self.calls, sandbox_id)


class FakeAsyncClient:
    def __init__(self, calls: "list[Any]") -> None:
        self.calls = calls

    async def create(self, template: str, **options: Any) -> FakeAsyncSandbox:
        self.calls.append(("create", template, options))
        if template == "full":
            raise CapacityError("no room now", retry_after_ms=100)
        return FakeAsyncSandbox(self.calls, "sb_new")

    async def attach(self, sandbox_id: str) -> FakeAsyncSandbox:
        return FakeAsyncSandbox(self.calls, sandbox_id)


class Connecting:
    """What `connect_async()` returns: a client once it is awaited or entered."""

    def __init__(self, calls: "list[Any]") -> None:
        self.calls = calls

    async def __aenter__(self) -> FakeAsyncClient:
        return FakeAsyncClient(self.calls)

    async def __aexit__(self, *error: object) -> None:
        self.calls.append("closed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """What the stand-in was asked, first how it was connected to."""
    seen: list[Any] = []

    def connect(**options: Any) -> FakeClient:
        seen.append(options)
        return FakeClient(seen)

    def connect_async(**options: Any) -> Connecting:
        seen.append(options)
        return Connecting(seen)

    monkeypatch.setattr("barchan.connect", connect, raising=False)
    monkeypatch.setattr("barchan.connect_async", connect_async, raising=False)
    for name in ("BARCHAN_URL", "BARCHAN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BARCHAN_STATE_DIR", str(tmp_path))
    with open("/dev/null", "rb") as null:
        monkeypatch.setattr("barchan.cli.attached.INPUT", null.fileno())
        yield seen


def test_run_gives_the_guest_s_exit_code_and_leaves_nothing(
    calls: list[Any], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Streams stay apart, the sandbox is killed, only what was given is asked for."""
    arguments = ["run", "debian", "--memory-mib", "256", "--env", "A=1", "--label", "job=x", "--timeout-s", "5"]
    assert main([*arguments, "--", "ls", "--json", "-l"]) == 7
    out, err = capfd.readouterr()
    assert (out, err) == ("out", "err")
    assert calls == [
        {"state_dir": tmp_path},
        ("create", "debian", {"memory_mib": 256, "env": {"A": "1"}, "labels": {"job": "x"}, "detach": False}),
        ("start", "sb_new", ("ls", "--json", "-l"), {"timeout_s": 5.0, "overflow": "block"}),
        ("kill", "sb_new"),
        "closed",
    ]


def test_run_keep_detaches_and_prints_the_id(calls: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """The id is the last line of stdout; the sandbox lives, with an end, and needs no command."""
    assert main(["run", "debian", "--keep"]) == 0
    assert capfd.readouterr().out == "sb_new\n"
    assert calls[1] == ("create", "debian", {"ttl_s": 3600.0, "env": {}, "labels": {}, "detach": True})
    assert ("kill", "sb_new") not in calls
    assert main(["run", "debian", "--keep", "--ttl-s", "60", "--", "true"]) == 7
    assert capfd.readouterr().out == "out\nsb_new\n"
    assert calls[4][2]["ttl_s"] == 60.0


def test_json_of_run_and_exec_is_a_line_of_its_own(calls: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever the guest wrote before, the last line is one object with the exit code."""
    for arguments in (["run", "debian", "--json", "--", "x"], ["exec", "sb_new", "--json", "--", "x"]):
        assert main(arguments) == 7
        end = json.loads(capfd.readouterr().out.splitlines()[-1])
        assert (end["sandbox_id"], end["exit_code"], end["process"]["exit_code"]) == ("sb_new", 7, 7)


def test_a_sandbox_that_could_not_be_made_is_125(calls: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """No exit code of a guest is made up."""
    assert main(["run", "full", "--", "true"]) == 125
    assert capfd.readouterr().err.startswith("error: no room now (try: ")


def test_exec_passes_its_options(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """User, directory, variables and a terminal of this one's size."""
    monkeypatch.setenv("TERM", "vt100")
    monkeypatch.setenv("LINES", "30")
    monkeypatch.setenv("COLUMNS", "90")
    assert main(["exec", "sb_1", "--user", "root", "--cwd", "/", "-t", "--env", "A=1", "--", "bash"]) == 7
    assert calls[1] == (
        "start",
        "sb_1",
        ("bash",),
        {
            "timeout_s": None,
            "overflow": "block",
            "pty": True,
            "rows": 30,
            "cols": 90,
            "env": {"TERM": "vt100", "A": "1"},
            "user": "root",
            "cwd": "/",
        },
    )


def test_ps_lists_by_label(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A table for people, an array for programs."""
    assert main(["ps", "--label", "job=x", "--label", "a=b"]) == 0
    assert calls[1] == ("list", {"job": "x", "a": "b"})
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split() == ["sb_1", "ready", "debian", "2m", "3s", "1", "job=x"]
    assert main(["ps", "--json"]) == 0
    assert [info["sandbox_id"] for info in json.loads(capsys.readouterr().out)] == ["sb_1"]


def test_ps_runs_lists_runs_and_what_somebody_may_look_for(
    calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """No line for each client that came and went; what lives first, and of each what becomes of it."""
    assert main(["ps", "--runs"]) == 0
    _, *rows, last = capsys.readouterr().out.splitlines()
    assert [row.split()[1] for row in rows] == ["le_run", "le_gone", "le_new", "le_orphan"]
    assert "its sandboxes end in " in rows[1]
    assert "ends, without sandboxes, in " in rows[2]
    assert "its client was gone for longer than its grace time" in rows[3]
    assert last == "not listed: 2 clients without a run that have no sandboxes (--json has them)"
    assert main(["ps", "--runs", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(LEASES)


def test_kill_by_id_label_or_all(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Each id is ended even if another one is unknown, which makes the exit code 1."""
    assert main(["kill", "sb_1", "sb_2"]) == 0
    assert calls[1:3] == [("kill", "sb_1"), ("kill", "sb_2")]
    assert main(["kill", "--label", "a=b"]) == 0
    assert ("kill_many", {"a": "b"}) in calls
    assert main(["kill", "--all", "--json"]) == 0
    assert ("kill_many", {}) in calls
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"killed": 3, "not_found": []}
    assert main(["kill", "sb_none", "sb_lost", "sb_ended", "sb_3"]) == 1
    assert ("kill", "sb_3") in calls
    out, err = capsys.readouterr()
    assert out == "killed 1\n"
    assert err == "error: no live sandbox sb_none, sb_lost, sb_ended (try: barchan ps)\n"


@pytest.mark.parametrize(
    ("source", "target", "call"),
    [
        ("/etc/hostname", "sb_1:/tmp/x", ("upload", "/etc/hostname", "/tmp/x", None)),
        ("/etc/hostname", "sb_1:/tmp", ("upload", "/etc/hostname", "/tmp/hostname", None)),
        ("/etc/hostname", "sb_1:new/", ("upload", "/etc/hostname", "new/hostname", None)),
        ("/etc", "sb_1:/tmp", ("upload", "/etc", "/tmp", None)),
        ("sb_1:/etc/x:y", "./z:w", ("download", "/etc/x:y", "./z:w", None)),
    ],
)
def test_cp_copies_either_way(calls: list[Any], source: str, target: str, call: tuple[Any, ...]) -> None:
    """A file goes below a directory that is there or ends in a slash; a directory's content goes into the target."""
    assert main(["cp", source, target]) == 0
    assert calls[1] == call
    assert main(["cp", source, target, "--user", "root"]) == 0
    assert calls[4] == (*call[:3], "root")


def test_a_local_path_may_have_colons_behind_a_slash() -> None:
    """Only what stands before the first colon without a slash is a sandbox."""
    assert parse("sb_1:/a:b") == Remote("sb_1", "/a:b")
    assert [parse(path) for path in ("./a:b", "/a:b", "a")] == ["./a:b", "/a:b", "a"]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What `up` runs instead of Python: writes its arguments down, says what is in `said`, and ends."""
    program = tmp_path / "python"
    lines = [
        "#!/bin/sh",
        f'printf "%s\\n" "$@" > {tmp_path}/argv',
        "for fd; do :; done",
        f"cat {tmp_path}/said >/dev/fd/$fd",
    ]
    program.write_text("\n".join([*lines, ""]))
    program.chmod(0o755)
    (tmp_path / "said").write_text("ready\n")
    monkeypatch.setattr("sys.executable", str(program))
    return tmp_path


def test_up_runs_the_node_and_never_prints_the_token(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once the node listens it says how to connect, with the file that holds the token."""
    state_dir = stand_in / "state"
    state_dir.mkdir()
    (state_dir / "token").write_text("secret-secret-secret")
    assert main(["up", "--listen", "127.0.0.1:8000", "--state-dir", str(state_dir)]) == 0
    out = capsys.readouterr().out
    assert f'curl -H "Authorization: Bearer $(cat {state_dir}/token)" http://127.0.0.1:8000/v1/node' in out
    assert "secret" not in out
    assert (stand_in / "argv").read_text().split()[:-2] == [
        *("-m", "barchan.node", "--state-dir", str(state_dir), "--idle-exit-s", "0"),
        *("--listen", "127.0.0.1:8000", "--token-file", f"{state_dir}/token"),
    ]
    assert main(["up", "--state-dir", str(state_dir), "--token-file", "t", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["url"] == "http://127.0.0.1:7070"
    assert said["token_file"] == str(Path.cwd() / "t")


def test_up_that_fails_announces_nothing(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The node's own error, on one line, with the exit code of its kind."""
    error = {"code": "conflict", "message": "can't listen on 127.0.0.1:8000: Address already in use"}
    (stand_in / "said").write_text(json.dumps(error) + "\n")
    assert main(["up", "--listen", "127.0.0.1:8000", "--state-dir", str(stand_in / "state")]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "Address already in use" in err


def test_up_refuses_what_is_no_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the real node, before it starts anything."""
    for listen in ("foo", "0.0.0.0:99999", "127.0.0.1:0"):
        assert main(["up", "--listen", listen, "--state-dir", str(tmp_path)]) == 2
        assert "HOST:PORT" in capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, calls: list[Any]) -> None:
    """Without a traceback."""

    def interrupted(**options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("barchan.connect", interrupted, raising=False)
    assert main(["ps"]) == 130
