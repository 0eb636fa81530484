"""Join the node that owns a state directory, or start it as a process of its own. It blocks: call it in a thread."""

import fcntl
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from barchan.errors import BackendError, Conflict, ConnectTimeout, Denied, InvalidSpec
from barchan.sdk.endpoint import SOCKET_NAME
from barchan.wire.api import JSON, error_from_body

START_TIMEOUT_S = 30.0
_LOCK_TIMEOUT_S = 60.0
_LOCK_POLL_S = 0.02
_CONFLICT_POLL_S = 0.1
_REPORT_BYTES_MAX = 64 << 10
_LOG_TAIL_BYTES = 800
# The shell starts the node in the background and ends: the node is then nobody's child, and no client has to reap it.
_DETACH = '"$@" &'


def ensure_node(state_dir: str, store: str | None = None) -> None:
    """Return when a node listens in `state_dir`; of many callers one starts it and the others wait.

    Args:
        store: Blob store of a node that this starts; one that runs keeps its own.

    Raises:
        Denied, InvalidSpec: The state directory can't be used.
        ConnectTimeout: The node, or the caller that starts it, took too long.
        BackendError, RequirementMissing: What the node said when it refused to start.
    """
    try:
        if listens(state_dir):
            return
        Path(state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        with _start_lock(state_dir):
            _start_unless_listening(state_dir, store)
    except PermissionError as error:
        raise Denied(f"no access to the state directory {state_dir}: {error.strerror}") from error
    except OSError as error:
        raise InvalidSpec(f"{state_dir} can't be a state directory: {error.strerror or error}") from error


def listens(state_dir: str) -> bool:
    """Whether a node runs in that state directory. Raises `Denied` if it can't be asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.path.join(state_dir, SOCKET_NAME))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True  # so many are connecting that the queue is full
        except PermissionError as error:
            raise Denied(f"no access to the node of {state_dir}: {error.strerror}") from error
        return True


@contextmanager
def _start_lock(state_dir: str) -> Iterator[None]:
    lock = os.open(os.path.join(state_dir, "start.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConnectTimeout(
                        f"another client has been starting the node of {state_dir} for too long"
                    ) from error
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(lock)


def _start_unless_listening(state_dir: str, store: str | None) -> None:
    """A node that is ending no longer listens but still holds the directory: the next one has to wait for that."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not listens(state_dir):
        try:
            _start(state_dir, store)
        except Conflict:
            if time.monotonic() > deadline:
                raise
            time.sleep(_CONFLICT_POLL_S)


def _start(state_dir: str, store: str | None) -> None:
    log = os.open(os.path.join(state_dir, "node.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    log_start = os.fstat(log).st_size
    ready, ready_end = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            node = [sys.executable, "-m", "barchan.node", "--state-dir", state_dir, "--ready-fd", str(ready_end)]
            node += ["--store", store] if store is not None else []
            subprocess.run(
                ["/bin/sh", "-c", _DETACH, "sh", *node],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                pass_fds=(ready_end,),
                check=True,
                timeout=START_TIMEOUT_S,
            )
        except subprocess.SubprocessError as error:
            raise BackendError(f"the node could not be started: {error}") from error
        finally:
            os.close(ready_end)
            os.close(log)
        report = _read_report(ready, state_dir)
    finally:
        os.close(ready)
    if report == b"ready":
        return
    if report:
        raise error_from_body(report, JSON)
    raise BackendError(f"the node ended before it was ready: {_tail(state_dir, log_start)}")


def _read_report(ready: int, state_dir: str) -> bytes:
    """The one line the node writes, or what there was of it when it closed the pipe."""
    deadline = time.monotonic() + START_TIMEOUT_S
    report = b""
    while b"\n" not in report and len(report) < _REPORT_BYTES_MAX:
        if not select.select([ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise ConnectTimeout(f"the node of {state_dir} was not ready in {START_TIMEOUT_S:g} s; see its node.log")
        piece = os.read(ready, 4096)
        if not piece:
            break
        report += piece
    return report.partition(b"\n")[0].strip()


def _tail(state_dir: str, log_start: int) -> str:
    """The last of what this start wrote to the log."""
    with open(os.path.join(state_dir, "node.log"), "rb") as log:
        log.seek(log_start)
        said = log.read()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
    return said or "it said nothing"
