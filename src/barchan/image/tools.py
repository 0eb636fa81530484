"""The host's programs that images are made with, and their failures in our words."""

import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from barchan.errors import BackendError, RequirementMissing

Progress = Callable[[str], None]
TOOL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TAIL_LINES = 3


def require(tool: str, package: str, *, needed_for: str) -> str:
    """Path of a program of the host.

    Raises:
        RequirementMissing: It is not installed; the message says how to install it.
    """
    path = shutil.which(tool, path=TOOL_PATH)
    if path is None:
        raise RequirementMissing(f"{needed_for} needs {tool} (try: apt-get install {package})", tool=tool)
    return path


def run(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, on_line: Progress | None = None) -> None:
    """Run a program to its end, telling `on_line` each line it writes.

    It dies with this process, however that ends: a build must not go on in a directory that the next one removes.

    Raises:
        BackendError: It failed; the message has the last lines it wrote.
    """
    environment = {**os.environ, "PATH": TOOL_PATH, "LC_ALL": "C.UTF-8"} if env is None else dict(env)
    guarded = ["setpriv", "--pdeathsig", "KILL", *(os.fspath(part) for part in argv)]
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with subprocess.Popen(
        guarded, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line = raw.decode("utf-8", "replace").strip()
                if line:
                    tail.append(line)
                    if on_line is not None:
                        on_line(line)
            exit_code = process.wait()
        except BaseException:
            process.kill()
            raise
    if exit_code != 0:
        program = Path(argv[0]).name
        raise BackendError(f"{program} failed with exit code {exit_code}: {' | '.join(tail)}", exit_code=exit_code)


def in_namespaces(argv: Sequence[str | Path]) -> list[str | Path]:
    """The same program in mount and pid namespaces of its own: when it ends, so do its mounts and its children."""
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *argv]
