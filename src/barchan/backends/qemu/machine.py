"""One QEMU that runs in an outer container: started, found again, stopped, stored and filled."""

import asyncio
import os
import stat
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, cast

import msgspec

from barchan.backends.container.backend import ContainerHandle
from barchan.backends.guest import GuestProcess, Reader
from barchan.backends.hosted.outer import init_of, reach, read_in
from barchan.backends.qemu import ram
from barchan.backends.qemu.qmp import Qmp
from barchan.backends.qemu.ram import Block, Process
from barchan.core.finished import finished
from barchan.errors import BackendError, BootFailed, ConnectionLost, NotFound, RemoteProtocolError
from barchan.wire import guest as wire

PROCESS_ID = "barchan-qemu"
QMP_SOCKET = "/dev/shm/qmp"  # not on disk: a cut of the outer has none of it
GUEST_SOCKET = "/dev/shm/guest"
STATE_FILE = "/dev/shm/state"
RAM_PATH, STATE_PATH = "/memory/ram", "/memory/state"  # of a memory directory's layer
MEMORY = "ram"  # QEMU's name for the guest's main memory, and a memory directory's file of it
STATE, BLOCKS, DISK = "state", "blocks", "disk"  # the other files
USER = "0:0"  # of the outer: no root of the host, and without any capability
START_S = 20.0
POLL_S = 0.002
SAVE_S = 120.0
LOAD_S = 60.0
STATE_BYTES_MAX = 64 << 20
BLOCK_BYTES_MAX = 64 << 20  # of all but the main memory: firmware, a screen
WORDS_MAX = 2000
CONSOLE_BYTES = 16384


class _Words(Reader):
    """The last words of a QEMU."""

    def __init__(self) -> None:
        super().__init__()
        self.text = b""

    def output(self, stream: int, offset: int, data: bytes) -> None:
        self.text = (self.text + data)[-WORDS_MAX:]
        self.consumed[stream] = offset + len(data)


class Machine:
    """A QEMU, its outer and the connection to it.

    Attributes:
        runner: Its process in the outer.
        why_ended: Why its guest ended, as far as QEMU says; empty: it has not, or QEMU was killed.
    """

    def __init__(self, outer: ContainerHandle, runner: GuestProcess) -> None:
        self.outer = outer
        self.runner = runner
        self.qmp: Qmp
        self.why_ended = ""
        self.guest_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._words = _Words()

    @classmethod
    async def start(cls, outer: ContainerHandle, argv: Sequence[str]) -> "Machine":
        """Run QEMU and connect to it.

        Raises:
            BootFailed: It ended at once, or does not answer; the message has its last words.
        """
        words = _Words()
        start = wire.Start(process_id=PROCESS_ID, argv=argv, user=USER, flags=wire.StartFlag.FOLLOW, spool_bytes=65536)
        machine = cls(outer, await outer.guest.start(start, words))
        machine._words = words
        await machine._connect()
        return machine

    @classmethod
    async def find(cls, outer: ContainerHandle) -> "Machine":
        """The one that an earlier node started.

        Raises:
            BootFailed: It is gone.
        """
        try:
            machine = cls(outer, await outer.guest.find(PROCESS_ID))
        except NotFound as error:
            raise BootFailed(f"no QEMU was started in {outer.sandbox_id}") from error
        await machine._connect()
        try:
            answer = await machine.qmp.execute("query-status")
            status = answer.get("status") if isinstance(answer, dict) else None
            if not isinstance(status, str):
                raise RemoteProtocolError(f"QEMU's word on its guest has no status: {str(answer)[:200]}")
        except BaseException:
            machine.close()
            raise
        if status in ("shutdown", "internal-error", "guest-panicked"):
            machine._guest_gone(f"its guest ended: {status}")
        return machine

    async def _connect(self) -> None:
        until = asyncio.get_running_loop().time() + START_S
        while True:
            try:
                self.qmp = await Qmp.open(reach(self.outer, QMP_SOCKET))
                break
            except ConnectionLost as error:
                if self.runner.exit is not None or self.outer.ended.done():
                    await asyncio.sleep(POLL_S)  # its words come with its end
                    raise BootFailed(f"QEMU did not start: {self.said()}") from error
                if asyncio.get_running_loop().time() > until:
                    raise BootFailed(f"QEMU does not answer: {error}; {self.said()}") from error
            await asyncio.sleep(POLL_S)
        self.qmp.on_event = self._hear

    def said(self) -> str:
        """The last words of QEMU itself."""
        return self._words.text.decode("utf-8", "replace").strip() or "it said nothing"

    async def console(self) -> str:
        """The last words of the guest's kernel; hostile text."""
        try:
            text = await self.qmp.execute("ringbuf-read", device="console", size=CONSOLE_BYTES)
        except (BackendError, ConnectionLost):
            return ""
        return "".join(char if char.isprintable() or char == "\n" else "?" for char in str(text))[-WORDS_MAX:]

    def _hear(self, name: str, data: dict[str, Any]) -> None:
        if name == "SHUTDOWN":
            self._guest_gone(
                {"guest-reset": "its kernel restarted or panicked"}.get(
                    str(data.get("reason")), "it was shut down from inside"
                )
            )
        elif name == "GUEST_PANICKED":
            self._guest_gone("its kernel panicked")

    def _guest_gone(self, why: str) -> None:
        self.why_ended = why
        if not self.guest_ended.done():
            self.guest_ended.set_result(None)

    async def stop(self) -> None:
        """Let its processors stand still; what it has written is in the files of its disks then."""
        await self.qmp.execute("stop", timeout_s=SAVE_S)

    async def cont(self) -> None:
        """Let them go on; repeating is harmless."""
        await self.qmp.execute("cont")

    @property
    def is_there(self) -> bool:
        """It has not ended, as far as is known."""
        return self.runner.exit is None and not self.outer.ended.done() and self.qmp.is_open

    def close(self) -> None:
        """Let go of it, which goes on."""
        self.qmp.close()

    # memory directories

    async def save(self, target: Path, memory_mib: int, disk: str | None) -> int:
        """Store a stopped machine in the directory `target`; returns how many bytes its memory has there.

        Args:
            memory_mib: What its guest was given: a QEMU that was taken over may say it were terabytes.
            disk: Path in the outer of the disk to be stored with it.

        Raises:
            BackendError: QEMU refuses, or what it left is no state. OSError: No room.
        """
        said = await self.qmp.execute("human-monitor-command", command_line="info ramblock")
        main, others = main_of(ram.blocks(said), memory_mib)
        process = await asyncio.to_thread(process_of, self.outer, self.runner.pid)
        state = self.qmp.execute("xen-save-devices-state", timeout_s=SAVE_S, filename=STATE_FILE, live=False)
        memory = asyncio.to_thread(_save_memory, process, main, others, target)
        resident = await finished(_both(state, memory))
        await finished(asyncio.to_thread(self._fetch, STATE_FILE, target / STATE, STATE_BYTES_MAX))
        if disk is not None:
            await finished(asyncio.to_thread(self._fetch, disk, target / DISK, self.outer.spec.disk_mib << 20))
        return resident

    def _fetch(self, path: str, target: Path, bytes_max: int) -> None:
        """Copy a file out of the outer, following no link in there."""
        source = open_in(self.outer, path)
        try:
            ram.copy_sparse(source, target, bytes_max)
        finally:
            os.close(source)

    async def load(self, memory: Path) -> None:
        """Make one that was started for it the machine of the memory directory `memory`, and let it run.

        Raises:
            BootFailed: QEMU can't take it.
        """
        content = await asyncio.to_thread((memory / BLOCKS).read_bytes)
        wanted = msgspec.msgpack.decode(content, type=dict[str, bytes])
        if wanted:
            said = await self.qmp.execute("human-monitor-command", command_line="info ramblock")
            there = {block.name: block for block in ram.blocks(said)}
            process = await asyncio.to_thread(process_of, self.outer, self.runner.pid)
            await asyncio.to_thread(_write_blocks, process, there, wanted)
        resumed = self.qmp.event("RESUME")
        try:
            await self.qmp.execute("migrate-incoming", uri=f"file:{STATE_PATH}")
            async with asyncio.timeout(LOAD_S):
                await asyncio.shield(resumed)
        except (BackendError, ConnectionLost, TimeoutError) as error:
            raise BootFailed(f"QEMU could not take the stored machine: {error}; {self.said()}") from error


async def _both(state: Awaitable[object], memory: Awaitable[int]) -> int:
    """Both come to their ends, whatever becomes of one."""
    devices, resident = await asyncio.gather(state, memory, return_exceptions=True)
    for result in (devices, resident):
        if isinstance(result, BaseException):
            raise result
    return cast(int, resident)


def _save_memory(process: Process, main: Block, others: Sequence[Block], target: Path) -> int:
    with process:
        content = {block.name: process.read(block) for block in others}
        (target / BLOCKS).write_bytes(msgspec.msgpack.encode(content))
        return process.save(main, target / MEMORY)


def _write_blocks(process: Process, there: dict[str, Block], wanted: dict[str, bytes]) -> None:
    with process:
        for name, data in wanted.items():
            block = there.get(name)
            if block is None or block.size != len(data):
                raise BootFailed(f"the stored machine has memory {name!r} of {len(data)} bytes, and this one has not")
            process.write(block, data)


def main_of(blocks: Sequence[Block], memory_mib: int) -> tuple[Block, list[Block]]:
    """The guest's main memory, and the others. Raises `BackendError`: they are not what QEMU was told to give it."""
    main = [block for block in blocks if block.name == MEMORY]
    others = [block for block in blocks if block.name != MEMORY]
    sizes = [block.size for block in main]
    if sizes != [memory_mib << 20] or sum(block.size for block in others) > BLOCK_BYTES_MAX:
        raise BackendError(f"QEMU's guest has other memory than it was given: {sizes} bytes, not {memory_mib} MiB")
    return main[0], others


def process_of(outer: ContainerHandle, pid_inside: int) -> Process:
    """A child of an outer's init, by the pid that it has inside; close it. Raises `BackendError`: it is gone."""
    try:
        init = init_of(outer)
        try:
            children = read_in(init, f"task/{outer.pid}/children").split()
        finally:
            os.close(init)
    except (ConnectionLost, OSError) as error:
        raise BackendError(f"QEMU is gone: {error}") from error
    for child in children:
        with suppress(FileNotFoundError, ProcessLookupError):
            process = Process(child)
            if _is(process, outer.pid, pid_inside):
                return process
    raise BackendError("QEMU is gone")


def _is(process: Process, parent: int, pid_inside: int) -> bool:
    """Whether it is that child of that parent; closed unless it is."""
    is_it = False
    try:
        said = process.status()
        is_it = said.get("PPid") == str(parent) and said.get("NSpid", "").split()[-1:] == [str(pid_inside)]
    finally:
        if not is_it:
            process.close()
    return is_it


def open_in(outer: ContainerHandle, path: str) -> int:
    """Open a plain file of an outer, following no link in there. Raises `BackendError`, `ConnectionLost`."""
    at = init_of(outer)
    try:
        above, at = at, os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
        os.close(above)
        *folders, name = PurePosixPath(path).relative_to("/").parts
        for part in folders:
            above, at = at, os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(above)
        # A pipe in its place must not make us wait for whoever writes it.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except OSError as error:
        raise BackendError(f"{path} of {outer.sandbox_id} can't be read: {error.strerror}") from error
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BackendError(f"{path} of {outer.sandbox_id} is no plain file")
    return fd
