"""Starting programs: arguments, environment, users, terminals, limits, and what goes wrong."""

import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.guest.init.driver import FOLLOWED, LIST, MERGE, PTY, RESIZE, START, Connection, GuestReplyError, start_body
from tests.guest.init.guest import Guest

pytestmark = [pytest.mark.requires("root", "static-libc"), pytest.mark.timeout(60)]


def test_exit_code_and_output(connection: Connection) -> None:
    """Both streams arrive whole, with END and the exit code."""
    output = connection.sh("echo out; echo err >&2; exit 7")
    assert (output.out, output.err, output.code) == (b"out\n", b"err\n", 7)
    assert (output.exit["stdout_end"], output.exit["stderr_end"]) == (4, 4)
    assert output.end in ({}, {1: 4}, {2: 4}, {1: 4, 2: 4})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_by_signal(connection: Connection, number: int) -> None:
    """The wait status tells which signal ended a program."""
    output = connection.sh(f"kill -{int(number)} $$")
    assert os.WTERMSIG(output.exit["wstatus"]) == number


def test_missing_program_is_127(connection: Connection) -> None:
    """A name that PATH does not have, and a path that does not exist, end with 127 and a line that says so."""
    for name in ("no-such-program", "/no/such/program", ""):
        output = connection.run([name])
        assert output.code == 127
        assert output.err.startswith(b"barchan: ") and output.err.endswith(b"not found\n")


def test_missing_interpreter_is_127(connection: Connection, guest: Guest) -> None:
    """As in a shell, a script whose interpreter is missing counts as not found."""
    script = guest.work / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    assert connection.run([str(script)]).code == 127


def test_not_executable_is_126(connection: Connection, guest: Guest) -> None:
    """A file without the right to execute, a directory, and a file that is no program end with 126."""
    plain, broken = guest.work / "plain", guest.work / "broken"
    plain.write_text("x")
    plain.chmod(0o644)
    broken.write_bytes(b"\x7fELFnonsense")
    broken.chmod(0o755)
    for path in (plain, broken, guest.work):
        output = connection.run([str(path)])
        assert (output.code, output.err[:9]) == (126, b"barchan: ")


def test_path_prefers_what_can_run(connection: Connection, guest: Guest) -> None:
    """A file without execute permission early in PATH does not hide the program after it; alone it gives 126."""
    (guest.work / "true").write_text("x")
    (guest.work / "only-here").write_text("x")
    env = {"PATH": f"{guest.work}:/usr/bin"}
    assert connection.run(["true"], env=env).code == 0
    assert connection.run(["only-here"], env=env).code == 126


def test_default_path(connection: Connection) -> None:
    """Without PATH in the environment the usual directories are searched."""
    assert connection.run(["true"], env={}).code == 0


def test_arguments_and_environment_are_exact(connection: Connection) -> None:
    """Any bytes but NUL survive; HOME, USER and LOGNAME are added only when they lack."""
    output = connection.run([b"printf", b"%s|", b"", b"a b", b"\xff\n", b"'"])
    assert output.out == b"|a b|\xff\n|'|"
    env = connection.run(["env"], env={"PATH": "/usr/bin", "A": "1 2", "EMPTY": "", "USER": "me"}).out.decode()
    assert set(env.splitlines()) == {
        "PATH=/usr/bin",
        "A=1 2",
        "EMPTY=",
        "USER=me",
        "HOME=/nonexistent",
        "LOGNAME=nobody",
    }


def test_working_directory(connection: Connection, guest: Guest) -> None:
    """The program starts in `cwd`; one that is missing or closed to the user is 126."""
    assert connection.run(["pwd"], cwd=str(guest.work)).out == f"{guest.work}\n".encode()
    assert connection.run(["pwd"], cwd="").out == b"/\n"
    for cwd in ("/no/such/dir", "/root", "/etc/passwd"):
        output = connection.run(["pwd"], cwd=cwd)
        assert (output.code, output.err[:21]) == (126, b"barchan: cannot enter")


def test_descriptors_signals_and_session(connection: Connection) -> None:
    """A program finds descriptors 0-2 alone, no blocked or ignored signal, a session of its own and the usual umask."""
    output = connection.sh("ls /proc/self/fd; grep -E 'Sig(Blk|Ign)|CapP|CapE|CapI|CapA|CapB' /proc/self/status; umask")
    lines = output.out.decode().split()
    assert lines[:4] == ["0", "1", "2", "3"]  # 3 is ls's own view of the directory
    values = dict(zip(lines[4:-1:2], lines[5:-1:2], strict=True))
    assert {name: int(value, 16) for name, value in values.items()} == dict.fromkeys(values, 0)
    assert lines[-1] == "0022"
    pid, group, session = connection.run(["ps", "-o", "pid=,pgid=,sid=", "-C", "ps"]).out.split()
    assert pid == group == session


def test_root_user_has_no_capabilities(connection: Connection) -> None:
    """Guest root is uid 0 with an empty capability set, also after an exec."""
    output = connection.sh("id -u; exec grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status", user="")
    words = output.out.decode().split()
    assert words[0] == "0"
    assert [int(word, 16) for word in words[2::2]] == [0] * 5


def test_users_and_groups(accounts: dict[str, Path], make_guest: Callable[..., Guest]) -> None:
    """Names, numbers, and explicit groups come from the guest's own files; so do HOME and USER."""
    connection = make_guest(binds=accounts).connect()
    connection.hello()

    def who(user: str) -> str:
        return connection.sh("echo $(id -u) $(id -g) $(id -G) $HOME $USER", user=user).out.decode().strip()

    assert who("") == "0 0 0 /root root"
    assert who("ann") == "2001 2002 2002 2010 2011 /home/ann ann"
    assert who("2001") == "2001 2002 2002 2010 2011 /home/ann ann"
    assert who("bob:team") == "2003 2010 2010 / bob"
    assert who("4000:4001") == "4000 4001 4001 / 4000"
    assert who("4000") == "4000 4000 4000 / 4000"


def test_unknown_and_reserved_users(accounts: dict[str, Path], make_guest: Callable[..., Guest]) -> None:
    """No such user or group, ids that the kernel takes for "no change", and the init's own ids end with 126."""
    accounts["/etc/passwd"].write_text(
        "spy:x:65535:100::/:/bin/sh\nsly:x:100:65535::/:/bin/sh\nnone:x:4294967295:1::/:/bin/sh\n"
        "far:x:99999999999:1::/:/bin/sh\nmember:x:3000:3000::/:/bin/sh\n"
    )
    accounts["/etc/group"].write_text("init:x:65535:member\n")
    connection = make_guest(binds=accounts).connect()
    connection.hello()
    users = [
        "nobody-here",
        "spy",
        "sly",
        "member",
        "none",
        "far",
        "65535",
        "1:65535",
        "4294967295",
        "1:4294967295",
        "1:nogroup",
        "1:",
        ":1",
    ]
    for user in users:
        output = connection.run(["id"], user=user)
        assert (output.code, output.out) == (126, b""), (user, output.out)


def test_hostile_account_files(accounts: dict[str, Path], make_guest: Callable[..., Guest]) -> None:
    """Account files may hold anything: the start fails or finds its user, and nothing overflows."""
    passwd, group = accounts["/etc/passwd"], accounts["/etc/group"]
    connection = make_guest(binds=accounts).connect()
    connection.hello()
    for text in (
        b"",
        b"\n" * 1000,
        b":" * 100_000,
        b"\0" * 5000,
        b"ann" * 100_000,
        b"ann:x:1",
        b"ann:x:\xff:1::/:/bin/sh\n",
        os.urandom(65536),
    ):
        passwd.write_bytes(text)
        assert connection.run(["id"], user="ann").code == 126
    passwd.write_bytes(b"x" * 500 + b"\nann:x:2001:2002:" + b"g" * 9000 + b":/" + b"h" * 9000 + b":/bin/sh")
    group.write_bytes(
        b"".join(b"g%d:x:%d:ann\n" % (i, 10_000 + i) for i in range(5000)) + b"x:x:1:" + b"ann," * 100_000
    )
    output = connection.sh("echo $HOME; id -G | wc -w", user="ann")
    assert (output.code, output.out) == (0, b"/\n256\n")


def test_account_file_that_is_no_file(
    accounts: dict[str, Path], make_guest: Callable[..., Guest], tmp_path: Path
) -> None:
    """A pipe in place of /etc/passwd does not block the start."""
    accounts["/etc/passwd"].unlink()
    os.mkfifo(accounts["/etc/passwd"])
    connection = make_guest(binds=accounts).connect()
    connection.hello()
    assert connection.run(["id"], user="ann").code == 126


def test_large_arguments(connection: Connection) -> None:
    """1 MiB of arguments in total, in strings of up to 128 KiB less one byte, reach the program."""
    argv = ["/usr/bin/python3", "-SIc", "import sys; print([len(a) for a in sys.argv[1:]])", *["x" * 131071] * 8]
    assert connection.run(argv).out == f"{[131071] * 8}\n".encode()


def test_too_large_argument_is_126(connection: Connection) -> None:
    """One string beyond the kernel's bound is told as a program that cannot be executed."""
    assert connection.run(["true", "x" * 131072]).code == 126


def test_script_is_descriptor_3(connection: Connection) -> None:
    """A script of 1 MiB is readable from its beginning as descriptor 3, by number and by name."""
    script = b"#" * (1 << 20) + b"\necho $0 $1\n"
    assert connection.run(["sh", "/proc/self/fd/3", "x"], script=script).out == b"/proc/self/fd/3 x\n"
    assert connection.run(["sh", "-c", "wc -c <&3"], script=script).out == f"{len(script)}\n".encode()


def test_merged_stderr(connection: Connection) -> None:
    """With MERGE both go to one stream, in the order they were written."""
    output = connection.sh("echo a; echo b >&2; echo c", flags=FOLLOWED | MERGE)
    assert (output.out, output.err) == (b"a\nb\nc\n", b"")


def test_terminal(connection: Connection) -> None:
    """A pty is the controlling terminal, has the size asked for, and can be resized."""
    handle, _, _ = connection.start(
        "t",
        ["sh", "-c", "stty size; tty; trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.01; done"],
        flags=FOLLOWED | PTY,
        size=(31, 97),
    )
    output = connection.wait_until(handle, b"ready")
    assert output.out.startswith(b"31 97\r\n/dev/pts/")
    connection.request(RESIZE, struct.pack("<IHH", handle, 40, 120))
    assert connection.wait_exit(handle).out.endswith(b"40 120\r\n")
    with pytest.raises(GuestReplyError):
        connection.request(RESIZE, struct.pack("<IHH", handle, 1, 1))


def test_terminal_belongs_to_its_user(connection: Connection) -> None:
    """The user can open the terminal by name, and by /dev/tty."""
    output = connection.sh("stat -c %u $(tty); echo by name > $(tty); echo by tty > /dev/tty", flags=FOLLOWED | PTY)
    assert output.out == b"65534\r\nby name\r\nby tty\r\n"


def test_terminal_output_is_complete(connection: Connection) -> None:
    """What a program printed to its pty right before it ended is there before EXIT."""
    for _ in range(20):
        assert connection.sh("seq 500", flags=FOLLOWED | PTY).out.count(b"\r\n") == 500


def test_limits(connection: Connection) -> None:
    """Limits are set as asked; a hard limit beyond ours is cut to ours; others stay as the init got them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [(resource.RLIMIT_FSIZE, 1000, 2000), (resource.RLIMIT_CPU, 5, 6), (resource.RLIMIT_NPROC, 123, 456)]
    output = connection.run(["cat", "/proc/self/limits"], limits=limits).out.decode()
    rows = {line[:26].strip(): line[26:].split()[:2] for line in output.splitlines()}
    assert rows["Max file size"] == ["1000", "2000"]
    assert rows["Max cpu time"] == ["5", "6"]
    assert rows["Max processes"] == ["123", "456"]
    assert rows["Max open files"] == [str(limit) for limit in hard]
    beyond = [(resource.RLIMIT_NOFILE, hard[1] * 2, hard[1] * 2)]
    rows_beyond = connection.run(["cat", "/proc/self/limits"], limits=beyond).out.decode()
    assert f"Max open files            {hard[1]}" in rows_beyond


def test_file_size_limit_kills(connection: Connection, guest: Guest) -> None:
    """A limit has its effect on the program."""
    limits = [(resource.RLIMIT_FSIZE, 1000, 1000)]
    output = connection.run(["dd", "if=/dev/zero", f"of={guest.work}/f", "bs=4096", "count=1"], limits=limits)
    assert output.code in (-signal.SIGXFSZ, 1) and (guest.work / "f").stat().st_size == 1000


def test_usage(connection: Connection) -> None:
    """CPU time, peak memory and the two times come from the kernel's own account."""
    burn = (
        "import time; a = bytearray(64 << 20); a[::4096] = b'x' * len(a[::4096])\nwhile time.process_time() < 0.3: pass"
    )
    output = connection.run(["/usr/bin/python3", "-SIc", burn])
    assert 250_000 <= output.exit["utime_us"] + output.exit["stime_us"] < 2_000_000
    assert 64 << 10 <= output.exit["maxrss_kib"] < 256 << 10
    assert 0.25e9 <= output.exit["ended_ns"] - output.exit["started_ns"] < 20e9


def test_start_is_idempotent(connection: Connection, guest: Guest) -> None:
    """The same id and body never run twice; another body under the id is refused, now and after the end."""
    body: dict[str, Any] = {"process_id": "once", "argv": ["sh", "-c", f"echo ran >> {guest.work}/log; echo hi"]}
    first = connection.start(**body)
    assert first[2] is False and connection.wait_exit(first[0]).out == b"hi\n"
    connection.outputs.clear()
    assert connection.start(**body) == (first[0], first[1], True)
    assert connection.lookup("once") == (first[0], first[1], True)
    with pytest.raises(GuestReplyError) as caught:
        connection.start("once", ["sh", "-c", "exit 1"])
    assert caught.value.errno == 17
    with pytest.raises(GuestReplyError):
        connection.start(**body, user="")
    with pytest.raises(GuestReplyError) as missing:
        connection.lookup("never")
    assert missing.value.errno == 2
    assert (guest.work / "log").read_text() == "ran\n"


def test_repeated_start_pushes_again(connection: Connection) -> None:
    """A repeated START with FOLLOW gives the output from its beginning, and EXIT, once more."""
    handle, _, _ = connection.start("again", ["echo", "x"])
    connection.wait_exit(handle)
    connection.outputs.clear()
    connection.start("again", ["echo", "x"])
    output = connection.wait_exit(handle)
    assert (output.out, output.code) == (b"x\n", 0)


def test_list(connection: Connection) -> None:
    """Handles ascend from 1; each row tells id, pid and end."""
    handles = [connection.start(f"id-{i}", ["sh", "-c", f"exit {i}"])[0] for i in range(5)]
    for handle in handles:
        connection.wait_exit(handle)
    assert handles == [1, 2, 3, 4, 5]
    body = connection.request(LIST, struct.pack("<I", 3))
    (count,), at, rows = struct.unpack_from("<I", body), 4, []
    for _ in range(count):
        handle, length = struct.unpack_from("<II", body, at)
        name = body[at + 8 : at + 8 + length].decode()
        rows.append((handle, name, *struct.unpack_from("<iBi", body, at + 8 + length)[1:]))
        at += 8 + length + 9
    assert at == len(body)
    assert rows == [(3, "id-2", 1, 2 << 8), (4, "id-3", 1, 3 << 8), (5, "id-4", 1, 4 << 8)]
    assert connection.request(LIST, struct.pack("<I", 6)) == bytes(4)
    assert connection.request(LIST, struct.pack("<I", 0xFFFFFFFF)) == bytes(4)


def test_a_start_needs_a_hello_and_a_leaf(guest: Guest) -> None:
    """Nothing runs before HELLO said where, nor in a platform leaf that was not given."""
    connection = guest.connect()
    with pytest.raises(GuestReplyError) as caught:
        connection.start("a", ["true"])
    assert caught.value.errno == 107
    connection.hello()
    with pytest.raises(GuestReplyError) as no_leaf:
        connection.start("a", ["true"], flags=8)
    assert no_leaf.value.errno == 2
    assert connection.run(["true"], process_id="a").code == 0


def test_many_starts_leak_nothing(connection: Connection, guest: Guest) -> None:
    """After 300 programs the init holds as many descriptors as before."""
    before = guest.descriptors()
    for _ in range(300):
        assert connection.run(["true"]).code == 0
    assert guest.descriptors() == before
    assert connection.ping()["running"] == 0 and connection.ping()["total"] == 300


def test_pipelined_starts(connection: Connection) -> None:
    """Starts sent without waiting for replies are answered each under its tag."""
    tags = [connection.send(START, start_body(f"p{i}", ["echo", str(i)])) for i in range(100)]
    handles = [struct.unpack("<IiB", connection.wait_reply(tag)[1])[0] for tag in tags]
    assert [connection.wait_exit(handle).out for handle in handles] == [f"{i}\n".encode() for i in range(100)]
