"""Warm interpreters: forks of one Python in many sandboxes, each an ordinary process of its own."""

import ctypes
import glob
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import barchan
from barchan import Client, InvalidSpec, Sandbox, SandboxSpec
from tests.leaks import CGROUPS
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup"), pytest.mark.timeout(120)]

PIDFD_GETFD = 438
IMPORTS = ("json", "xml.dom.minidom", "email.message", "http.client", "asyncio", "unittest.mock", "ctypes", "sqlite3")
# What a process is, in words that must be the same for one that was executed.
IDENTITY = r"""
import os
for name in ("user", "pid", "net", "uts", "cgroup", "time", "ipc", "mnt"):
    print(name, os.readlink(f"/proc/self/ns/{name}"))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
for key in ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"):
    print(key, status[key])
print(open("/proc/self/limits").read())
print(sorted(line.rpartition("/")[0] for line in open("/proc/self/cgroup")))
print(os.getcwd(), os.getpgid(0) == os.getpid() == os.getsid(0), os.umask(0), sorted(os.environ.items()))
print(os.stat("/proc/self/oom_score_adj").st_uid, open("/proc/self/oom_score_adj").read())
print(sorted(os.listdir("/")), os.uname().nodename)
"""
CATCHER = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))
print('up', flush=True)
time.sleep(60)
"""
# What a program could take of the server: its descriptors, its memory, and the server itself.
STEALS = """
import ctypes, os, subprocess
libc = ctypes.CDLL(None, use_errno=True)
server = int(subprocess.check_output(["pgrep", "-of", "<zygote>"]))
taken = [libc.syscall(438, os.pidfd_open(server), fd, 0) for fd in range(32)]
print(max(taken), libc.ptrace(16, server, None, None))
for name in ("fd", "mem", "environ"):
    try:
        open(f"/proc/{server}/{name}") if name != "fd" else os.listdir(f"/proc/{server}/{name}")
    except OSError as error:
        print(type(error).__name__)
"""
# Stops the server, whose listener it was given, and takes its place for one program.
TAKES = """
import array, os, signal, socket, struct, subprocess, sys
server = int(subprocess.check_output(["pgrep", "-of", "<zygote>"]))
listener = socket.socket(fileno=int(sys.argv[1]))
os.kill(server, signal.SIGSTOP)
print("up", flush=True)
connection, _ = listener.accept()
_, ((_, _, data),), _, _ = connection.recvmsg(4096, 256)
fds = array.array("i", data)
pid = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
try:
    os.kill(pid, signal.SIGSTOP)
except OSError as error:
    print(type(error).__name__)
print([name for fd in fds if "cgroup" in (name := os.readlink(f"/proc/self/fd/{fd}"))])
place = socket.socket(fileno=fds[5])
place.send(b"join")
print([b"join", place.recv(100)])
connection.send(b"exit 9")
os.kill(server, signal.SIGCONT)
"""
# A zygote of its own making: it joins the cgroups and no namespace, and says that all is well.
STAYS = """
import array, os, socket, time
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("\\0barchan-zygote")
listener.listen()
os.write(3, b"ready\\n")
while True:
    connection, _ = listener.accept()
    _, ((_, _, data), *_), _, _ = connection.recvmsg(4096, 256)
    fds = array.array("i", data)
    if os.fork() == 0:
        for fd in fds[9:]:
            os.write(fd, b"0")
        os.write(fds[0], b"ready")
        time.sleep(600)
"""
STOPS = """
import os, signal
spared = {1, os.getpid()}
if os.fork() == 0:
    spared.add(os.getpid())
    while True:
        for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - spared:
            try:
                os.kill(pid, signal.SIGSTOP)
            except OSError:
                pass
"""
FORKED = "import os; print(os.getpid())"


@pytest.fixture(scope="module")
def client(node: NodeProcess) -> Iterator[Client]:
    with barchan.connect(f"unix://{node.socket}") as client:
        yield client


@pytest.fixture(scope="module")
def spec(client: Client) -> SandboxSpec:
    return client.zygote("debian", imports=IMPORTS)


@pytest.fixture(scope="module")
def sandbox(client: Client, spec: SandboxSpec) -> Iterator[Sandbox]:
    with client.create(spec) as sandbox:
        yield sandbox


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def with_modules(client: Client, modules: dict[str, str]) -> barchan.Snapshot:
    """An image with these."""
    with client.create("debian") as sandbox:
        for name, source in modules.items():
            path = f"/usr/lib/python3/dist-packages/{name}.py"
            sandbox.exec(["tee", path], stdin=source, user="root").check()
        return sandbox.snapshot()


def interpreters(node: NodeProcess, imports: str) -> list[int]:
    """Pids, here, of the node's zygotes whose arguments hold this text."""
    stat = node.state_dir.stat()
    name = f"n{stat.st_ino:x}-{stat.st_dev:x}"
    found = []
    for path in glob.glob(f"{CGROUPS}/**/barchan/{name}/zy_*/guest/*/cgroup.procs", recursive=True):
        found += [int(line) for line in _text(path).split()]
    return sorted(pid for pid in set(found) if imports in _text(f"/proc/{pid}/cmdline"))


def _text(path: str) -> str:
    """Of a group's or process's file; empty when that is gone."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def server_of(node: NodeProcess, sandbox: Sandbox) -> int:
    """Pid, here, of what runs source in this sandbox."""
    found = {pid for path in groups_of(node, sandbox) for pid in members(path)}
    return min(pid for pid in found if "<zygote>" in Path(f"/proc/{pid}/cmdline").read_text())


def members(group: Path) -> list[int]:
    try:
        return [int(pid) for pid in group.read_text().split()]
    except OSError:  # it has just been removed
        return []


def groups_of(node: NodeProcess, sandbox: Sandbox) -> list[Path]:
    stat = node.state_dir.stat()
    name = f"barchan/n{stat.st_ino:x}-{stat.st_dev:x}/{sandbox.id}/**/cgroup.procs"
    return [Path(path) for path in glob.glob(f"{CGROUPS}/**/{name}", recursive=True)]


def listener_of(pid: int) -> socket.socket:
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket"):
                taken = socket.socket(fileno=ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, int(name), 0))
                if taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    return taken
                taken.close()
    finally:
        os.close(pidfd)
    raise AssertionError(f"process {pid} listens nowhere")


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_no_program_takes_anything_of_its_server(client: Client, spec: SandboxSpec, user: str) -> None:
    """Though it is of the same user, and that be root: the server has a line to the node."""
    with client.create(spec, user=user) as sandbox:
        for run in (sandbox.python, lambda source: sandbox.exec(["python3", "-c", source])):
            assert run(STEALS).check().text == "-1 -1\n" + 3 * "PermissionError\n"


@pytest.mark.parametrize("user", ["root", "nobody", "4321"])
def test_a_fork_is_an_ordinary_process_of_its_sandbox(client: Client, spec: SandboxSpec, user: str) -> None:
    """Namespaces, user, rights, limits, cgroups and environment are those of a program executed there."""
    with client.create(spec, user=user, env={"GIVEN": "yes"}) as sandbox:
        executed = sandbox.exec(["python3", "-c", IDENTITY]).check().text
        assert executed == sandbox.python(IDENTITY).check().text
        refused = "import ctypes; print(ctypes.CDLL(None).setns(os.open('/proc/self/ns/net', 0), 0))"
        assert sandbox.python(f"import os; {refused}").text == "-1\n"


@pytest.mark.parametrize(
    "source",
    [
        "import sys; print(sys.argv, __name__, sys.modules['__main__'].__name__)",
        "import sys; print(sys.stdin.read()[::-1])",
        "raise SystemExit(7)",
        "raise SystemExit('in words')",
        "def f(): 1 / 0\nf()",
        "def f(:",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import threading, time, atexit\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
        "import sys\nprint('x' * 300000)\nprint('y' * 300000, file=sys.stderr)",
        "class Kept: pass\nimport pickle\nprint(type(pickle.loads(pickle.dumps(Kept()))))",
        "import multiprocessing\nwith multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))",
        "import os\nprint(sorted(map(int, os.listdir('/proc/self/fd')))[:3])",
        f"text = '''{'z' * 200000}'''\nprint(len(text))",
    ],
)
def test_source_does_what_python_c_does_with_it(sandbox: Sandbox, source: str) -> None:
    """Output, exit code and signal are the same."""
    known = sandbox.exec(["python3", "-", "one", "zwei ü"], stdin=source) if len(source) > 130_000 else None
    known = known or sandbox.exec(["python3", "-c", source, "one", "zwei ü"], stdin="input")
    found = sandbox.python(source, args=["one", "zwei ü"], stdin="input")
    expected = (known.exit_code, known.signal, known.stdout, known.stderr)
    assert expected == (found.exit_code, found.signal, found.stdout, found.stderr)


def test_what_was_imported_is_there_and_what_is_done_stays_apart(client: Client, spec: SandboxSpec) -> None:
    """Modules are loaded before the source begins; a change is in no sibling, nor in the next program."""
    with client.create(spec) as left, client.create(spec) as right:
        loaded = "import sys; print(all(name in sys.modules for name in sys.argv[1:]))"
        assert left.python(loaded, args=IMPORTS).text == "True\n"
        left.python("import json; json.changed = 1").check()
        asked = "import json; print(hasattr(json, 'changed'))"
        assert [left.python(asked).text, right.python(asked).text] == ["False\n"] * 2
        drawn = "import random, os, uuid; print(random.random(), uuid.uuid4(), os.urandom(8))"
        lines = {sandbox.python(drawn).text for sandbox in (left, right) for _ in range(3)}
        assert len(lines) == 6


def test_the_heap_is_shared_until_it_is_written_to(node: NodeProcess, sandbox: Sandbox) -> None:
    """Most of what the waiting server has resident belongs to the zygote, too."""
    rollup = Path(f"/proc/{server_of(node, sandbox)}/smaps_rollup").read_text()
    sizes = {line.split()[0]: int(line.split()[1]) for line in rollup.splitlines()[1:]}
    assert sizes["Private_Dirty:"] + sizes["Private_Clean:"] < sizes["Rss:"] / 4


def test_time_outs_signals_and_limits_reach_a_fork(client: Client, spec: SandboxSpec, sandbox: Sandbox) -> None:
    """What the platform does to a program it does to source, and to all that it started."""
    late = sandbox.python("import os, time\nprint('begun', flush=True)\nos.fork()\ntime.sleep(600)", timeout_s=1)
    assert (late.timed_out, late.stdout) == (True, b"begun\n")
    assert sandbox.exec("pgrep -fc '<zygote>'").text == "1\n"
    process = sandbox.start_python(CATCHER)
    assert next(iter(process.output()))[2] == b"up\n"
    process.signal("USR1")
    assert process.wait(timeout_s=30).exit_code == 9
    killed = sandbox.start_python("import time; time.sleep(600)")
    killed.signal("KILL")
    assert killed.wait(timeout_s=30).signal == signal.SIGKILL
    wait_for(lambda: sandbox.exec("pgrep -fc '<zygote>'").text == "1\n")
    with client.create(spec, memory_mib=64) as small:
        greedy = small.python("kept = bytearray(200 << 20)")
        assert (greedy.oom_killed, greedy.signal) == (True, signal.SIGKILL)


def test_who_answers_in_the_server_s_place_moves_nobody(client: Client, node: NodeProcess, spec: SandboxSpec) -> None:
    """A guest that had the server's socket would get no file of a cgroup, and could not stop what stands for the
    source."""
    with client.create(spec, user="nobody") as sandbox:
        pid = server_of(node, sandbox)
        uid, gid = sandbox.exec("id -u; id -g").check().text.split()
        with listener_of(pid) as listener:
            joined = [path for path in groups_of(node, sandbox) if pid in members(path)]
            joins = "".join(f"echo $$ > {path}; " for path in joined)
            enter = f"exec nsenter -t {pid} -U -p -n -m -S {uid} -G {gid} python3 -c"
            taker = subprocess.Popen(
                ["sh", "-c", f'{joins} {enter} "$@"', "sh", TAKES, str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdout=subprocess.PIPE,
            )
        assert taker.stdout is not None and taker.stdout.readline() == b"up\n"
        before = sandbox.exec("cat /proc/1/cgroup").check().text
        stolen = sandbox.start_python("print('never')")
        assert taker.communicate()[0] == b"PermissionError\n[]\n[b'join', b'go']\n"
        assert stolen.wait(timeout_s=30).exit_code == 9
        assert sandbox.exec("cat /proc/1/cgroup").check().text == before


def test_a_server_that_the_guest_kills_is_made_again(client: Client, spec: SandboxSpec) -> None:
    """What it was running is said to have lost it; the next one runs."""
    with client.create(spec) as sandbox:
        running = sandbox.start_python("import os, time; print(os.getppid(), flush=True); time.sleep(600)")
        server = int(next(iter(running.output(quiet_timeout_s=30)))[2])
        sandbox.exec(f"kill -9 {server}").check()
        assert running.wait(timeout_s=30).exit_code == 126
        assert sandbox.python("print('again')").text == "again\n"


def test_a_zygote_that_dies_is_made_again(client: Client, node: NodeProcess) -> None:
    """Its sandboxes live on, and get forks of the new one when they need one; a create that comes at once waits."""
    spec = client.zygote("debian", imports=["json", "colorsys"])
    with client.create(spec) as old:
        (pid,) = interpreters(node, "colorsys")
        os.kill(pid, signal.SIGKILL)
        with client.create(spec) as new:
            assert old.python("print('its server lives')").text == "its server lives\n"
            # What was killed goes when it gets to run: until then it takes programs that it never starts.
            old.exec("pid=$(pgrep -of '<zygote>'); kill -9 $pid; while [ -e /proc/$pid ]; do sleep 0.01; done").check()
            told = "import sys; print('colorsys' in sys.modules)"
            assert [old.python(told).text, new.python(told).text] == ["True\n"] * 2
        assert len(interpreters(node, "colorsys")) == 1


@pytest.mark.parametrize(
    ("imports", "python", "said"),
    [
        (("json", "no_such_module"), "python3", "ModuleNotFoundError: No module named 'no_such_module'"),
        (("json",), "python2.2", "the image has no python2.2"),
        (("json",), "/bin/false", "it ended with exit code 1"),
    ],
)
def test_a_zygote_that_cant_be_had_says_why(client: Client, imports: tuple[str, ...], python: str, said: str) -> None:
    """No sandbox is made then."""
    with pytest.raises(InvalidSpec) as caught:
        client.create(client.zygote("debian", imports=imports, python=python))
    assert said in str(caught.value)


def test_imports_may_print_crash_and_start_threads(client: Client) -> None:
    """Printing is harmless; a crash and a thread are the reason given."""
    modules = {
        "prints": "print('ready')",
        "crashes": "import os; os.abort()",
        "threads": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "ends": "raise SystemExit(0)",
    }
    snapshot = with_modules(client, modules)
    image = snapshot.image.name
    try:
        with client.create(client.zygote(image, imports=["prints"])) as fine:
            assert fine.python("import sys; print('prints' in sys.modules)").text == "True\n"
        for name, said in (("crashes", "signal 6"), ("threads", "1 threads running"), ("ends", "SystemExit")):
            with pytest.raises(InvalidSpec, match=said):
                client.create(client.zygote(image, imports=[name]))
    finally:
        snapshot.remove()


def test_imports_share_no_memory_that_a_fork_could_write_to(client: Client) -> None:
    """Not now, nor by changing the protection later; files that are read and memory that is copied are fine."""
    kept = "os.memfd_create('kept'); os.ftruncate(fd, 4096)"
    modules = {
        "anonymous": "import mmap; mem = mmap.mmap(-1, 4096)",
        "readable": f"import mmap, os; fd = {kept}; mem = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)",
        "counted": "import multiprocessing; value = multiprocessing.Value('i', 0)",
        "read": "import mmap; file = open('/etc/passwd', 'rb'); mem = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)",
        "copied": "import mmap; mem = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE)",
    }
    snapshot = with_modules(client, modules)
    image = snapshot.image.name
    try:
        for name, said in (("anonymous", "/dev/zero"), ("readable", "/memfd:kept"), ("counted", "")):
            with pytest.raises(InvalidSpec, match=f"mapped shared .*{said}"):
                client.create(client.zygote(image, imports=[name]))
        with client.create(client.zygote(image, imports=["read", "copied"])) as fine:
            assert fine.python("import read; print(read.mem[:4])").text == "b'root'\n"
    finally:
        snapshot.remove()


def test_an_image_chooses_no_id_of_another_sandbox(client: Client) -> None:
    """A zygote's user namespace has the ids of all slots: its root must be its own."""
    with client.create("debian") as sandbox:
        there = sandbox.exec(
            "sed -i s/:0:0:/:1048576:1048576:/ /etc/passwd && head -1 /etc/passwd", user="root"
        ).check()
        assert there.text.startswith("root:") and ":1048576:1048576:" in there.text
        snapshot = sandbox.snapshot()
    try:
        with pytest.raises(InvalidSpec, match="has an id above 65535"):
            client.create(client.zygote(snapshot.image.name, imports=["json"]))
    finally:
        snapshot.remove()


def test_a_hostile_zygote_holds_up_neither_ends_nor_others(client: Client) -> None:
    """One that stays in a sandbox's cgroups goes with it; one that stops what it sees start stops nothing else."""
    snapshot = with_modules(client, {"stays": STAYS, "stops": STOPS})
    try:
        stays = client.create(client.zygote(snapshot.image.name, imports=["stays"]))
        wait_for(lambda: stays.stats().pids == 1)
        assert stays.kill()
        spec = client.zygote(snapshot.image.name, imports=["stops"])
        with ThreadPoolExecutor() as pool:
            stopped = pool.submit(client.create, spec)
            while not stopped.done():  # or until the supervisor's patience is over
                with client.create("debian") as other:
                    assert other.exec(["true"]).ok
            if stopped.exception() is None:  # the zygote was too slow
                assert stopped.result().kill()
            else:
                assert isinstance(stopped.exception(), barchan.BarchanError)
    finally:
        snapshot.remove()


def test_what_excludes_a_warm_interpreter_is_refused(client: Client, spec: SandboxSpec, sandbox: Sandbox) -> None:
    """A capable root, another user, a terminal; and a sandbox that has none."""
    with pytest.raises(InvalidSpec, match="capabilities"):
        client.create(spec, root="capable")
    with pytest.raises(InvalidSpec, match="sandbox's user"):
        sandbox.python("", user="nobody")
    with pytest.raises(InvalidSpec, match="without a terminal"):
        sandbox.start_python("", pty=True)
    with pytest.raises(InvalidSpec, match="exclude each other"):
        client.create(spec, network="open")
    with client.create("debian") as plain, pytest.raises(InvalidSpec, match="no warm interpreter"):
        plain.python("")


def test_a_zygote_outlives_its_node(make_node: Callable[[], NodeProcess]) -> None:
    """The next node uses it for old sandboxes and new ones, and what ran in a fork goes on."""
    node = make_node()
    node.start()
    with barchan.connect(f"unix://{node.socket}") as client:
        spec = client.zygote("debian", imports=["json"])
        sandbox = client.create(spec)
        running = sandbox.start_python("import time\ntime.sleep(2)\nprint('done')")
        before = interpreters(node, "json")
        node.kill()
        node.start()
        assert sandbox.python(FORKED).check().ok
        assert b"".join(data for stream, _, data in running.output() if stream == "stdout") == b"done\n"
        with client.create(spec) as new:
            assert new.python(FORKED).check().ok
        assert before == interpreters(node, "json")
        sandbox.kill()
