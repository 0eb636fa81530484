"""Programs: what they are given, and what is told of their end."""

import asyncio

from barchan.errors import Conflict, InvalidSpec
from barchan.testing.check import check
from barchan.testing.expect import equal, holds, raises
from barchan.testing.lab import Lab, text

# Those blocked and those ignored, without the two that Python ignores by itself.
SIGNALS = """
import signal
own = {signal.SIGPIPE, signal.SIGXFSZ}
ignored = {number for number in range(1, 32) if signal.getsignal(number) == signal.SIG_IGN} - own
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), ignored)
"""


@check()
async def an_exit_code_and_a_signal_are_told(lab: Lab) -> None:
    """128 + n after signal n, 127 for what is not there, 126 for what can't be run; none of it an exception."""
    sandbox = await lab.common()
    equal((await sandbox.exec("exit 3")).exit_code, 3)
    killed = await sandbox.exec("kill -TERM $$")
    equal((killed.exit_code, killed.signal, killed.timed_out, killed.oom_killed), (143, 15, False, False))
    equal((await sandbox.exec(["no-such-program"])).exit_code, 127)
    equal((await sandbox.exec(["/etc/passwd"])).exit_code, 126)


@check()
async def a_string_runs_in_a_shell_and_a_list_as_it_is(lab: Lab) -> None:
    """The shell's words are split and replaced, the list's are not; both run in the same sandbox."""
    sandbox = await lab.common()
    equal(await text(sandbox, "x=5; echo $((x + 1))   end"), "6 end\n")
    equal(await text(sandbox, ["echo", "$HOME;", "a   b", "*"]), "$HOME; a   b *\n")


@check()
async def arguments_arrive_byte_by_byte(lab: Lab) -> None:
    """Empty ones, quotes, new lines, letters of any script; a NUL can't be passed, and is refused."""
    sandbox = await lab.common()
    result = await sandbox.exec(["printf", "%s|", "", "a b", "\n", "'\"\\", "grün \N{SNOWMAN}"])
    equal(result.stdout, "|a b|\n|'\"\\|grün \N{SNOWMAN}|".encode())
    await raises(InvalidSpec, sandbox.exec(["echo", "a\0b"]))


@check()
async def long_arguments_and_scripts_arrive(lab: Lab) -> None:
    """800 KB of arguments, and a shell text of 500 KB, which is more than one argument can have."""
    sandbox = await lab.common()
    argv = ["sh", "-c", "echo $# ${#8}", "x", *["y" * 100_000] * 8]
    equal(await text(sandbox, argv), "8 100000\n")
    equal(await text(sandbox, f"x={'y' * 500_000}; echo ${{#x}}"), "500000\n")


@check()
async def the_environment_is_the_images_the_sandboxes_and_the_programs(lab: Lab) -> None:
    """What a start says goes before what the sandbox says; PATH and HOME are there."""
    sandbox = await lab.create(env={"A": "sandbox", "B": "sandbox"})
    equal(await text(sandbox, 'echo "$A $B $C"', env={"B": "start", "C": "1 2"}), "sandbox start 1 2\n")
    equal(await text(sandbox, 'echo "$A $B $C"'), "sandbox sandbox \n")
    holds("/bin" in await text(sandbox, "echo $PATH"), "PATH leads to programs")
    equal(await text(sandbox, "echo $HOME", user="root"), "/root\n")


@check()
async def the_working_directory_is_what_was_asked_for(lab: Lab) -> None:
    """The sandbox's, unless a start has another; one that is not there is told as a program that can't be run."""
    sandbox = await lab.create(workdir="/usr")
    equal(await text(sandbox, "pwd"), "/usr\n")
    equal(await text(sandbox, "pwd", cwd="/etc"), "/etc\n")
    equal(await text(sandbox, "pwd", cwd="bin/.."), "/usr\n")
    missing = await sandbox.exec(["pwd"], cwd="/no/such/place")
    equal((missing.exit_code, missing.stdout), (126, b""))
    holds(b"cannot enter" in missing.stderr, "the program's stderr says why")


@check()
async def a_program_runs_as_the_user_asked_for(lab: Lab) -> None:
    """By number, with the group asked for; the sandbox's own otherwise; one that is unknown runs nothing."""
    sandbox = await lab.create(user="1234:2345")
    who = "echo $(id -u) $(id -g)"
    equal(await text(sandbox, who), "1234 2345\n")
    equal(await text(sandbox, who, user="root"), "0 0\n")
    equal(await text(sandbox, who, user="4000:4001"), "4000 4001\n")
    unknown = await sandbox.exec(who, user="nobody-of-this-name")
    equal((unknown.exit_code, unknown.stdout), (126, b""))


@check()
async def no_program_runs_as_the_platforms_users(lab: Lab) -> None:
    """The ids of the init and of file operations belong to nobody in the guest, not for root either."""
    sandbox = await lab.common()
    for user in ("65535", "65535:0", "0:65535"):
        result = await sandbox.exec(["id"], user=user)
        equal((result.exit_code, result.stdout), (126, b""), f"a program as {user}")


@check()
async def a_program_begins_clean(lab: Lab) -> None:
    """Three descriptors, no ignored signals, the usual umask, a session of its own, no privileges to gain."""
    sandbox = await lab.common()
    equal((await text(sandbox, ["ls", "/proc/self/fd"])).split()[:3], ["0", "1", "2"])
    equal(len((await text(sandbox, ["ls", "/proc/self/fd"])).split()), 4, "descriptors, with that of ls itself")
    equal(await text(sandbox, "umask"), "0022\n")
    equal(await text(sandbox, ["python3", "-c", SIGNALS]), "set() set()\n", "signals blocked and ignored")


@check()
async def limits_of_a_program_are_set(lab: Lab) -> None:
    """Those asked for hold for it alone; a name that is no limit is refused."""
    sandbox = await lab.common()
    equal(await text(sandbox, "ulimit -n", rlimits={"nofile": (64, 64)}), "64\n")
    holds(await text(sandbox, "ulimit -n") != "64\n", "the next program has its usual limit")
    await raises(InvalidSpec, sandbox.exec("true", rlimits={"patience": (1, 1)}))


@check()
async def a_repeated_start_runs_once(lab: Lab) -> None:
    """The same process id is the same program, with the same result; for another program it is a conflict."""
    sandbox = await lab.create()
    first = await sandbox.exec("echo ran >> /tmp/runs; cat /tmp/runs", process_id="step-7")
    again = await sandbox.exec("echo ran >> /tmp/runs; cat /tmp/runs", process_id="step-7")
    equal((first.stdout, again.stdout), (b"ran\n", b"ran\n"))
    await raises(Conflict, sandbox.exec("true", process_id="step-7"))


@check()
async def what_a_program_used_is_told(lab: Lab) -> None:
    """CPU seconds, wall seconds and the most memory it had, as its kernel counts them."""
    sandbox = await lab.common()
    busy = await sandbox.exec("i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done")
    holds(busy.usage.user_s + busy.usage.system_s > 0.01, f"CPU time is counted: {busy.usage}")
    holds(busy.usage.max_rss_kib > 100, f"memory is counted: {busy.usage}")
    slow = await sandbox.exec("sleep 1")
    holds(slow.usage.wall_s >= 0.99, f"wall time is counted: {slow.usage}")
    holds(slow.usage.user_s + slow.usage.system_s < 0.9, f"sleeping is no CPU time: {slow.usage}")


@check()
async def programs_share_files_and_see_each_other(lab: Lab) -> None:
    """One finds the file of another that has ended, and a process that still runs."""
    sandbox = await lab.create()
    await text(sandbox, "echo kept > /tmp/kept; mkdir -p /tmp/a/b")
    sleeper = await sandbox.start("echo $$; exec sleep 300")
    async for _, _, data in sleeper.output():
        pid = int(data)
        break
    equal(await text(sandbox, f"cat /tmp/kept; kill -0 {pid} && echo there"), "kept\nthere\n")
    listed = {info.process_id: info.running for info in await sandbox.processes()}
    equal(listed.get(sleeper.id), True, "whether the list has it as running")


@check()
async def a_hundred_programs_one_after_the_other_leave_nothing(lab: Lab) -> None:
    """Neither processes nor zombies, nor descriptors of the init's that a later program would miss."""
    sandbox = await lab.create()
    for number in range(100):
        equal(await text(sandbox, ["echo", str(number)]), f"{number}\n")
    zombies = "grep -ls '^State:.Z' /proc/[0-9]*/status | wc -l"
    equal(await text(sandbox, zombies), "0\n", "zombies")
    equal(len((await text(sandbox, ["ls", "/proc/self/fd"])).split()), 4, "descriptors of the next program")


@check()
async def twenty_programs_at_once_keep_apart(lab: Lab) -> None:
    """Each has its own output, input, environment and exit code."""
    sandbox = await lab.common()
    results = await asyncio.gather(
        *(
            sandbox.exec(f'read x; echo "$x $N"; exit {number}', stdin=f"in{number}\n", env={"N": f"env{number}"})
            for number in range(20)
        )
    )
    equal([result.text for result in results], [f"in{number} env{number}\n" for number in range(20)])
    equal([result.exit_code for result in results], list(range(20)))
