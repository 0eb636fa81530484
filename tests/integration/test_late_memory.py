"""Large sandboxes that come back from disk answer before all of their memory is there."""

import os
import signal
from collections.abc import AsyncIterator

import pytest

import barchan
from tests.leaks import processes
from tests.nodes import NodeProcess

pytestmark = [pytest.mark.requires("root", "cgroup", "criu"), pytest.mark.timeout(120)]

PYTHON = """
import hashlib, os, sys
data = bytearray(os.urandom(1 << 20) * 0)
for _ in range(MIB):
    data += os.urandom(1 << 20)
right = hashlib.sha256(data).hexdigest()
def is_right():
    return hashlib.sha256(data).hexdigest() == right
print("ready", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Program:
    """A Python that holds some memory, and answers expressions."""

    def __init__(self, process: barchan.AsyncProcess) -> None:
        self._process = process
        self._at = 0

    @classmethod
    async def start(cls, sandbox: barchan.AsyncSandbox, mib: int) -> "Program":
        program = cls(await sandbox.start(["python3", "-c", PYTHON.replace("MIB", str(mib))]))
        assert await program._line() == "ready"
        return program

    async def ask(self, expression: str) -> str:
        await self._process.write_stdin(expression + "\n")
        return await self._line()

    async def _line(self) -> str:
        said = b""
        async for stream, _, data in self._process.output(self._at):
            said += data if stream == "stdout" else b""
            if said.endswith(b"\n"):
                break
        self._at += len(said)
        return said.decode().strip()


@pytest.fixture
async def client(node: NodeProcess) -> AsyncIterator[barchan.AsyncClient]:
    async with barchan.connect_async(f"unix://{node.socket}") as client:
        yield client


def pagers(node: NodeProcess) -> list[int]:
    """The pager and its keeper; the pager, which is the parent of the other, first."""
    directory = str(node.state_dir / "pager")
    return sorted(pid for pid, argv in processes() if directory in argv and "barchan.snapshot.pager" in argv)


async def test_a_large_program_comes_back_and_goes_again(client: barchan.AsyncClient, node: NodeProcess) -> None:
    """Every byte is right, also when it is stored anew as soon as it is back."""
    sandbox = await client.create("debian", memory_mib=512)
    program = await Program.start(sandbox, 48)
    for _ in range(2):
        await sandbox.hibernate()
        assert await program.ask("1 + 1") == "2"
        assert len(pagers(node)) == 2
    assert await program.ask("is_right()") == "True"
    await sandbox.hibernate()
    assert await sandbox.kill()


async def test_one_whose_pager_is_killed_is_lost(client: barchan.AsyncClient, node: NodeProcess) -> None:
    """Not wrong, and the platform's fault; the next one has another pager."""
    sandbox = await client.create("debian", memory_mib=512)
    await Program.start(sandbox, 96)
    for _ in range(10):  # until it is killed before it is done
        await sandbox.hibernate()
        await sandbox.resume()
        os.kill(pagers(node)[0], signal.SIGKILL)
        try:
            await sandbox.exec("sleep 1")
        except barchan.SandboxLost as error:
            assert "memory" in str(error)
            break
    else:
        raise AssertionError("its memory was always there before the pager was killed")
    other = await client.create("debian", memory_mib=512)
    program = await Program.start(other, 32)
    await other.hibernate()
    assert await program.ask("is_right()") == "True"
