"""What a guest may use is bounded, reaching a bound harms nobody else, and the platform still gets through."""

import signal
import time
from collections.abc import Callable

import pytest

from barchan.errors import BarchanError
from barchan.sdk.sandbox import Process, Sandbox
from tests.security.lab import Lab, command, run_program, wait_until

MIB = 1 << 20
EDQUOT, ENOSPC = 122, 28
ANSWER_S = 5.0


class TestDisk:
    """Promise 8."""

    @pytest.mark.parametrize("how", ["big", "small"])
    def test_files_end_at_the_limit_and_cost_no_memory(self, lab: Lab, how: str) -> None:
        """A guest with more disk than memory fills it: EDQUOT at the limit, nothing is killed, and room can be made."""
        with lab.create(memory_mib=64, disk_mib=32) as sandbox:
            result = run_program(sandbox, "disk", how)
            assert result.ok, result
            written, error = map(int, result.text.split())
            assert error in (EDQUOT, ENOSPC)
            assert MIB < written <= 33 * MIB
            assert sandbox.stats().oom_kills == 0
            assert sandbox.exec("rm -r /var/big /var/small; echo again > /var/again", user="root").stderr == (
                b"rm: cannot remove '/var/%s': No such file or directory\n" % (b"small" if how == "big" else b"big")
            )

    @pytest.mark.parametrize("how", ["big", "small"])
    def test_without_quota_they_do_not(self, lab: Lab, how: str) -> None:
        """The same program writes all it wants."""
        with lab.create("no-quota", memory_mib=64, disk_mib=32) as sandbox:
            assert run_program(sandbox, "disk", how).text.split()[1] == "0"

    def test_shared_memory_is_bounded_and_charged(self, lab: Lab) -> None:
        """Filling /dev/shm ends with ENOSPC before the memory limit does worse."""
        with lab.create(memory_mib=64) as sandbox:
            result = sandbox.exec("head -c 100M /dev/zero > /dev/shm/big", user="root")
            assert b"No space left" in result.stderr
            assert sandbox.stats().oom_kills == 0


EAT = "block = b'x' * (200 << 20); print(len(block))"


class TestMemory:
    """Promise 9."""

    def test_beyond_the_limit_kills_in_the_guest_with_evidence(self, lab: Lab) -> None:
        """The kernel's counter shows it; the neighbour and the sandbox itself go on."""
        with lab.create(memory_mib=64) as sandbox, lab.create(memory_mib=64) as neighbour:
            bystander = neighbour.start(["sleep", "60"])
            result = sandbox.exec(["python3", "-c", EAT])
            assert (result.signal, result.oom_killed) == (signal.SIGKILL, True)
            assert sandbox.stats().oom_kills >= 1
            assert sandbox.exec(["true"]).ok
            assert neighbour.stats().oom_kills == 0
            assert bystander.info().running

    def test_without_limit_it_does_not(self, lab: Lab) -> None:
        """The same program has all the memory it wants."""
        with lab.create("no-memory-limit", memory_mib=64) as sandbox:
            assert sandbox.exec(["python3", "-c", EAT]).text == f"{200 << 20}\n"


class TestProcesses:
    """Promise 10."""

    def test_forks_end_at_the_limit(self, lab: Lab) -> None:
        """A guest gets no more processes than it may have."""
        with lab.create(pids_max=40) as sandbox:
            assert int(run_program(sandbox, "forks", "300").text) < 40

    def test_without_limit_they_do_not(self, lab: Lab) -> None:
        """The same program gets all the processes it wants."""
        with lab.create("no-pids-limit", pids_max=40) as sandbox:
            assert run_program(sandbox, "forks", "300").text == "300\n"

    def test_a_fork_bomb_leaves_a_usable_sandbox(self, lab: Lab) -> None:
        """It stays in its limit while it lasts, its neighbour notices nothing, and nothing is left after its time."""
        with lab.create(pids_max=64, memory_mib=128) as sandbox, lab.create() as neighbour:
            bomb = sandbox.start("b() { b | b & }; b; sleep 60", timeout_s=5)
            wait_until(lambda: sandbox.stats().pids >= 32, "the bomb goes off")
            assert sandbox.stats().pids <= 64
            assert neighbour.exec(["true"], timeout_s=ANSWER_S).ok
            assert bomb.wait(30).timed_out
            wait_until(lambda: sandbox.stats().pids == 0, "nothing is left of it")
            assert sandbox.exec(["true"]).ok


def exhausted(sandbox: Sandbox) -> Process:
    """Fill a sandbox, and show that a guest has nothing left to start anything with."""
    hog = sandbox.start(command("exhaust"), cwd="/opt", user="root")
    assert next(iter(hog.output(quiet_timeout_s=30)))[2] == b"full\n"
    assert sandbox.stats().pids == 40
    assert sandbox.stats().memory_bytes > 60 * MIB
    return hog


class TestPlatform:
    """Promise 11."""

    def test_it_gets_through_to_an_exhausted_guest(self, lab: Lab) -> None:
        """With memory and processes used up, each answers within seconds: read, write, platform exec, signal, kill."""
        with lab.create(memory_mib=64, pids_max=40) as sandbox:
            hog = exhausted(sandbox)
            assert sandbox.exec(["sh", "-c", "/bin/true; /bin/true"], timeout_s=10).exit_code != 0
            calls: list[Callable[[], object]] = [
                lambda: sandbox.files.read("/etc/passwd", timeout_s=ANSWER_S),
                lambda: sandbox.files.write("/tmp/written", b"x", timeout_s=ANSWER_S),
                lambda: sandbox.exec(["/bin/true"], platform=True, timeout_s=ANSWER_S).check(),
                lambda: hog.signal("CONT"),
                hog.kill,
            ]
            for call in calls:
                started = time.monotonic()
                assert call() != 0
                assert time.monotonic() - started < ANSWER_S
            wait_until(lambda: sandbox.stats().pids == 0, "all of it is dead")
            assert sandbox.exec(["true"]).ok

    def test_without_its_own_leaf_the_init_is_as_helpless(self, lab: Lab) -> None:
        """An init that shares the guest's limits can't even start a file read."""
        with lab.create("init-in-guest-leaf", memory_mib=64, pids_max=40) as sandbox:
            exhausted(sandbox)
            with pytest.raises(BarchanError):
                sandbox.files.read("/etc/passwd", timeout_s=ANSWER_S)


def beat(sandbox: Sandbox) -> int:
    return int(sandbox.files.as_user("root").read("/tmp/beat"))


def goes_on(sandbox: Sandbox) -> bool:
    before = beat(sandbox)
    time.sleep(0.5)
    return beat(sandbox) != before


class TestEnds:
    """Promise 13."""

    def test_a_time_out_kills_daemons(self, lab: Lab) -> None:
        """Double fork, own session, no descriptors, no signals, a new process every 10 ms: it does not help."""
        with lab.create() as sandbox:
            result = run_program(sandbox, "daemon", timeout_s=2)
            assert result.timed_out
            assert beat(sandbox) > 10
            assert not goes_on(sandbox)
            assert sandbox.stats().pids == 0

    def test_a_kill_kills_daemons(self, lab: Lab) -> None:
        """As the time-out does."""
        with lab.create() as sandbox:
            process = sandbox.start(command("daemon"), cwd="/opt", user="root")
            wait_until(lambda: sandbox.files.exists("/tmp/beat"), "the daemon runs")
            assert process.kill() >= 1
            wait_until(lambda: sandbox.stats().pids == 0, "all of it is dead")
            assert not goes_on(sandbox)

    def test_without_a_cgroup_of_its_own_a_daemon_survives(self, lab: Lab) -> None:
        """By session, group and descent it can't be found."""
        with lab.create("no-exec-cgroup") as sandbox:
            assert run_program(sandbox, "daemon", timeout_s=2).timed_out
            assert goes_on(sandbox)
