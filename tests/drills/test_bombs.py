"""Bombs: a guest that takes all it can get of one thing ends in a way that has a name, and can be used afterwards.

Each runs twice: within narrow limits, where something of the sandbox's own stops it, and with room for all that it asks
for, where nothing does: so it is the limit that is seen. Where it is the supervisor's, with that switched off, too.
"""

from dataclasses import dataclass, field, replace

import pytest

from barchan.errors import SandboxLost
from barchan.model.sandbox import ExecResult
from barchan.sdk.options import CreateOptions, ExecOptions
from barchan.sdk.sandbox import Sandbox
from barchan.testing.profiles import profile_of
from tests.drills.programs import BACKENDS, DrillLab, command, install

pytestmark = pytest.mark.timeout(900)  # a machine boots first
BOMB_S = 120
EAGAIN, EMFILE, ENOSPC, EDQUOT, ENOMEM = 11, 24, 28, 122, 12


@dataclass(frozen=True)
class Bomb:
    """How much it asks for, the limits that stop it, those that don't, and what its end is called.

    `narrow` and `wide` are the sandbox's, `given` and `freely` the program's own.
    """

    what: str
    most: int
    narrow: CreateOptions = field(default_factory=CreateOptions)
    wide: CreateOptions = field(default_factory=CreateOptions)
    given: ExecOptions = field(default_factory=ExecOptions)
    freely: ExecOptions = field(default_factory=ExecOptions)
    errors: tuple[int, ...] = ()
    switch: str = ""


PIDS: CreateOptions = {"pids_max": 64}
MANY: CreateOptions = {"pids_max": 1024, "memory_mib": 1024}  # in gVisor, some 5 MiB for each
BOMBS = (
    Bomb("fork", 150, PIDS, MANY, errors=(EAGAIN,), switch="no-pids-limit"),
    Bomb("zombie", 150, PIDS, MANY, errors=(EAGAIN,), switch="no-pids-limit"),
    Bomb("memory", 400, {"memory_mib": 128}, {"memory_mib": 768}, switch="no-memory-limit"),
    Bomb("disk", 96, {"disk_mib": 64}, {"disk_mib": 512}, errors=(ENOSPC, EDQUOT), switch="no-quota"),
    Bomb("descriptor", 300, given={"rlimits": {"nofile": (128, 128)}}, errors=(EMFILE,)),
    Bomb(
        "pipe",
        100,
        given={"rlimits": {"nofile": (128, 128)}},
        freely={"rlimits": {"nofile": (512, 512)}},
        errors=(EMFILE,),
    ),
    Bomb("output", 64, given={"max_output_bytes": 10_000}, freely={"max_output_bytes": 65 << 20}),
)


def bomb_of(what: str, backend: str) -> Bomb:
    """A machine's disk has room of its own beside what its sandbox may write."""
    bomb = next(bomb for bomb in BOMBS if bomb.what == what)
    return replace(bomb, most=bomb.most + profile_of(backend).disk_spare_mib) if what == "disk" else bomb


def set_off(sandbox: Sandbox, bomb: Bomb, options: ExecOptions) -> ExecResult:
    words = command("bombs", bomb.what, str(bomb.most), "0")
    return install(sandbox).exec(words, cwd="/opt", user="root", timeout_s=BOMB_S, **options)


def was_stopped(bomb: Bomb, result: ExecResult) -> bool:
    """By the limit that it is about, and by no other: the result says so."""
    if bomb.what == "memory":
        return result.oom_killed and result.signal == 9
    if bomb.what == "output":
        return result.ok and result.truncated and result.stderr_bytes == bomb.most << 20
    if not result.ok:
        return False
    got, problem = map(int, result.text.split())
    return problem in bomb.errors and 0 < got < bomb.most


def went_through(bomb: Bomb, result: ExecResult) -> bool:
    """It got all that it asked for, and it was told so."""
    return result.ok and not result.truncated and result.text.split() == [str(bomb.most), "0"]


@pytest.mark.parametrize("what", [bomb.what for bomb in BOMBS])
def test_it_is_stopped_and_named(lab: DrillLab, backend: str, what: str) -> None:
    """The program is told, or its result tells; then the sandbox can be used, and its neighbour never noticed."""
    bomb = bomb_of(what, backend)
    with lab.create(backend=backend) as neighbour, lab.create(**{"backend": backend, **bomb.narrow}) as sandbox:
        result = set_off(sandbox, bomb, bomb.given)
        assert was_stopped(bomb, result), result
        sandbox.process(result.process_id).kill()  # what it has left behind goes on otherwise
        assert sandbox.exec("rm -rf /var/bomb; /bin/true && echo on", user="root").text == "on\n"
        assert (sandbox.stats().oom_kills > 0) is (what == "memory")
        assert neighbour.exec(["true"]).ok
        assert neighbour.stats().oom_kills == 0


@pytest.mark.parametrize("what", [bomb.what for bomb in BOMBS])
def test_with_room_it_is_not_stopped(lab: DrillLab, backend: str, what: str) -> None:
    """The same program, with limits above what it asks for."""
    bomb = bomb_of(what, backend)
    with lab.create(**{"backend": backend, **bomb.wide}) as sandbox:
        result = set_off(sandbox, bomb, bomb.freely)
        assert went_through(bomb, result), result
        assert not was_stopped(bomb, result)


# Where a limit is the supervisor's, its switch takes it away. The others are of the guest's own kernel, and a machine
# is as large as it is: there the wide limits are what shows that something of it stopped the program.
SWITCHED = {
    "container": ("fork", "zombie", "memory", "disk"),
    "function": ("fork", "zombie", "memory", "disk"),
    "gvisor": ("memory", "disk"),
}


@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind in BACKENDS for what in SWITCHED.get(kind, ())])
def test_without_the_protection_it_is_not_stopped(lab: DrillLab, kind: str, what: str) -> None:
    """The same narrow limits, which nothing enforces then."""
    bomb = bomb_of(what, kind)
    with lab.create(bomb.switch, **{"backend": kind, **bomb.narrow}) as sandbox:
        result = set_off(sandbox, bomb, bomb.given)
        assert went_through(bomb, result), result
        assert not was_stopped(bomb, result)


@pytest.mark.parametrize("what", ["inotify", "stream"])
def test_what_is_counted_for_all_ends_and_is_given_back(lab: DrillLab, backend: str, what: str) -> None:
    """Watches and socket buffers, until the kernel says no or the memory is gone: that is the guest's own affair. A
    guest whose kernel needs that memory may be lost by it.
    """
    with lab.create(backend=backend) as neighbour, lab.create(backend=backend, memory_mib=128) as sandbox:
        words = command("bombs", what, "100000", "0")
        is_lost = False
        try:
            result = install(sandbox).exec(words, cwd="/opt", user="root", timeout_s=BOMB_S)
            assert result.oom_killed or (result.ok and int(result.text.split()[1]) != 0), result
        except SandboxLost:
            is_lost = backend != "container"
            assert is_lost
        taken = install(neighbour).exec(command("bombs", what, "50", "0"), cwd="/opt", user="root", timeout_s=BOMB_S)
        assert taken.text == "50 0\n", taken
        assert is_lost or sandbox.exec(["true"]).ok
