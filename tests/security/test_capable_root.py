"""A sandbox whose root is capable: what its root may do, and that this is all."""

import os
from collections.abc import Iterator

import pytest

from barchan.sdk.sandbox import Sandbox
from tests.security.lab import Lab, findings
from tests.security.test_operations import ATTACK

CAPABILITIES = 0x800400DB  # CHOWN DAC_OVERRIDE FOWNER FSETID SETGID SETUID SYS_CHROOT SETFCAP
RESERVED = (65533, 65535)  # the ids of file operations and of the init
FOUND = {
    "capabilities": {"has one", "bounding set", "capset", "chroot", "chown", "setuid", "file capabilities"},
    "devices": set[str](),
    "init": {"list socket dir", "group of the init"},
    "kernel_calls": set[str](),
    "proc_files": {"writable in /proc"},  # its own `mounts`, which has nothing to write to
    "processes": set[str](),
}
BECOME = """
import ctypes, os, sys
libc, reserved = ctypes.CDLL(None, use_errno=True), [int(word) for word in sys.argv[1:]]
calls = [
    (name, [uid if place == at else 0 for place in range(count)])
    for name, count in (("setuid", 1), ("setreuid", 2), ("setresuid", 3), ("setfsuid", 1))
    for at in range(count)
    for uid in (*reserved, reserved[0] + (1 << 32))
]
for name, arguments in calls:
    if os.fork() == 0:
        getattr(libc, name)(*[ctypes.c_ulong(argument) for argument in arguments])
        mine = open("/proc/self/status").read().split("Uid:")[1].split("\\n")[0].split()
        print(name, arguments, mine) if set(mine) & set(sys.argv[1:]) else None
        sys.stdout.flush()
        os._exit(0)
    os.wait()
print(len(calls), "tried")
"""


@pytest.fixture(scope="module")
def capable(lab: Lab) -> Iterator[Sandbox]:
    with lab.create(memory_mib=256, root="capable") as sandbox:
        yield sandbox


def said(sandbox: Sandbox, command: str, user: str = "root") -> str:
    result = sandbox.exec(command, user=user)
    assert result.ok, result.error_text
    return result.text.strip()


class TestWhatRootMay:
    """Root has power over the files and users of its own sandbox."""

    def test_it_has_these_capabilities_and_no_others(self, capable: Sandbox) -> None:
        """In every set that counts, also after an exec; nothing can be inherited or raised."""
        for command in ("grep Cap /proc/self/status", "exec grep Cap /proc/self/status"):
            rows = dict(line.split(":\t") for line in said(capable, command).splitlines())
            assert {name: int(value, 16) for name, value in rows.items()} == {
                "CapInh": 0,
                "CapPrm": CAPABILITIES,
                "CapEff": CAPABILITIES,
                "CapBnd": CAPABILITIES,
                "CapAmb": 0,
            }

    def test_files_of_others_are_its_own(self, capable: Sandbox) -> None:
        """It reads, gives away and changes what is another user's; so do file operations for it."""
        said(capable, "mkdir -m 700 /home/agent/closed && chmod 700 /home/agent/closed", user="agent")
        said(capable, "touch /srv/given && chown agent:agent /srv/given && chmod 600 /srv/given")
        assert said(capable, "stat -c %U:%G:%a /srv/given", user="agent") == "agent:agent:600"
        files = capable.files.as_user("root")
        files.write("/home/agent/closed/note", b"root was here")
        assert files.read("/home/agent/closed/note") == b"root was here"

    def test_it_becomes_another_user_who_has_nothing(self, capable: Sandbox) -> None:
        """By su as by the call itself; what it was as root is gone with that, for good."""
        look = "id -u; grep -E 'Cap(Prm|Eff|Amb)' /proc/self/status"
        become = "import os; os.setgroups([]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)"
        become += f"; os.system({look!r})"
        for command in (["python3", "-c", become], ["su", "agent", "-c", look]):
            result = capable.exec(command, user="root")
            none = "".join(f"{name}:\t{0:016x}\n" for name in ("CapPrm", "CapEff", "CapAmb"))
            assert (result.text, result.error_text) == (f"1000\n{none}", "")

    def test_it_changes_its_root_directory(self, capable: Sandbox) -> None:
        """As installers do that fill a tree."""
        assert said(capable, "chroot / id -u") == "0"


class TestWhatItMayNot:
    """The rest of the promises hold as they do for a plain root."""

    @pytest.mark.parametrize("program", sorted(FOUND))
    def test_no_other_attempt_works(self, capable: Sandbox, program: str) -> None:
        """Beyond what it is given: no mount, device, trace, limit, and nothing of the init's."""
        arguments = (str(os.getpid()),) if program == "processes" else ()
        assert set(findings(capable, program, *arguments)) == FOUND[program]
        assert capable.exec(["true"]).ok

    @pytest.mark.parametrize("program", sorted(FOUND))
    def test_its_users_have_nothing(self, capable: Sandbox, program: str) -> None:
        """A bounding set is no capability, and there is no way to one."""
        arguments = (str(os.getpid()),) if program == "processes" else ()
        found = set(findings(capable, program, *arguments, user="agent"))
        assert found == ({"has one", "bounding set"} if program == "capabilities" else set())

    def test_the_platforms_ids_stay_the_platforms(self, capable: Sandbox) -> None:
        """Root becomes anybody but the init and file operations, whatever call and argument it tries."""
        told = capable.exec(["python3", "-c", BECOME, *map(str, RESERVED)], user="root").check().text
        assert told.splitlines() == ["21 tried"]

    def test_a_file_operation_can_not_be_ended(self, capable: Sandbox) -> None:
        """One that runs for root is another's process to it: no signal, no limit."""
        with capable.files.as_user("root").watch("/tmp"):
            result = capable.exec(["python3", "-c", ATTACK], user="root")
            assert result.text == "['Operation not permitted']\n", result.error_text
            assert findings(capable, "init").keys() == FOUND["init"]
