"""A program whose memory can be checked, dumped with CRIU and restored with its memory on demand: without a node.

It runs in a pid and a mount namespace of its own, so that its pids are free at the restore, and in a control group of
version 2 of its own.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Every value that it computes from its memory is compared with what was computed before the dump.
PROGRAM = r"""
import ctypes, hashlib, json, mmap, os, random, socket, sys, threading, time
os.closerange(0, 256)
os.chdir("/")
for _ in range(3):
    os.open("/dev/null", os.O_RDWR)
folder, mib = sys.argv[1], int(sys.argv[2])
PAGE, libc = 4096, ctypes.CDLL(None, use_errno=True)
libc.mremap.restype, libc.mmap.restype = ctypes.c_void_p, ctypes.c_void_p
def pattern(seed, size):
    return random.Random(seed).randbytes(size)
class Area:
    def __init__(self, seed, pages):
        self.content = hashlib.sha256(pattern(seed, pages * PAGE)).hexdigest()
        self.size = pages * PAGE
        self.at = libc.mmap(None, ctypes.c_size_t(self.size), 3, 0x22, -1, ctypes.c_long(0))
        ctypes.memmove(self.at, pattern(seed, self.size), self.size)
    def bytes(self, first=0, last=None):
        return ctypes.string_at(self.at + first, (self.size if last is None else last) - first)
    def is_right(self):
        return hashlib.sha256(self.bytes()).hexdigest() == self.content
    def is_zero(self, first=0, last=None):
        return not any(self.bytes(first, last))
areas = {name: Area(name, 1024) for name in ("moved", "dropped", "unmapped", "forked", "protected", "grown")}
def checked(result):
    if result in (-1, 2**64 - 1):
        raise OSError(ctypes.get_errno(), "mapping")
    return result
def remap(area, size, to=None):  # to another address, or longer where that is
    flags = 1 if to is None else 3
    words = [ctypes.c_void_p(area.at), ctypes.c_size_t(area.size), ctypes.c_size_t(size), flags, ctypes.c_void_p(to)]
    area.at, area.size = checked(libc.mremap(*words)), size
def advise(area, first, last, advice=4):
    checked(libc.madvise(ctypes.c_void_p(area.at + first), ctypes.c_size_t(last - first), advice))
def forked(check):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def move():
    area, old = areas["moved"], areas["moved"].at
    remap(area, area.size, checked(libc.mmap(None, ctypes.c_size_t(area.size), 0, 0x22, -1, ctypes.c_long(0))))
    there = checked(libc.mmap(ctypes.c_void_p(old), ctypes.c_size_t(area.size), 3, 0x32, -1, ctypes.c_long(0)))
    return there == old and not any(ctypes.string_at(old, area.size)) and area.is_right()
def shuffled():  # two threads that move areas to where the other's were; others fork, map and unmap
    wrong = []
    def shuffle(name):
        area, whole = areas[name], pattern(name, areas[name].size)
        for turn in range(60):
            remap(area, area.size, checked(libc.mmap(None, ctypes.c_size_t(area.size), 0, 0x22, -1, ctypes.c_long(0))))
            first = turn * 37 % 1024 * PAGE
            if area.bytes(first, first + PAGE) != whole[first : first + PAGE]:
                wrong.append((name, turn))
    def churn():
        for _ in range(100):
            fresh = checked(libc.mmap(None, ctypes.c_size_t(64 * PAGE), 3, 0x22, -1, ctypes.c_long(0)))
            if any(ctypes.string_at(fresh, 64 * PAGE)):
                wrong.append("fresh")
            ctypes.memset(fresh, 1, 64 * PAGE)
            checked(libc.munmap(ctypes.c_void_p(fresh), ctypes.c_size_t(64 * PAGE)))
    def fork():
        for _ in range(5):
            if forked(areas["dropped"].is_right):
                wrong.append("fork")
    work = [(shuffle, ("moved",)), (shuffle, ("protected",)), (churn, ()), (fork, ())]
    threads = [threading.Thread(target=target, args=arguments) for target, arguments in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
def drop():
    area, half = areas["dropped"], areas["dropped"].size // 2
    advise(area, 0, half)
    return area.is_zero(0, half) and area.bytes(half) == pattern("dropped", area.size)[half:]
def unmap():
    area, first, last = areas["unmapped"], 100 * PAGE, 300 * PAGE
    checked(libc.munmap(ctypes.c_void_p(area.at + first), ctypes.c_size_t(last - first)))
    checked(libc.mmap(ctypes.c_void_p(area.at + first), ctypes.c_size_t(last - first), 3, 0x32, -1, ctypes.c_long(0)))
    whole = pattern("unmapped", area.size)
    return area.bytes(0, first) == whole[:first] and area.is_zero(first, last) and area.bytes(last) == whole[last:]
def grow():
    area, old = areas["grown"], areas["grown"].size
    remap(area, 3 * old)
    return area.is_zero(old) and area.bytes(0, old) == pattern("grown", old)
def protect():
    area = areas["protected"]
    checked(libc.mprotect(ctypes.c_void_p(area.at + 7 * PAGE), ctypes.c_size_t(90 * PAGE), 1))
    return area.is_right()
def fork_then_drop():  # what the parent gives up after the fork is still the child's
    area, (reading, writing) = areas["forked"], os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(0 if area.is_right() and forked(area.is_right) == 0 and not any(bytearray(1 << 22)) else 1)
    advise(area, 0, area.size)
    os.write(writing, b"1")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(reading), os.close(writing)
    return code == 0 and area.is_zero()
def run_program():
    code = os.spawnv(os.P_WAIT, "/bin/true", ["true"])
    pid = os.fork()
    if pid == 0:
        os.execv("/bin/true", ["true"])
    return code == 0 and os.waitpid(pid, 0)[1] == 0
ballast = bytearray(pattern("ballast", mib << 20))
expected = hashlib.sha256(ballast).hexdigest()
table = {n: str(n) * 3 for n in range(50000)}
def table_is_right():
    return len(table) == 50000 and all(table[n] == str(n) * 3 for n in range(50000))
sums = [hashlib.sha256(ballast[n << 20 : n + 1 << 20]).digest() for n in range(mib)]
def watch(step):  # a thread that looks at all memory, again and again; from the dump on it waits for "go"
    go.wait()
    while True:
        for n in range(0, mib, step):
            if hashlib.sha256(ballast[n << 20 : n + 1 << 20]).digest() != sums[n]:
                open(folder + "/wrong", "w").close()
go = threading.Event()
for step in (1, 3):
    threading.Thread(target=watch, args=(step,), daemon=True).start()
server = socket.socket(socket.AF_UNIX)
server.bind(folder + "/program.sock")
server.listen(8)
open(folder + "/ready", "w").close()
while True:
    peer, _ = server.accept()
    for line in peer.makefile():
        try:
            answer = eval(json.loads(line))
        except BaseException as error:
            answer = repr(error)
        peer.sendall(json.dumps(answer).encode() + b"\n")
"""


def cgroup2() -> Path:
    """Where the hierarchy of version 2 is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if line.split()[2] == "cgroup2":
            return Path(line.split()[1])
    raise AssertionError("no control groups of version 2")


class Ground:
    """Namespaces and a control group for programs. Close it."""

    def __init__(self, name: str, criu: Sequence[str]) -> None:
        self.criu = criu
        self.group = cgroup2() / f"barchan-test-{os.getpid()}-{name}"
        self.group.mkdir()
        self._holder = subprocess.Popen(
            ["unshare", "-p", "-f", "-m", "--mount-proc", "--propagation", "private", "sh", "-c",
             "mount -t tmpfs tmpfs /run && echo ready && exec env --ignore-signal=CHLD sleep 1000"],
            stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self._init = int(children.split()[0])

    def close(self) -> None:
        os.kill(self._init, 9)
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()
        deadline = time.monotonic() + 10
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.group.rmdir()

    def pids(self) -> list[int]:
        """Of the programs, in this test's namespace; zombies are not among them."""
        return [int(pid) for pid in (self.group / "cgroup.procs").read_text().split()]

    def is_empty(self) -> bool:
        """Whether all pids but the first are free."""
        return [name for name in os.listdir(f"/proc/{self._init}/root/proc") if name.isdigit()] == ["1"]

    def start(self, folder: Path, mib: int) -> None:
        """Start the program, and wait until it answers."""
        code = folder / "program.py"
        code.write_text(PROGRAM)
        self._run(["setsid", "-f", "/usr/bin/python3", "-S", "-E", str(code), str(folder), str(mib)])
        deadline = time.monotonic() + 60
        while not (folder / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def dump(self, memory: Path) -> None:
        """Into a memory directory, as the node has them; the program is gone then."""
        (memory / "criu").mkdir(parents=True)
        (memory / "record.json").write_text("{}")
        (root,) = self.pids()
        pid = self._inside(root)
        self.run_criu(["dump", "--tree", str(pid), "--images-dir", str(memory / "criu"), "--log-file", "dump.log"])
        (memory / "criu/dump.log").unlink()
        deadline = time.monotonic() + 10
        while not self.is_empty():  # what was killed gives its number back when it has been reaped
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def restore(self, images: Path, work: Path, *, lazy: bool) -> None:
        words = ["restore", "--images-dir", str(images), "--work-dir", str(work), "--restore-detached"]
        self.run_criu([*words, "--log-file", str(work.parent / "restore.log"), *(["--lazy-pages"] if lazy else [])])

    def run_criu(self, words: Sequence[str]) -> None:
        common = ["--manage-cgroups=ignore", "--network-lock", "skip", "-v2"]
        self._run([*self.criu, *words, *(common if words[0] == "dump" else common[:1])])

    def _inside(self, pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("NSpid")).split()[-1])

    def _run(self, words: Sequence[str]) -> None:
        procs = str(self.group / "cgroup.procs")
        enter = ["nsenter", "-t", str(self._init), "-p", "-m"]
        script = 'echo $$ > "$0" && exec "$@"'
        subprocess.run(
            ["sh", "-c", script, procs, *enter, *words],
            check=True, timeout=60, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


async def ask(folder: Path, expression: str) -> Any:
    """What the program computes."""
    reader, writer = await asyncio.open_unix_connection(folder / "program.sock")
    try:
        writer.write(json.dumps(expression).encode() + b"\n")
        return json.loads(await reader.readline())
    finally:
        writer.close()
        await writer.wait_closed()
