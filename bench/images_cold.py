"""Cold start of an image of more than a GiB: read on demand, against a whole pull. `make bench-images`.

One image of Debian's C++, Java and Node toolchains lies in a registry on loopback and, in chunks, behind a web server
on loopback. Two ways to a program in it, each on an empty disk and an empty page cache:

- on demand: a fresh node whose store is the web server; its first sandbox of the image;
- whole: skopeo copies it from the registry, umoci unpacks it, chroot runs it.

A third run is on demand again, with the record of first reads that another node has left in the store.
Each is timed to the end of `true`, and to the end of a build and test run with the three toolchains. Bytes fetched are
counted at the servers, bytes written by the block device. Prints a table and writes images-cold.json to --out.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import barchan
from barchan.sdk.aio.sandbox import AsyncSandbox
from scripts.own_node import drop_page_cache, own_node
from tests.registries import running_registry
from tests.stores_http import served

IMAGE = "toolchains"
PACKAGES = "g++,make,cmake,default-jdk-headless,maven,nodejs,npm,git,clang,golang-go"
WORK = """
set -e
export HOME=/tmp PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mkdir -p /tmp/work && cd /tmp/work
cat > sum.cpp <<'END'
#include <algorithm>
#include <iostream>
#include <map>
#include <numeric>
#include <string>
#include <vector>
int main() {
    std::vector<int> numbers(1000);
    std::iota(numbers.begin(), numbers.end(), 1);
    std::map<std::string, int> sums{{"all", std::accumulate(numbers.begin(), numbers.end(), 0)}};
    std::cout << sums["all"] << std::endl;
    return sums["all"] == 500500 ? 0 : 1;
}
END
printf 'test: sum\\n\\t./sum\\nsum: sum.cpp\\n\\tg++ -O1 -o sum sum.cpp\\n' > Makefile
make -s test
cat > Sum.java <<'END'
import java.util.stream.IntStream;
public class Sum {
    public static void main(String[] words) {
        int sum = IntStream.rangeClosed(1, 1000).sum();
        System.out.println(sum);
        if (sum != 500500) System.exit(1);
    }
}
END
javac Sum.java
java -Xshare:auto Sum
cat > sum.test.js <<'END'
const test = require('node:test');
const assert = require('node:assert');
test('sum', () => assert.strictEqual(Array.from({length: 1000}, (_, i) => i + 1).reduce((a, b) => a + b), 500500));
END
node --test sum.test.js > /dev/null
echo done
"""
RECORD_S_MAX = 60
SECTOR_BYTES = 512
FIELD_SECTORS_WRITTEN = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--work", type=Path, default=Path("/var/tmp/barchan-cold"), help="keeps the image between runs")
    parser.add_argument("--out", type=Path, default=Path("runs/images-cold"))
    parser.add_argument("--packages", default=PACKAGES)
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("needs root (try: sudo make bench-images)")
    options.work.mkdir(parents=True, exist_ok=True)
    state_dir = options.work / "state"
    _barchan(state_dir, "image", "build", "debian", "--name", IMAGE, "--include", options.packages)
    size_bytes, files = _image(state_dir)
    print(f"the image: {size_bytes / 2**30:.2f} GiB, {files} files", flush=True)
    store = options.work / "store"
    _barchan(state_dir, "image", "push", IMAGE, str(store))
    shutil.rmtree(store / "hot", ignore_errors=True)  # of an earlier run
    with TemporaryDirectory(prefix="cold-", dir=options.work) as name:
        folder = Path(name)
        with (
            running_registry(_made(folder / "registry")) as host,
            served(store, folder / "web") as url,
        ):
            _barchan(state_dir, "image", "push", IMAGE, f"docker://{host}/{IMAGE}:1", "--plain-http")
            results: dict[str, dict[str, float]] = {
                "image": {"bytes": size_bytes, "files": files},
                "on_demand": _on_demand(folder, url),
                **_recorded(folder, store, url),
                "whole": _whole(folder, host),
            }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "images-cold.json").write_text(json.dumps(results, indent=2) + "\n")
    _table(results)
    return 0


def _recorded(folder: Path, store: Path, url: str) -> dict[str, dict[str, float]]:
    """Once more, with the record of first reads that a node which may write to the store has left there before."""
    with own_node(_made(folder / "nothing"), "--store", store.as_uri()) as node:
        asyncio.run(_sandbox(node.state_dir, lambda: 0, keep_until=lambda: any(store.glob("hot/*"))))
    return {"recorded": _on_demand(folder, url)}


def _on_demand(folder: Path, url: str) -> dict[str, float]:
    """A fresh node; what its first sandbox takes."""
    nothing, log = _made(folder / "nothing"), folder / "web" / "access.log"
    before = _served_bytes(log)
    drop_page_cache()
    written = _written_bytes()
    with own_node(nothing, "--store", url) as node:
        result = asyncio.run(_sandbox(node.state_dir, lambda: _served_bytes(log) - before))
        subprocess.run(["sync"], check=True)
        return {**result, "written_bytes": _written_bytes() - written}


async def _sandbox(
    state_dir: Path, fetched: Callable[[], int], keep_until: Callable[[], bool] = lambda: True
) -> dict[str, float]:
    async with barchan.connect_async(state_dir=state_dir) as client:
        began = time.monotonic()
        async with await client.create(IMAGE, memory_mib=4096, disk_mib=2048, cpus=2) as sandbox:
            await _must(sandbox, "true")
            first, first_bytes = time.monotonic(), fetched()
            await _must(sandbox, WORK)
            ended = time.monotonic()
            for _ in range(RECORD_S_MAX):
                if keep_until():
                    break
                await asyncio.sleep(1)
            return {
                "first_s": first - began,
                "first_bytes": first_bytes,
                "work_s": ended - began,
                "fetched_bytes": fetched(),
            }


async def _must(sandbox: AsyncSandbox, command: str) -> None:
    done = await sandbox.exec(command, user="root", timeout_s=900)
    if done.exit_code != 0:
        sys.exit(f"the work failed: {done.text}")


def _whole(folder: Path, host: str) -> dict[str, float]:
    with TemporaryDirectory(prefix="whole-", dir=folder) as name:
        layout, bundle = Path(name) / "layout", Path(name) / "bundle"
        drop_page_cache()
        written, began = _written_bytes(), time.monotonic()
        _run("skopeo", "copy", "--quiet", "--src-tls-verify=false", f"docker://{host}/{IMAGE}:1", f"oci:{layout}:1")
        _run("umoci", "unpack", "--image", f"{layout}:1", str(bundle))
        root = bundle / "rootfs"
        _run("chroot", str(root), "/bin/true")
        first = time.monotonic()
        _run("mount", "-t", "proc", "proc", str(root / "proc"))
        try:
            _run("chroot", str(root), "/bin/bash", "-c", WORK)
        finally:
            _run("umount", str(root / "proc"))
        ended = time.monotonic()
        subprocess.run(["sync"], check=True)
        fetched = sum(path.stat().st_size for path in (layout / "blobs").rglob("*") if path.is_file())
        return {
            "first_s": first - began,
            "first_bytes": fetched,
            "work_s": ended - began,
            "fetched_bytes": fetched,
            "written_bytes": _written_bytes() - written,
        }


def _image(state_dir: Path) -> tuple[int, int]:
    from barchan.image.erofs import Erofs
    from barchan.image.store import ImageStore

    images = ImageStore(state_dir / "images")
    template = images.resolve(IMAGE)
    files = 0
    for layer in template.layers:
        with Erofs.open(images.layer_path(layer)) as tree:
            files += sum(1 for _ in tree.walk())
    return template.size_bytes, files


def _served_bytes(log: Path) -> int:
    """Of all answers in a web server's log in the usual format: the number after the status."""
    lines = log.read_text().splitlines() if log.exists() else []
    return sum(int(line.split('"')[2].split()[1]) for line in lines)


def _written_bytes() -> int:
    """By the device that /var/tmp is on."""
    device = os.stat("/var/tmp").st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(stat[FIELD_SECTORS_WRITTEN]) * SECTOR_BYTES


def _barchan(state_dir: Path, *words: str) -> None:
    environment = {**os.environ, "BARCHAN_STATE_DIR": str(state_dir)}
    subprocess.run([Path(sys.executable).parent / "barchan", *words], env=environment, check=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{words[0]} failed: {done.stdout[-500:]}{done.stderr[-2000:]}")


def _made(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _table(results: dict[str, dict[str, float]]) -> None:
    size = results["image"]["bytes"]
    print(f"\n{'':12} {'to true':>9} {'to the end':>11} {'fetched':>12} {'of image':>9} {'written':>12}")
    for name in ("on_demand", "recorded", "whole"):
        row = results[name]
        print(
            f"{name:12} {row['first_s']:8.2f}s {row['work_s']:10.2f}s {row['fetched_bytes'] / 2**20:8.1f} MiB "
            f"{row['fetched_bytes'] / size:8.1%} {row['written_bytes'] / 2**20:8.1f} MiB"
        )
    demand, whole = results["on_demand"], results["whole"]
    print(f"\nto the first program: {whole['first_s'] / demand['first_s']:.1f} times as fast on demand")
    print(f"to the end: {whole['work_s'] / demand['work_s']:.1f} times as fast on demand")


if __name__ == "__main__":
    sys.exit(main())
