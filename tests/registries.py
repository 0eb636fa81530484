"""A real registry for a test, on a loopback port that the kernel chose."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 20


@contextmanager
def running_registry(folder: Path, *, user: str = "", password: str = "") -> Iterator[str]:
    """Run a registry that keeps its data in `folder`; yields its HOST:PORT. With a user, it lets in nobody else."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    auth = ""
    if user:
        hashed = subprocess.run(["htpasswd", "-nbB", user, password], capture_output=True, text=True, check=True).stdout
        (folder / "htpasswd").write_text(hashed.strip() + "\n")
        auth = f"auth: {{htpasswd: {{realm: tests, path: {folder}/htpasswd}}}}\n"
    config = folder / "config.yml"
    config.write_text(
        "version: 0.1\n"
        "log: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"{auth}"
        f"http: {{addr: '{host}'}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(host):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the registry did not start: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.05)
        yield host
    finally:
        process.kill()
        process.wait()


def _answers(host: str) -> bool:
    name, _, port = host.partition(":")
    try:
        socket.create_connection((name, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def blobs_in(folder: Path) -> set[str]:
    """Digests of the blobs that the registry of a folder holds."""
    return {path.parent.name for path in folder.glob("data/docker/registry/v2/blobs/sha256/*/*/data")}
