"""The synchronous faces: same behaviour from threads, loops, forks and pickles, and a clean end when interrupted."""

import asyncio
import inspect
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import barchan
from barchan.errors import BarchanError, Denied, NotFound
from barchan.sdk.endpoint import _tokens
from tests.unit.sdk.fake_node import FakeNode

PAIRS = [
    (barchan.Client, barchan.AsyncClient),
    (barchan.Sandbox, barchan.AsyncSandbox),
    (barchan.Process, barchan.AsyncProcess),
    (barchan.Files, barchan.AsyncFiles),
    (barchan.Shell, barchan.AsyncShell),
    (barchan.Terminal, barchan.AsyncTerminal),
    (barchan.TemplateBuilder, barchan.AsyncTemplateBuilder),
    (barchan.Run, barchan.AsyncRun),
    (barchan.Group, barchan.AsyncGroup),
    (barchan.Rollout, barchan.AsyncRollout),
]
OF_ONE_FACE = {"clock", "greet", "open", "chunks", "kill_unless", "endpoint", "fenced"}


def methods(cls: type) -> dict[str, inspect.Signature]:
    found = inspect.getmembers(cls, inspect.isfunction)
    return {name: inspect.signature(f) for name, f in found if not name.startswith("_") and name not in OF_ONE_FACE}


@pytest.mark.parametrize("face, twin", PAIRS)
def test_both_faces_offer_the_same(face: type, twin: type) -> None:
    """Every public method of one class is on the other, with the same parameters and defaults."""
    ours, theirs = methods(face), methods(twin)
    assert sorted(ours) == sorted(theirs)
    for name, signature in ours.items():
        mine, other = signature.parameters, theirs[name].parameters
        assert [(p.name, p.kind, p.default) for p in mine.values()] == [
            (p.name, p.kind, p.default) for p in other.values()
        ], name


def test_ten_lines(node: FakeNode) -> None:
    """The program of the README: connect, create, run, stream, throw away."""
    with barchan.connect(node.url) as client:
        with client.create("debian", labels={"job": "x"}) as sandbox:
            assert sandbox.exec(["printf", "42"]).check().text == "42"
            process = sandbox.start("read line; echo got $line", process_id="step-7")
            process.write_stdin(b"it\n")
            assert list(process.output(offset=0)) == [("stdout", 0, b"got it\n")]
            assert process.wait().exit_code == process.exit_code == 0
            sandbox.files.write("a.txt", b"hello")
            assert sandbox.files.read("a.txt") == b"hello"
        assert node.killed == [sandbox.id]
        made = list(client.create_many("debian", n=4))
        assert all(isinstance(item, barchan.Sandbox) for item in made)


def test_leaving_the_synchronous_create_many_frees_the_rest(node: FakeNode) -> None:
    """A broken-off loop ends what was not given yet, before the next statement."""
    with barchan.connect(node.url) as client:
        for item in client.create_many("debian", n=8):
            kept = item
            break
        assert isinstance(kept, barchan.Sandbox)
        assert list(node.sandboxes) == [kept.id]


def test_one_client_from_many_threads_and_loops(node: FakeNode) -> None:
    """Threads with synchronous calls and threads with event loops of their own use one pair of handles at once."""
    with barchan.connect(node.url) as client:
        sandbox = client.create("debian")
        twin = sandbox._twin

        def synchronous(n: int) -> str:
            return sandbox.exec(["printf", str(n)]).text

        def with_a_loop(n: int) -> str:
            async def several() -> list[str]:
                return [r.text for r in await asyncio.gather(*(twin.exec(["printf", str(n)]) for _ in range(3)))]

            return asyncio.run(several())[2]

        with ThreadPoolExecutor(8) as threads:
            calls = [threads.submit((synchronous, with_a_loop)[n % 2], n) for n in range(24)]
            assert [call.result() for call in calls] == [str(n) for n in range(24)]


def test_loops_that_ended_leave_no_connection(node: FakeNode) -> None:
    """asyncio.run() closes the connections of its loop, although the client lives on."""

    def sockets() -> int:
        return sum(
            os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        )

    with barchan.connect(node.url) as client:
        twin = client._twin
        asyncio.run(_twice(twin))
        time.sleep(0.2)
        before = sockets()
        for _ in range(5):
            asyncio.run(_twice(twin))
        time.sleep(0.2)
        assert sockets() <= before
        assert len(twin._transport._pools) == 1


async def _twice(twin: barchan.AsyncClient) -> None:
    await asyncio.gather(twin.node_info(), twin.node_info())


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[FakeNode]:
    fake = FakeNode(tmp_path, token="secret-1")
    fake.start()
    yield fake
    fake.stop()


def test_pickles_hold_no_token_and_attach_again(guarded: FakeNode) -> None:
    """Every handle pickles without the token, and works again where the token is known."""
    with barchan.connect(guarded.url, token="secret-1") as client:
        sandbox = client.create("debian")
        process = sandbox.start("cat", process_id="p")
        handles = (client, sandbox, process, sandbox.files, client._twin, sandbox._twin, process._twin)
        data = pickle.dumps(handles)
        assert b"secret" not in data
        code = textwrap.dedent(f"""
            import pickle, sys, barchan
            client, sandbox, process, files, *_ = pickle.loads({data!r})
            try:
                sandbox.info()
            except barchan.Denied:
                print("denied")
        """)
        told = textwrap.dedent(f"""
            import pickle, sys, barchan
            barchan.set_token({guarded.url!r}, "secret-1")
            client, sandbox, process, files, *_ = pickle.loads({data!r})
            process.write_stdin("hello", eof=True)
            print(sandbox.id, process.id, process.wait().exit_code, client.node_info().node_id)
        """)
        assert run_python(code) == "denied\n"
        assert run_python(told) == f"{sandbox.id} p 0 fake\n"
    assert _tokens.pop(guarded.url) == "secret-1"


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, env=_environment()
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_a_forked_child_goes_its_own_way(node: FakeNode) -> None:
    """After a fork the child's calls work on a loop of its own, its lease is its own, and the parent's goes on."""
    code = textwrap.dedent(f"""
        import os, barchan
        client = barchan.connect({node.url!r})
        sandbox = client.create("debian")
        pid = os.fork()
        if pid == 0:
            made = client.create("debian")
            assert sandbox.exec("echo child").stdout == b"child\\n"
            client.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert sandbox.exec("echo parent").stdout == b"parent\\n"
        client.close()
        print("both")
    """)
    assert run_python(code) == "both\n"
    assert sorted(node.leases) == ["lease_0", "lease_1"]
    assert node.leases_ended == ["lease_1", "lease_0"]
    assert node.killed == ["sb_1", "sb_0"]


def test_an_interrupt_cancels_the_call_and_waits_for_its_cleanup(node: FakeNode) -> None:
    """Ctrl-C in a synchronous exec raises KeyboardInterrupt, after the processes are dead."""
    with barchan.connect(node.url) as client:
        sandbox = client.create("debian")

        def interrupt() -> None:
            while not node.processes:
                time.sleep(0.01)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            sandbox.exec("sleep 300", process_id="p")
        thread.join()
        assert node.processes[sandbox.id, "p"].are_gone()
        assert sandbox.exec("echo still").text == "still\n"


def test_a_program_that_forgets_to_close_ends_quietly(node: FakeNode) -> None:
    """Without close() the interpreter ends in time, without a warning, and the lease's connection ends with it."""
    started = time.monotonic()
    code = textwrap.dedent(f"""
        import barchan
        client = barchan.connect({node.url!r})
        pieces = client.create("debian").start("echo x; sleep 300").output()
        print(next(pieces)[2])
    """)
    assert run_python(code) == "b'x\\n'\n"
    assert time.monotonic() - started < 10


def test_errors_pass_through_as_they_are(node: FakeNode) -> None:
    """A synchronous call raises what its twin raises."""
    with barchan.connect(node.url) as client, pytest.raises(NotFound):
        client.attach("sb_none")


def test_a_wrong_token_is_denied(guarded: FakeNode) -> None:
    """connect() itself tells; the client is not left half open."""
    with pytest.raises(Denied):
        barchan.connect(guarded.url, token="wrong")
    assert _tokens.pop(guarded.url) == "wrong"


def test_every_public_name_is_there() -> None:
    """All names of __all__ load, every error class is among them, and an unknown name is an AttributeError."""
    values = {name: getattr(barchan, name) for name in barchan.__all__}
    errors = {cls.__name__ for cls in barchan.errors.BY_CODE.values()}
    assert errors <= set(values)
    assert issubclass(values["NotFound"], BarchanError)
    assert set(barchan.__all__) <= set(dir(barchan))
    with pytest.raises(AttributeError):
        _ = barchan.nothing_of_that_name


def test_importing_loads_only_what_is_used() -> None:
    """The package, and a client of it, load neither HTTP frameworks nor the terminal emulator."""
    heavy = {"aiohttp", "pyte", "tarfile", "barchan.node"}
    code = f"import sys, barchan; barchan.connect; print(sorted({heavy!r} & set(sys.modules)))"
    assert run_python(code) == "[]\n"
