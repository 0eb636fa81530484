"""Calls: each in a place of its own, with an outcome whatever it does, and the next one works."""

import asyncio
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

import barchan
from barchan import BarchanError, CallResult, Client, ConnectionLost, ExecFailed, InvalidSpec
from barchan.wire import calls as wire
from tests.leaks import CGROUPS
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]

# What a process may, in words that must be the same for a program of a container.
RIGHTS = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Uid", "Gid", "Groups"):
    print(key, status[key].split())
print(open("/proc/self/limits").read())
"""
REFUSED = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def told(result):
    print(result, ctypes.get_errno())
for flags in (0x00020000, 0x08000000, 0x40000000, 0x10000000, 0x20000000, 0x04000000, 0x02000000, 0x80):
    told(libc.unshare(flags))
told(libc.setns(os.open("/proc/self/ns/net", 0), 0))
told(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b""))
told(libc.umount2(b"/tmp", 2))
"""
# Leaves what it can, in every place that there is.
LEAVES = """
import ctypes, os, random, socket, sys, tempfile, time
for path in ("/tmp/left", "/var/tmp/left", "/dev/shm/left"):
    open(path, "w").write("left")
os.environ["LEFT"] = "left"
sys.modules["json"].left = "left"
libc = ctypes.CDLL(None)
libc.shmget(77, 4096, 0o1666), libc.msgget(77, 0o1666), libc.semget(77, 1, 0o1666)
libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o666, None)
server = socket.create_server(("127.0.0.1", 7000))
with socket.create_connection(("127.0.0.1", 7000)):
    server.accept()[0].close()
name = socket.socket(socket.AF_UNIX)
name.bind("\\0left")
name.listen()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
for flags in (0, 0x8000):  # one that tells of its end by no signal, and a sibling of this process
    if libc.syscall(clone, flags, 0, 0, 0, 0) == 0:
        time.sleep(600)
print("left", flush=True)
os._exit(0)
"""
FINDS = """
import ctypes, os, socket, sys
found = [path for path in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue") if os.path.isdir(path) and os.listdir(path)]
found += [name for name in os.environ if name == "LEFT"] + [name for name in dir(sys.modules["json"]) if name == "left"]
libc = ctypes.CDLL(None)
found += [libc.shmget(77, 4096, 0), libc.msgget(77, 0), libc.semget(77, 1, 0)]
found += [libc.mq_open(b"/left", os.O_RDWR)]
try:
    socket.socket(socket.AF_UNIX).connect("\\0left")
    found.append("socket")
except ConnectionRefusedError:
    pass
own = ("lo:", "Inter-|", "face")
traffic = [line.split()[1:3] for line in open("/proc/net/dev") if line.split()[0] == "lo:"]
waiting = len(open("/proc/net/tcp").readlines()) - 1
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
owned = [pid for pid in pids if os.stat(f"/proc/{pid}").st_uid == os.getuid()]
print(found, traffic, waiting, owned == [os.getpid()], len(pids))
"""
SECRET = "s3cr3t-of-another-call"
# All of its memory that it can read, and that of every process that it sees.
SEARCHES = """
import os
word = bytes(reversed(b"llac-rehtona-fo-t3rc3s"))
hits = 0
for pid in [name for name in os.listdir("/proc") if name.isdigit()]:
    try:
        areas = [line.split() for line in open(f"/proc/{pid}/maps")]
        memory = open(f"/proc/{pid}/mem", "rb", 0)
    except OSError:
        continue
    for area in areas:
        if area[1].startswith("rw") and area[-1] not in ("[vvar]", "[vsyscall]"):
            first, last = (int(part, 16) for part in area[0].split("-"))
            memory.seek(first)
            try:
                hits += memory.read(last - first).count(word)
            except OSError:
                pass
print(hits - 1)  # the word itself
"""
DRAWS = """
import os, random, secrets, tempfile, uuid
print(random.random(), random.getrandbits(64), uuid.uuid4(), secrets.token_hex(4), tempfile.mktemp())
"""
KILLS = """
import os
for pid in (1, os.getppid()):
    try:
        os.kill(pid, 9)
    except OSError as error:
        print(error.errno)
"""
IGNORES = "import signal, time\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60)"
GROWS = """
import os
while True:
    if os.fork() == 0:
        kept = bytearray(8 << 20)
        while True:
            pass
"""
# What it has of the node: descriptors that could carry others to it, and state of one that the next call would find.
SHARES = """
import fcntl, os, stat
kinds = {fd: stat.S_IFMT(os.fstat(fd).st_mode) for fd in range(32) if os.path.exists(f"/proc/self/fd/{fd}")}
print([fd for fd, kind in kinds.items() if stat.S_ISSOCK(kind)], max(kinds))
print(fcntl.fcntl(0, fcntl.F_GETFL) & os.O_NONBLOCK, fcntl.fcntl(0, fcntl.F_GETOWN))
fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.fcntl(0, fcntl.F_SETFL, os.O_NONBLOCK)
fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
"""
CLOSES = "import os\nfor fd in range(1000):\n    try: os.close(fd)\n    except OSError: pass"


def doubled(number: int) -> int:
    return 2 * number


def described(number: int, *, word: str) -> dict[str, object]:
    """Every kind of plain value."""
    return {
        "all": [None, True, False, number, -number, 1 << 200, 1.5, 2j, "ü", b"\0", (1, 2), {1, 2}, frozenset("a")],
        "word": word,
        "by number": {number: word, (1, 2): None},
    }


def fails(number: int) -> None:
    raise ValueError(f"not {number}")


async def later(number: int) -> int:
    import asyncio

    await asyncio.sleep(0)
    return number + 1


def strange() -> object:
    return object()


def pickles_code() -> object:
    class Evil:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            import os

            return os.system, ("touch /tmp/barchan-pickled",)

    return Evil()


@pytest.fixture(scope="module")
def client(node: NodeProcess) -> Iterator[Client]:
    with barchan.connect(f"unix://{node.socket}") as client:
        yield client


def still_works(client: Client) -> bool:
    """On every worker that there is."""
    results = [result for result in client.map(doubled, range(12), concurrency=12) if isinstance(result, CallResult)]
    return [result.value for result in results] == [2 * number for number in range(12)]


def test_source_runs_as_a_program(client: Client) -> None:
    """Input, output, exit code, signal, environment and usage are what a program has."""
    result = client.call("print(input()); import sys; print('e', file=sys.stderr)", stdin="ein ü")
    assert (result.text, result.error_text, result.exit_code, result.ok) == ("ein ü\n", "e\n", 0, True)
    assert result.usage.max_rss_kib > 1000 and result.usage.wall_s > 0
    assert client.call("raise SystemExit(7)").exit_code == 7
    assert client.call("import os; os.abort()").signal == signal.SIGABRT
    assert client.call("import os; os.kill(os.getpid(), 15)").exit_code == 128 + 15
    failed = client.call("def f(): 1 / 0\nf()")
    assert failed.exit_code == 1
    assert failed.error_text.splitlines()[0] == "Traceback (most recent call last):"
    assert 'File "<string>", line 2, in <module>' in failed.error_text and "keeper" not in failed.error_text
    with pytest.raises(ExecFailed, match="ZeroDivisionError"):
        failed.check()
    long = client.call("import sys; print(len(sys.stdin.buffer.read()))", stdin=b"x" * 300_000)
    assert long.text == "300000\n"
    told = client.call("import os; print(os.environ['A'], os.environ['HOME'], os.getcwd())", env={"A": "b"})
    assert told.text == "b /tmp /tmp\n"
    started = "import subprocess; print(subprocess.run(['cat'], input=b'y', capture_output=True).stdout)"
    assert client.call(started).text == "b'y'\n"


def test_a_function_gives_its_value(client: Client) -> None:
    """Plain values come as they were; by source or by name; an error says which."""
    import math

    assert client.call(doubled, 4).value == 8
    assert client.call(described, 3, kwargs={"word": "w"}).value == described(3, word="w")
    assert client.call(math.hypot, 3, 4).value == 5.0
    assert client.call(later, 1).value == 2
    failed = client.call(fails, 3)
    assert failed.error == ("ValueError", "not 3")
    with pytest.raises(ExecFailed, match="ValueError: not 3"):
        _ = failed.value
    refused = client.call(strange)
    assert refused.error is not None and "builtins.object does not travel as plain data" in refused.error[1]
    with pytest.raises(InvalidSpec, match="a lambda"):
        client.call(lambda: 1)
    with pytest.raises(InvalidSpec, match="can't be pickled"):
        client.call(doubled, lambda: 1)
    with pytest.raises(ExecFailed, match="no value"):
        _ = client.call("1").value


def test_a_value_is_a_pickle_only_where_that_is_asked_for(client: Client) -> None:
    """What a call says is a pickle is none for others; one that is asked for may hold anything."""
    forged = "import os; os.write(3, b'p' + __import__('pickle').dumps(1))"
    result = client.call(forged)
    assert not result.returned and result.error is not None
    assert client.call(pickles_code).error is not None
    assert not Path("/tmp/barchan-pickled").exists()
    assert client.call(strange, pickled=True).value.__class__ is object
    garbled = client.call("import os; os.write(3, b'v' + bytes([0xdd, 255, 255, 255, 255]))")
    assert not garbled.returned and garbled.error is not None and "no plain data" in garbled.error[1]
    assert pickle.loads(pickle.dumps(client.call(doubled, 2))).value == 4


def test_map_keeps_the_order_and_gives_errors_in_their_place(client: Client) -> None:
    """Of many at once; leaving early ends those that run."""

    results = list(client.map(doubled, range(40), concurrency=7))
    assert [result.value for result in results if isinstance(result, CallResult)] == [2 * n for n in range(40)]
    mixed = list(client.map(doubled, [1, lambda: 1, 3]))
    assert [type(item).__name__ for item in mixed] == ["CallResult", "InvalidSpec", "CallResult"]
    began = time.monotonic()
    for _ in client.map(time.sleep, [0, 60, 60, 60, 60, 60], concurrency=3, timeout_s=60):
        break
    assert still_works(client)
    assert time.monotonic() - began < 50


def test_no_call_finds_what_another_has_left(client: Client) -> None:
    """Files, variables, modules, processes, sockets, ports, System V's things and message queues."""
    imports = ["json"]
    clean = client.call(FINDS, imports=imports).check().text
    assert "[-1, -1, -1, -1] [['0', '0']] 0 True 3" in clean
    for _ in range(3):
        results = [client.call(LEAVES, imports=imports) for _ in range(4)]
        assert [result.text for result in results] == ["left\n"] * 4
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda _: client.call(FINDS, imports=imports).check().text, range(8)))
        assert found == [clean] * 8


def test_no_call_finds_another_s_secrets_in_memory(client: Client) -> None:
    """Not in its own memory, which is a copy of what keeps calls, nor in that of a process it sees."""
    for _ in range(4):
        client.call(f"import sys; word = {SECRET!r} + sys.stdin.read(); print(word)", stdin=SECRET, env={"S": SECRET})
        client.call(described, 1, kwargs={"word": SECRET})
    assert int(client.call(f"kept = bytes({list(SECRET.encode())})\n{SEARCHES}").check().text) > 0
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda _: client.call(SEARCHES).check().text, range(8)))
    assert found == ["0\n"] * 8


def test_a_call_has_no_more_rights_than_a_program(client: Client) -> None:
    """Capabilities, limits, filter; and none of those that its place is made with."""
    with client.create("debian", user="agent") as sandbox:
        executed = sandbox.exec(["python3", "-c", RIGHTS]).check().text
        refused = sandbox.exec(["python3", "-c", REFUSED]).check().text
    assert client.call(RIGHTS).check().text == executed
    assert client.call(REFUSED).check().text == refused
    assert all(line == "-1 1" for line in refused.splitlines())
    for path in ("/x", "/usr/x", "/home/x", "/dev/x", "/etc/passwd"):
        assert (
            "Read-only" in client.call(f"open({path!r}, 'a')").error_text
            or "denied" in client.call(f"open({path!r}, 'a')").error_text
        )
    assert client.call(KILLS).text == "1\n1\n"
    connect = "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
    assert "unreachable" in client.call(connect).error_text


def test_a_call_shares_pipes_with_the_node_and_nothing_with_the_next_call(client: Client) -> None:
    """No socket, and no open file whose flags, owner or lock stay."""
    for _ in range(6):
        assert client.call(SHARES).check().text == "[] 3\n0 0\n"


def test_large_requests_and_values_pass(client: Client) -> None:
    """Many times what a pipe holds."""
    data = os.urandom(12 << 20)
    assert client.call(bytes, data, timeout_s=60).value == data


async def test_a_call_that_asks_for_too_much_ends_no_other(node: NodeProcess) -> None:
    """Of the same connection: it is told so."""
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        other = asyncio.ensure_future(client.call("import time; time.sleep(1); print(1)"))
        link = await client._link()
        work = wire.encode_work(wire.Work.PROGRAM, b"print(2)")
        with pytest.raises(InvalidSpec, match="at most"):
            await link.ask(10.0, wire.OUTPUT_BYTES_MAX + 1, b"", work)
        with pytest.raises(InvalidSpec, match="MiB"):
            await client.call("print(3)", memory_mib=1 << 20)
        assert (await other).text == "1\n"


def test_randomness_differs(client: Client) -> None:
    """Of `random` and all that draws from the kernel."""
    lines = [client.call(DRAWS, imports=["random", "uuid", "secrets", "tempfile"]).check().text for _ in range(6)]
    for column in zip(*(line.split() for line in lines), strict=True):
        assert len(set(column)) == len(lines)


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", (True, False, 137)),
        ("import os\nwhile True: os.fork()", (False, False, 1)),
        ("kept = bytearray(200 << 20)", (False, True, 137)),
        ("open('/dev/shm/x', 'wb').write(bytes(80 << 20))", (False, False, 1)),
        ("import os; os._exit(3)", (False, False, 3)),
        ("import os; os.kill(-1, 9); os.kill(0, 9)", (False, False, 137)),
        (CLOSES, (False, False, 0)),
        ("import os; os.kill(os.getpid(), 19)", (True, False, 137)),
        (IGNORES, (True, False, 137)),
        ("import ctypes; ctypes.string_at(0)", (False, False, 139)),
        ("import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()", (True, False, 137)),
        ("import os\nif os.fork() == 0:\n    import time; time.sleep(600)", (False, False, 0)),
    ],
)
def test_whatever_a_call_does_has_an_outcome(client: Client, source: str, outcome: tuple[bool, bool, int]) -> None:
    """Bombs, deaths and refusals to end; the next calls work."""
    result = client.call(source, timeout_s=1.0 if outcome[0] else 60.0, memory_mib=128)
    assert (result.timed_out, result.oom_killed, result.exit_code) == outcome
    assert client.call("print(1)", memory_mib=128).text == "1\n"
    assert still_works(client)


def test_a_bomb_of_small_processes_is_out_of_memory(client: Client) -> None:
    """Be it that all of the worker goes: the outcome says so, and the next call has another."""
    result = client.call(GROWS, timeout_s=2.0, memory_mib=64, pids_max=200)
    assert result.oom_killed or result.timed_out or result.exit_code == 1
    assert client.call("print(1)", memory_mib=64, pids_max=200).text == "1\n"


def test_output_without_end_is_cut(client: Client) -> None:
    """Head and tail are kept, and the count says what was written."""
    flood = client.call("import os\nfor n in range(400): os.write(1, b'%04d' % n * 16384)", max_output_bytes=1000)
    assert (flood.exit_code, flood.truncated, len(flood.stdout)) == (0, True, 1000)
    assert flood.stdout_bytes == 400 * 65536
    assert flood.stdout.startswith(b"0000") and flood.stdout.endswith(b"0399")
    endless = client.call("import os\nwhile True: os.write(2, bytes(65536))", timeout_s=1.0, max_output_bytes=0)
    assert endless.timed_out and endless.stderr == b"" and endless.stderr_bytes > 65536


def test_cpu_time_has_a_bound_of_its_own(client: Client) -> None:
    """The kernel ends what has used it up."""
    result = client.call("while True: pass", cpu_s=1, timeout_s=60)
    assert (result.signal, result.timed_out) == (signal.SIGXCPU, False)
    assert result.usage.user_s + result.usage.system_s < 2.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"imports": ["no_such_module"]}, "No module named 'no_such_module'"),
        ({"python": "python2.2"}, "the image has no python2.2"),
        ({"template": "no-such-image"}, "no image"),
        ({"memory_mib": 1}, "memory_mib"),
        ({"pids_max": 1 << 20}, "pids_max"),
        ({"imports": ["a b"]}, "imports"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": 1e6}, "at most"),
    ],
)
def test_what_cant_be_is_refused(client: Client, options: dict[str, object], said: str) -> None:
    """With the reason."""
    with pytest.raises(BarchanError, match=said):
        client.call("print(1)", **options)  # type: ignore[arg-type]


def test_workers_are_shared_out_and_made_anew(client: Client, node: NodeProcess) -> None:
    """More kinds than workers have their turns; one whose keeper is killed is replaced."""
    kinds = [{"memory_mib": 64 + index} for index in range(client.call_info().workers_max + 3)]
    with ThreadPoolExecutor(len(kinds)) as pool:
        results = list(pool.map(lambda kind: client.call("print(1)", **kind).text, kinds * 2))  # type: ignore[arg-type]
    assert results == ["1\n"] * len(results)
    info = client.call_info()
    assert info.workers <= info.workers_max and info.queued == info.running == 0
    for pid in keepers(node):
        with suppress(ProcessLookupError):  # it went with another one
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while client.call_info().broken_total == info.broken_total and time.monotonic() < deadline:
        time.sleep(0.02)
    assert still_works(client)


def keepers(node: NodeProcess) -> list[int]:
    """Pids, here, of what keeps the calls of this node's workers, and of the calls themselves."""
    stat = node.state_dir.stat()
    found = []
    for path in CGROUPS.glob(f"**/barchan/n{stat.st_ino:x}-{stat.st_dev:x}/ca_*/guest/cgroup.procs"):
        found += [int(line) for line in path.read_text().split()]
    return sorted(set(found))


async def test_a_call_nobody_waits_for_is_ended(node: NodeProcess) -> None:
    """By cancelling it, and by closing the client."""
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        call = asyncio.ensure_future(client.call("import time; time.sleep(60)", timeout_s=60))
        while (await client.call_info()).running == 0:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while (await client.call_info()).running:
            await asyncio.sleep(0.01)
        async with barchan.connect_async(f"unix://{node.socket}") as other:
            left = asyncio.ensure_future(other.call("import time; time.sleep(60)", timeout_s=60))
            while (await client.call_info()).running == 0:
                await asyncio.sleep(0.01)
        with pytest.raises(BarchanError):
            await left
        while (await client.call_info()).running:
            await asyncio.sleep(0.01)


def test_the_function_backend_s_sandboxes_are_containers(client: Client) -> None:
    """Programs, files and source; with a warm interpreter even if none was asked for."""
    with client.create("debian", backend="function") as sandbox:
        assert sandbox.info().spec.backend == "function"
        assert sandbox.exec(["cat"], stdin="x").text == "x"
        sandbox.files.write("/tmp/a", b"b")
        assert sandbox.python("print(open('/tmp/a').read())").text == "b\n"
        with pytest.raises(InvalidSpec, match="root="):
            client.create("debian", backend="function", root="capable")


def test_a_node_that_dies_takes_its_calls_with_it(make_node: Callable[[], NodeProcess]) -> None:
    """The call fails as lost; the next node has new workers, and of the old ones nothing stays."""
    node = make_node()
    node.start()
    with barchan.connect(f"unix://{node.socket}") as client:
        sandbox = client.create("debian", backend="function")
        with ThreadPoolExecutor() as pool:
            call = pool.submit(client.call, "import time; time.sleep(60)", timeout_s=60)
            while client.call_info().running == 0:
                time.sleep(0.01)
            before = keepers(node)
            node.kill()
            with pytest.raises(ConnectionLost):
                call.result()
            node.start()
            assert client.call("print(1)").text == "1\n"
            assert sandbox.python("print(2)").text == "2\n"
            assert not set(before) & set(keepers(node))
        sandbox.kill()
