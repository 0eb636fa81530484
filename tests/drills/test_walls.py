"""What a guest's root can't see or reach: the host's processes, files, network, kernel, other sandboxes, the platform.

Three ways to run the same program: on the host's baits, where it must find nothing; on the same baits laid in its own
sandbox, where it must find all that can be laid there, so that it is known to look; and, for containers, with a
protection switched off.
"""

import json
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from barchan.sdk.sandbox import Sandbox
from tests.drills.programs import BACKENDS, DrillLab, command, install
from tests.nodes import NodeProcess

pytestmark = pytest.mark.timeout(900)  # a machine boots first
PROGRAM_S = 200
# What can be laid inside a sandbox: no kernel log, kernel address, way to the init or machine memory of one's own.
LAID = {
    "processes",
    "files",
    "open file",
    "open node.sock",
    "connect node.sock",
    "connect abstract",
    "abstract names",
    "port",
}
# What a guest's root has that is a machine's: the machine is its own, with the port of the agent that is its own, too.
OWN: dict[str, set[str]] = {"vm": {"init's port", "machine memory"}}
WAITS = "import sys, time; print('up', flush=True); time.sleep(600)"
# Lays the same baits where it runs, as a file system, network and process table have them.
LAY = """
import json, os, socket, subprocess, sys, time
baits = json.loads(sys.argv[1])
for path in baits["paths"].values():
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if path.endswith(".sock"):
        local = socket.socket(socket.AF_UNIX)
        local.bind(path)
        local.listen()
        globals()[path] = local
    else:
        open(path, "w").close()
open(f"/tmp/{baits['mark']}", "w").close()
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\\0" + baits["mark"])
abstract.listen()
tcp = socket.create_server(("127.0.0.1", baits["port"]))
print("up", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Baits:
    """As `guest/walls.py` takes them."""

    mark: str
    pid: int
    paths: dict[str, str]
    port: int
    addresses: list[str]
    symbol: tuple[str, int]

    @property
    def text(self) -> str:
        return json.dumps(self.__dict__)


def host_addresses() -> list[str]:
    said = subprocess.run(["ip", "-j", "-4", "address"], capture_output=True, text=True, check=True).stdout
    own = [entry["local"] for device in json.loads(said) for entry in device["addr_info"]]
    return [*own, "10.0.2.2", "10.0.3.2"]  # what machines and user-mode networks call their host


def kernel_symbol() -> tuple[str, int]:
    """One of this kernel's with its address; 0 where not even the host's root is told."""
    with open("/proc/kallsyms") as table:
        for line in table:
            address, _, name = line.split()[:3]
            if name == "schedule":
                return name, int(address, 16)
    return "schedule", 0


@pytest.fixture(scope="module")
def baits(lab: DrillLab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baits]:
    """Laid on the host while the module runs: a process, a file, sockets and a port."""
    mark = f"bait-{secrets.token_hex(8)}"
    folder = tmp_path_factory.mktemp("baits")
    (folder / mark).write_text(mark)
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen([sys.executable, "-c", WAITS, mark], stdout=subprocess.PIPE))
        stack.callback(process.kill)
        tcp = stack.enter_context(socket.create_server(("", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{mark}")
        abstract.listen()
        yield Baits(
            mark=mark,
            pid=process.pid,
            paths={"file": str(folder / mark), "node.sock": str(node(lab).socket)},
            port=tcp.getsockname()[1],
            addresses=host_addresses(),
            symbol=kernel_symbol(),
        )


def node(lab: DrillLab) -> NodeProcess:
    return lab.node()


def found(sandbox: Sandbox, baits: Baits) -> dict[str, str]:
    """What the program found, as root, with its evidence."""
    Path("/dev/kmsg").write_text(f"{baits.mark}\n")  # each time: the log is a ring, and others write to it
    result = sandbox.exec(command("walls", baits.text), cwd="/opt", user="root", timeout_s=PROGRAM_S)
    assert (result.exit_code, result.timed_out) == (0, False), result.error_text
    *lines, last = [json.loads(line) for line in result.text.splitlines()]
    assert last["attempts"] > len(LAID)
    return {line["attempt"]: line["evidence"] for line in lines}


def test_root_finds_nothing_of_the_host(lab: DrillLab, backend: str, baits: Baits) -> None:
    """Not its processes, files, ports, names, node or kernel; and no way to the init."""
    with lab.create(backend=backend) as sandbox:
        assert set(found(install(sandbox), baits)) == OWN.get(backend, set())
        assert sandbox.exec(["true"]).ok


def test_root_finds_nothing_of_another_sandbox(lab: DrillLab, backend: str, baits: Baits) -> None:
    """Everything is laid in that one, which runs beside it and finds it all itself."""
    with lab.create(backend=backend) as other, lab.create(backend=backend) as sandbox:
        layer = other.start(["python3", "-c", LAY, baits.text], user="root")
        assert next(iter(layer.output(quiet_timeout_s=60)))[2] == b"up\n"
        own = OWN.get(backend, set())
        assert set(found(install(sandbox), baits)) == own
        assert set(found(install(other), baits)) == LAID | own


WEAKENED = {
    ("no-pidns",): {"processes"},
    ("no-netns",): {"port", "connect abstract", "abstract names"},
    ("no-masks", "no-userns", "no-caps-drop"): {"kernel addresses"},
    ("full-dev", "no-userns", "no-caps-drop", "no-seccomp"): {"kernel log"},
    ("init-as-guest-root",): {"init's socket"},
}


@pytest.mark.parametrize("switches", WEAKENED, ids="+".join)
def test_without_the_protection_a_containers_root_finds_it(
    lab: DrillLab, baits: Baits, switches: tuple[str, ...]
) -> None:
    """What stands behind the switched-off one may still hold: then the switches of both are off. A supervisor that is
    weakened makes no zygotes, and so no `function`, which has the same protections.
    """
    expected = set(WEAKENED[switches])
    if not baits.symbol[1]:
        expected -= {"kernel addresses"}
    with lab.create(*switches) as sandbox:
        seen = found(install(sandbox), baits)
        assert expected - set(seen) == set(), seen


if "vm" in BACKENDS:

    def test_a_machines_root_finds_its_own_kernel(lab: DrillLab, baits: Baits) -> None:
        """The mark in its log, and an address of it: that is what the others' walls keep the host's from."""
        with lab.create(backend="vm") as sandbox:
            sandbox.exec(f"echo {baits.mark} > /dev/kmsg", user="root").check()
            address = sandbox.exec("grep -w schedule$ /proc/kallsyms", user="root").check().text.split()[0]
            own = replace(baits, symbol=("schedule", int(address, 16)))
            assert set(found(install(sandbox), own)) == OWN["vm"] | {"kernel log", "kernel addresses"}
