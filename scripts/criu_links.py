"""Blocking connections to a supervisor and to a guest init, for scripts that try things out on one sandbox."""

import array
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from barchan.wire import guest, supervisor

INIT_DIR = "/dev/.barchan"


class Guest:
    """A blocking connection to an init: requests, and the output that is pushed meanwhile."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(10)
        self.reader = guest.FrameReader()
        self.output: dict[int, bytearray] = {}
        self.heads: dict[int, int] = {}
        self.replies: dict[int, guest.Frame] = {}
        self.tag = 0

    @classmethod
    def connect(cls, pid: int, leaf_fds: list[int]) -> "Guest":
        """To an init found by its pid, as the supervisor does it: HELLO with the guest's cgroup leaf."""
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"/proc/{pid}/root{INIT_DIR}/init.sock")
        peer, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if peer != pid:
            raise OSError(f"process {peer} listens where {pid} should")
        hello = guest.frame(guest.Request.HELLO, guest.HELLO_TAG, struct.pack("<IBBBB", 1, 1, 0, len(leaf_fds) - 1, 1))
        sock.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", leaf_fds))])
        link = cls(sock)
        link.wait(guest.HELLO_TAG)
        return link

    def receive(self) -> None:
        data = self.sock.recv(1 << 20)
        if not data:
            raise OSError("the init closed the connection")
        for frame in self.reader.feed(data):
            if frame.kind != guest.Pushed.OUTPUT:
                self.replies[frame.tag] = frame
                continue
            pushed = guest.decode_pushed(frame)
            assert isinstance(pushed, guest.Output)
            if pushed.offset != self.heads.get(pushed.handle, pushed.offset) and pushed.offset > 0:
                raise OSError(f"output jumped to {pushed.offset}")
            self.heads[pushed.handle] = pushed.offset + len(pushed.data)
            self.output.setdefault(pushed.handle, bytearray()).extend(pushed.data)
            self.sock.sendall(guest.ack(pushed.handle, pushed.stream, self.heads[pushed.handle]))

    def wait(self, tag: int) -> guest.Frame:
        while tag not in self.replies:
            self.receive()
        frame = self.replies.pop(tag)
        if frame.kind == guest.ERROR:
            raise OSError(*guest.decode_error(frame.body))
        return frame

    def request(self, make: Callable[[int], bytes]) -> bytes:
        self.tag += 1
        self.sock.sendall(make(self.tag))
        return self.wait(self.tag).body

    def start(self, process_id: str, argv: list[str], flags: guest.StartFlag, script: bytes = b"") -> guest.Started:
        """Start, as user 1000, and follow from offset 0 what is started or was before."""
        start = guest.Start(
            process_id=process_id,
            argv=argv,
            flags=flags | guest.StartFlag.FOLLOW,
            user="1000",
            cwd="/tmp",
            script=script,
        )
        return guest.decode_started(self.request(start.encode))

    def follow(self, handle: int, offset: int) -> guest.Spool:
        return guest.decode_spool(self.request(lambda tag: guest.follow(tag, handle, offset, 0)))

    def stdin(self, handle: int, offset: int, text: str) -> int:
        body = self.request(lambda tag: guest.stdin(tag, handle, offset, text.encode(), eof=False))
        return guest.decode_number(body, "<Q")

    def expect(self, handle: int, text: str) -> str:
        """Wait until the output since the last call holds `text`; returns and forgets that output."""
        deadline = time.monotonic() + 10
        while text.encode() not in self.output.get(handle, b""):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {text!r} in {bytes(self.output.get(handle, b''))!r}")
            self.receive()
        return self.output.pop(handle).decode(errors="replace")


class Supervisor:
    """A private supervisor in the foreground of this script."""

    def __init__(self, build: Path, work: Path) -> None:
        self.name = f"trial-{os.getpid()}"
        options = {
            "socket": work / "socket", "pool": work / "pool", "pool-mib": 1024, "cgroup": self.name,
            "init": build / "barchan-init", "orphan-grace-s": 5, "log": work / "supervisor.log",
        }  # fmt: skip
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        subprocess.run([build / "barchan-supervisor", *words], check=True, timeout=30, stdout=subprocess.DEVNULL)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(30)
        self.sock.connect(str(work / "socket"))
        self.pid = self.request("hello", version=supervisor.VERSION)[0].number("pid")

    def request(self, op: str, **keys: str | int) -> tuple[supervisor.Message, list[int]]:
        self.sock.send(supervisor.encode(op, tag=1, **keys))
        while True:
            packet, fds, _, _ = socket.recv_fds(self.sock, supervisor.PACKET_BYTES_MAX, supervisor.FDS_MAX)
            message = supervisor.decode(packet)
            if message.word == "error":
                raise OSError(f"{op}: {message.pairs}")
            if message.word == "ok":
                return message, fds

    def shut_down(self) -> None:
        """Ask for the end of everything, and wait until it came."""
        pidfd = os.pidfd_open(self.pid)
        self.request("shutdown")
        if not select.select([pidfd], [], [], 10)[0]:
            raise TimeoutError("the supervisor does not end")
        os.close(pidfd)
        self.sock.close()

    def descriptors(self) -> Iterator[Path]:
        yield from Path(f"/proc/{self.pid}/fd").iterdir()

    def pool(self) -> Path:
        """The pool's root, which is mounted nowhere but known to the supervisor."""
        return next(fd for fd in self.descriptors() if (fd / "upper").is_dir() and (fd / "spool").is_dir())

    def mount_of(self, device: int) -> Path:
        """One of the supervisor's shared tmpfs mounts."""
        return next(fd for fd in self.descriptors() if fd.is_dir() and fd.stat().st_dev == device)
