"""Where hostile programs are run: sandboxes of a normal node, and of nodes that have a protection switched off."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

import barchan
from barchan.model.sandbox import ExecResult
from barchan.sdk.options import CreateOptions
from barchan.sdk.sandbox import Sandbox
from tests.nodes import NodeProcess

GUEST = Path(__file__).parent / "guest"
PACKAGE = "tests.security.guest"
PROGRAM_S = 90.0


class Lab:
    """Nodes by what they are weakened by, each started when it is first asked for, and one sandbox of each to share.

    Args:
        make_node: Makes a node, not yet started; whoever made the maker ends it.
    """

    def __init__(self, make_node: Callable[[], NodeProcess]) -> None:
        self._make_node = make_node
        self._nodes: dict[tuple[str, ...], NodeProcess] = {}
        self._clients: dict[tuple[str, ...], barchan.Client] = {}
        self._shared: dict[tuple[str, ...], Sandbox] = {}

    def node(self, *switches: str) -> NodeProcess:
        if switches not in self._nodes:
            node = self._make_node()
            node.start(*(word for switch in switches for word in ("--weaken", switch)))
            self._nodes[switches] = node
        return self._nodes[switches]

    def client(self, *switches: str) -> barchan.Client:
        if switches not in self._clients:
            self._clients[switches] = barchan.connect(state_dir=self.node(*switches).state_dir)
        return self._clients[switches]

    def create(self, *switches: str, **options: Unpack[CreateOptions]) -> Sandbox:
        """A sandbox of its own for the caller, who ends it, with the hostile programs in it."""
        sandbox = self.client(*switches).create("debian", **options)
        install(sandbox)
        return sandbox

    def shared(self, *switches: str) -> Sandbox:
        """A sandbox for programs that leave it usable."""
        if switches not in self._shared:
            self._shared[switches] = self.create(*switches, memory_mib=256)
        return self._shared[switches]

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def install(sandbox: Sandbox) -> None:
    files = sandbox.files.as_user("root")
    for program in GUEST.glob("*.py"):
        files.write(f"/opt/{PACKAGE.replace('.', '/')}/{program.name}", program.read_bytes())


def command(program: str, *arguments: str) -> list[str]:
    return ["python3", "-B", "-m", f"{PACKAGE}.{program}", *arguments]


def run_program(
    sandbox: Sandbox, program: str, *arguments: str, user: str = "root", timeout_s: float = PROGRAM_S
) -> ExecResult:
    return sandbox.exec(command(program, *arguments), cwd="/opt", user=user, timeout_s=timeout_s)


def findings(sandbox: Sandbox, program: str, *arguments: str, user: str = "root") -> dict[str, str]:
    """What worked of a program's attempts, with the evidence. A program that did not get through proves nothing."""
    result = run_program(sandbox, program, *arguments, user=user)
    assert (result.exit_code, result.timed_out) == (0, False), result.error_text
    *found, last = [json.loads(line) for line in result.text.splitlines()]
    assert last["attempts"] > 0
    return {line["attempt"]: line["evidence"] for line in found}


def host_pids(sandbox: Sandbox) -> list[int]:
    """What runs in a sandbox, the init excepted, as the host numbers it: read from its cgroup."""
    leaves = [path for path in Path("/sys/fs/cgroup").rglob(f"{sandbox.id}/guest") if path.is_dir()]
    assert len(leaves) == 1, leaves
    return [int(pid) for file in leaves[0].rglob("cgroup.procs") for pid in file.read_text().split()]


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)
