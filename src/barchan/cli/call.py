"""`barchan call`."""

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

import barchan
from barchan.cli.attached import OUT_OF_TIME
from barchan.cli.common import DEFAULTS, Common, key_values, print_json
from barchan.cli.run import Words
from barchan.errors import InvalidSpec


def call(
    file: str | None = None,
    /,
    *,
    code: Annotated[str | None, Parameter(name=("--code", "-c"))] = None,
    template: str = "debian",
    import_: Annotated[Words, Parameter(name="--import")] = (),
    timeout_s: float = 10.0,
    memory_mib: int = 256,
    env: Words = (),
    common: Common = DEFAULTS,
) -> int:
    """Run Python source in a warm interpreter, of which nothing stays.

    Input is passed on whole, output at the end. The exit code is the
    source's, and 124 when it ran out of time.

    For example:

        barchan call -c 'print(6 * 7)'
        barchan call --import numpy solve.py < data

    Args:
        file: The source; `-` reads it from stdin.
        code: The source itself, instead.
        template: Name or digest of an image.
        import_: A module to have loaded before; may be repeated.
        timeout_s: Time for it; then it is killed.
        memory_mib: Memory, and what it writes to files.
        env: KEY=VALUE; may be repeated.
    """
    if (file is None) == (code is None):
        raise InvalidSpec("give exactly one of a file and --code (try: barchan call -c 'print(1)')")
    source = code if code is not None else sys.stdin.read() if file == "-" else _text(Path(file or ""))
    options: dict[str, Any] = {
        "template": template,
        "imports": import_,
        "timeout_s": timeout_s,
        "memory_mib": memory_mib,
        "env": key_values(env, "--env"),
    }
    if file != "-" and not sys.stdin.isatty():
        options["stdin"] = sys.stdin.buffer.read()
    with barchan.connect(**common.connection) as client:
        result = client.call(source, **options)
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.buffer.write(result.stderr)
    sys.stderr.flush()
    exit_code = OUT_OF_TIME if result.timed_out else result.exit_code
    if common.json:
        told = {"timed_out": result.timed_out, "oom_killed": result.oom_killed, "usage": result.usage}
        print_json({"exit_code": exit_code, **told})
    return exit_code


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"{path} can't be read: {error}") from error
