"""A node of a test's own: private state directory, images of the machine's, nothing left when it ends."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from barchan.testing.expect import NotConforming, equal, present
from barchan.testing.leaks import Watch

READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
# What a node that ended may leave in its state directory: its journal, logs, locks, and the images.
FILES = frozenset(
    {
        "cache",
        "gvisor",
        "images",
        "journal.sqlite",
        "journal.sqlite-shm",
        "journal.sqlite-wal",
        "kernels",
        "line.key",
        "memory",
        "microvm",
        "node.lock",
        "node.log",
        "pager",
        "pager.log",
        "reader.log",
        "snapshots",
        "start.lock",
        "supervisor.log",
        "token",
        "vm",
    }
)


class NodeProcess:
    """A node started by a test, which may kill it and start it again on the same state.

    Args:
        state_dir: Made if missing; short, for a unix socket's path has at most 107 bytes.
        images: An image store to share, by a symbolic link.
    """

    def __init__(self, state_dir: Path, images: Path) -> None:
        self.state_dir = state_dir
        self.process: subprocess.Popen[bytes] | None = None
        state_dir.mkdir(mode=0o700, exist_ok=True)
        (state_dir / "images").symlink_to(images)
        self.watch = Watch(state_dir)

    @property
    def socket(self) -> Path:
        return self.state_dir / "node.sock"

    @property
    def log(self) -> str:
        return (self.state_dir / "node.log").read_text("utf-8", "replace")

    def start(self, *options: str) -> None:
        """Start the node and wait until it listens; it does not end on its own."""
        equal(self.process, None, "the node that runs already")
        ready, ready_end = os.pipe()
        # It dies with the test process, even if that is killed; the supervisor then cleans up after its grace.
        guard = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "barchan.node"]
        command = [*guard, "--state-dir", str(self.state_dir), "--idle-exit-s", "0"]
        with open(self.state_dir / "node.log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--ready-fd", str(ready_end), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(ready_end,),
            )
        os.close(ready_end)
        with open(ready, "rb") as pipe:
            said = pipe.readline()
        if said != b"ready\n":
            self.kill()
            raise NotConforming(f"the node did not start: {said!r}\n{self.log[-4000:]}")

    def request(self, method: str, path: str) -> Any:
        """One request without a body, over plain HTTP on the socket, with nothing of the SDK; its JSON reply."""
        connection = http.client.HTTPConnection("localhost", timeout=END_TIMEOUT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        try:
            connection.sock.settimeout(END_TIMEOUT_S)
            connection.sock.connect(str(self.socket))
            connection.request(method, path, headers={"Accept": "application/json"})
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        equal((response.status, body if response.status != 200 else b""), (200, b""), f"{method} {path}")
        return json.loads(body)

    def sandboxes(self) -> list[str]:
        """Ids of its live sandboxes."""
        return [item["sandbox_id"] for item in self.request("GET", "/v1/sandboxes")]

    def wait_empty(self, timeout_s: float) -> list[str]:
        """Wait until no sandbox is left; returns the ids of those that are after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (left := self.sandboxes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def kill(self) -> None:
        """SIGKILL the node; its supervisor and sandboxes live on."""
        process = present(self.process, "node that runs")
        process.send_signal(signal.SIGKILL)
        process.wait(END_TIMEOUT_S)
        self.process = None

    def end(self) -> list[str]:
        """End the node with every sandbox; returns what remains on the host, which should be nothing."""
        if self.process is not None and self.process.poll() is None:
            self.watch.supervisor_pid()
            self.request("POST", "/v1/node/shutdown")
            self.process.wait(END_TIMEOUT_S)
        self.process = None
        return self.watch.settle(files=FILES)
