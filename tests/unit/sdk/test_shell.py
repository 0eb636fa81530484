"""The shell that keeps its state, and the terminal, with real shells below the fake node."""

import asyncio
import pickle
import time
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec, LocalProtocolError, ReadTimeout
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.aio.shell_streams import MarkedStream
from barchan.sdk.aio.terminal import Screen
from barchan.sdk.headtail import HeadTail
from tests.unit.sdk.fake_node import FakeNode


async def test_directory_variables_and_functions_stay(sandbox: AsyncSandbox) -> None:
    """What one command sets, the next one sees, the last exit code included."""
    async with await sandbox.shell() as shell:
        await shell.run("cd /; x='a b'; f() { echo \"f:$1:$x\"; }; export Y=z")
        result = await shell.run("pwd; f 1; sh -c 'echo $Y'; false")
        assert (result.exit_code, result.stdout, result.stderr) == (1, b"/\nf:1:a b\nz\n", b"")
        assert (await shell.run("echo $?")).text == "1\n"
        assert (await shell.run("echo $?")).text == "0\n"


async def test_output_is_exact(sandbox: AsyncSandbox) -> None:
    """No newline is added or lost, both streams are apart, bytes that are no text come through."""
    async with await sandbox.shell() as shell:
        assert (await shell.run("printf 'no newline'")).stdout == b"no newline"
        assert (await shell.run("printf '\\377\\000\\n' ; printf err >&2")).stdout == b"\xff\x00\n"
        result = await shell.run("printf 'it'\"'\"'s\\n'; echo two\necho three >&2")
        assert (result.stdout, result.stderr) == (b"it's\ntwo\n", b"three\n")
        assert (await shell.run("")).exit_code == 0


async def test_commands_have_an_empty_stdin(sandbox: AsyncSandbox) -> None:
    """A command that reads gets the end, not the text of the next command."""
    async with await sandbox.shell() as shell:
        assert (await shell.run("cat; echo $?", timeout_s=10)).text == "0\n"


async def test_redirections_of_the_shell_itself_stay_and_do_no_harm(sandbox: AsyncSandbox) -> None:
    """After `exec >file` commands write there, and results still come."""
    async with await sandbox.shell() as shell:
        assert (await shell.run("exec 5>&1 >kept; echo in file", timeout_s=10)).text == ""
        assert (await shell.run("exec >&5; cat kept", timeout_s=10)).text == "in file\n"


async def test_tracing_is_not_mistaken_for_the_end(sandbox: AsyncSandbox) -> None:
    """With `set -x` the shell prints what it runs; results stay right."""
    async with await sandbox.shell() as shell:
        await shell.run("set -x", timeout_s=10)
        assert (await shell.run("(exit 4)", timeout_s=10)).exit_code == 4
        assert (await shell.run("echo x", timeout_s=10)).text == "x\n"


async def test_a_syntax_error_is_a_result(sandbox: AsyncSandbox) -> None:
    """A command that can't be parsed fails alone."""
    async with await sandbox.shell() as shell:
        assert (await shell.run("x=1; if", timeout_s=10)).exit_code != 0
        result = await shell.run("echo 'unclosed", timeout_s=10)
        assert result.exit_code != 0 and b"matching" in result.stderr
        assert (await shell.run("echo on", timeout_s=10)).text == "on\n"


async def test_a_timeout_keeps_the_shell(sandbox: AsyncSandbox) -> None:
    """The command is killed and told as timed out with its partial output; variables are still there."""
    async with await sandbox.shell() as shell:
        await shell.run("x=kept")
        result = await shell.run("echo before; sleep 300", timeout_s=0.5)
        assert (result.timed_out, result.restarted, result.exit_code, result.text) == (True, False, 137, "before\n")
        assert (await shell.run("echo $x")).text == "kept\n"


async def test_silence_is_a_timeout_on_request(sandbox: AsyncSandbox) -> None:
    """idle_timeout_s counts from the last output, not from the start."""
    async with await sandbox.shell() as shell:
        result = await shell.run("for i in 1 2 3 4; do echo $i; sleep 0.3; done; sleep 300", idle_timeout_s=0.8)
        assert (result.timed_out, result.text) == (True, "1\n2\n3\n4\n")


async def test_a_shell_that_does_not_come_back_is_replaced(sandbox: AsyncSandbox) -> None:
    """A loop in the shell itself survives the kill of its children: then the shell goes, and the result says so."""
    async with await sandbox.shell() as shell:
        await shell.run("x=kept")
        result = await shell.run("echo in; while :; do :; done", timeout_s=0.3)
        assert (result.timed_out, result.restarted, result.text) == (True, True, "in\n")
        again = await shell.run("echo ${x-unset}")
        assert (again.text, again.restarted) == ("unset\n", False)


async def test_exit_ends_the_shell_with_its_code(sandbox: AsyncSandbox) -> None:
    """`exit` is told with its code although a background child holds the pipes; the next command has a new shell."""
    async with await sandbox.shell() as shell:
        result = await shell.run("echo bye; sleep 300 & exit 5", timeout_s=20)
        assert (result.exit_code, result.text, result.restarted, result.timed_out) == (5, "bye\n", True, False)
        assert (await shell.run("echo new")).text == "new\n"


async def test_a_shell_killed_between_commands_is_told(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """When the shell died meanwhile, the next command runs in a new one and says so."""
    async with await sandbox.shell() as shell:
        assert shell._process is not None and shell._reader is not None
        await shell._process.kill()
        while not shell._reader.done():
            await asyncio.sleep(0.01)
        result = await shell.run("echo here")
        assert (result.text, result.restarted) == ("here\n", True)


async def test_a_shell_whose_output_can_not_be_read_for_a_while_goes_on(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """The way to it was lost between two commands, for longer than anybody asks again: what was set is there still, and
    what was written meanwhile comes with the next command.
    """
    async with await sandbox.shell() as shell:
        await shell.run("x=kept; (sleep 0.3; echo late) & true", timeout_s=10)
        node.output_cut_bytes, node.errors["output"] = 1, ReadTimeout("the node does not answer")
        assert shell._reader is not None
        while not shell._reader.done():
            await asyncio.sleep(0.01)
        node.output_cut_bytes = None
        del node.errors["output"]
        result = await shell.run("wait; echo $x", timeout_s=10)
        assert (sorted(result.text.split()), result.restarted) == (["kept", "late"], False)


async def test_background_output_comes_with_the_next_command(sandbox: AsyncSandbox) -> None:
    """What a background job writes between two commands is not lost."""
    async with await sandbox.shell() as shell:
        assert (await shell.run("(sleep 0.3; echo late) & echo now")).text == "now\n"
        await asyncio.sleep(0.6)
        assert (await shell.run("echo next")).text == "late\nnext\n"


async def test_long_output_keeps_head_and_tail(sandbox: AsyncSandbox) -> None:
    """Beyond the bound the middle is left out, and the result says so."""
    async with await sandbox.shell(max_output_bytes=1000) as shell:
        result = await shell.run("seq 1 100000")
        assert result.truncated and len(result.stdout) == 1000
        assert result.stdout.startswith(b"1\n2\n") and result.stdout.endswith(b"99999\n100000\n")
        assert not (await shell.run("echo short")).truncated


@pytest.mark.timeout(20)
async def test_cancelling_kills_the_command_and_keeps_the_shell(node: FakeNode, sandbox: AsyncSandbox) -> None:
    """When the cancellation is seen the command is dead; the shell answers the next one."""
    async with await sandbox.shell() as shell:
        await shell.run("x=kept")
        call = asyncio.ensure_future(shell.run("sleep 300"))
        process = next(iter(node.processes.values()))
        while len(process.pids()) < 2:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while len(process.pids()) > 1:
            await asyncio.sleep(0.01)
        assert (await shell.run("echo $x")).text == "kept\n"


async def test_commands_take_turns(sandbox: AsyncSandbox) -> None:
    """Commands given at once run one after the other."""
    async with await sandbox.shell() as shell:
        results = await asyncio.gather(*(shell.run(f"echo {n}; sleep 0.05; echo {n}") for n in range(4)))
        assert [result.text for result in results] == [f"{n}\n{n}\n" for n in range(4)]


async def test_misuse_is_refused(sandbox: AsyncSandbox) -> None:
    """NUL can't be in a command; a closed shell runs nothing."""
    shell = await sandbox.shell()
    with pytest.raises(InvalidSpec):
        await shell.run("echo \0")
    await shell.close()
    with pytest.raises(LocalProtocolError):
        await shell.run("echo")


def test_a_mark_is_found_wherever_it_is_cut() -> None:
    """The mark and its number are found for every way in which the stream is cut into pieces."""
    data = b"before MARK x\nMARK 7\nafter"
    for cut in range(len(data)):
        stream = MarkedStream(b"MARK", HeadTail(100), 100)
        stream.feed(data[:cut])
        stream.feed(data[cut:])
        assert (stream.code, stream.content(), stream.after.content()) == (
            7,
            (b"before MARK x\n", False),
            (b"after", False),
        )


@pytest.mark.parametrize("bytes_max", [0, 1, 2, 5, 10, 11, 100])
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_head_and_tail(bytes_max: int, piece: int) -> None:
    """Exactly the first half and the last half of the bound are kept, however the bytes come."""
    data = bytes(range(11))
    kept = HeadTail(bytes_max)
    for start in range(0, len(data), piece):
        kept.feed(data[start : start + piece])
    head = (bytes_max + 1) // 2
    tail = bytes_max - head
    expected = data if bytes_max >= 11 else data[:head] + data[11 - tail :]
    assert kept.content() == (expected, bytes_max < 11)


async def test_a_terminal_shows_what_was_drawn(sandbox: AsyncSandbox) -> None:
    """What is typed runs, the screen is given when it is quiet, and the program sees the size."""
    async with await sandbox.terminal(10, 40, command=["sh"]) as terminal:
        await terminal.send("stty size; printf 'a\\033[3;5Hb'\n")
        rows = await terminal.screen(settle_s=0.3)
        assert len(rows) == 10
        assert any("10 40" in row for row in rows)
        assert rows[2][4] == "b"
        await terminal.resize(20, 50)
        await terminal.send("clear; stty size\n")
        assert any("20 50" in row for row in await terminal.screen(settle_s=0.3))


async def test_a_terminal_answers_where_the_cursor_is(sandbox: AsyncSandbox) -> None:
    """Programs that ask the terminal and wait for its answer get one."""
    ask = "stty raw -echo; printf '\\033[6n'; dd bs=1 count=6 2>/dev/null | od -An -c; stty sane; sleep 1"
    async with await sandbox.terminal(24, 80, command=ask) as terminal:
        deadline = time.monotonic() + 20
        while "R" not in (text := "".join(await terminal.screen())) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert text.split() == ["033", "[", "1", ";", "1", "R"]


async def test_a_busy_terminal_is_given_as_it_is(sandbox: AsyncSandbox) -> None:
    """A program that never stops drawing can't hold up the caller."""
    async with await sandbox.terminal(command="while :; do echo busy; sleep 0.02; done") as terminal:
        assert "busy" in await terminal.screen(settle_s=0.2, timeout_s=4)


def test_sequences_that_make_no_sense_do_no_harm() -> None:
    """The screen goes on after input that its parser stumbles over."""
    screen = Screen(5, 20)
    for junk in (b"\x1b[?1;2X", b"\x1b[>4;2m", b"\x1b[1;2;3n", b"\xff\xfe\x1b[", b"\xcc\x81", b"\x1b[99999999L"):
        screen.feed(junk)
    screen.feed(b"\x1bc\x1b[Hfine")
    assert screen.rows() == ["fine", "", "", "", ""]


async def test_a_shell_that_does_not_start_says_why(sandbox: AsyncSandbox) -> None:
    """As an error with its own words, when it is opened or at the first command; not as a broken pipe."""
    with pytest.raises(InvalidSpec, match=r"the shell did not start: .*not found"):
        async with await sandbox.shell(env={"PATH": "/nonexistent"}) as shell:
            await shell.run("true")


async def test_the_first_command_may_end_the_shell(sandbox: AsyncSandbox) -> None:
    """That is no failed start, whatever it says and whichever code it ends with."""
    async with await sandbox.shell() as shell:
        result = await shell.run("echo cannot enter >&2; exit 126")
        assert (result.exit_code, result.stderr, result.restarted) == (126, b"cannot enter\n", True)


async def test_a_pickled_shell_goes_on_where_it_stood(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    """Directory, variables, the last exit code; what a background job wrote since is the next command's, once."""
    shell = await sandbox.shell()
    waiting = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; for i in 1 2 3; do echo late $i; done"
    await shell.run(f"cd /; x=kept; ({waiting}) & false", timeout_s=10)
    assert (await shell.run("sleep 0.1")).exit_code == 0
    await shell.run("false")
    other = pickle.loads(pickle.dumps(shell))
    (tmp_path / "go").touch()
    result = await other.run("echo $?; wait; echo $x; pwd", timeout_s=10)
    assert (result.restarted, sorted(result.text.splitlines())) == (
        False,
        sorted(["1", "kept", "/", "late 1", "late 2", "late 3"]),
    )
    assert (await other.run("echo next")).text == "next\n"
    await other.close()


async def test_a_pickled_shell_that_has_ended_is_replaced(sandbox: AsyncSandbox) -> None:
    """The next command has a new shell, and says so; so it does when the shell was never used."""
    shell = await sandbox.shell()
    unused = pickle.loads(pickle.dumps(shell))
    assert (await unused.run("echo new")).text == "new\n"
    await unused.close()
    await shell.run("x=1")
    other = pickle.loads(pickle.dumps(shell))
    await shell.close()
    assert shell.point is not None
    await sandbox.process(shell.point.process_id).wait(10)
    result = await other.run('echo "[$x]"', timeout_s=10)
    assert (result.restarted, result.text) == (True, "[]\n")
    await other.close()
