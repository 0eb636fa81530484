"""What reading costs by how a layer is kept: an EROFS file, a directory, or on demand with all of it cached.

`make bench-images`. The same tree three ways, each on a fresh node: the base image and one file of random bytes. In a
sandbox of it: the file in order, blocks of it at random, and Python starts that import much; each with the page cache
dropped before, and again with it. Prints a table and writes images-read.json to --out.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import barchan
from barchan.image.compose import config_of
from barchan.image.pack import keep_as, make_layer
from barchan.image.store import ImageStore
from barchan.image.template import LayerKind, Template
from barchan.sdk.aio.sandbox import AsyncSandbox
from barchan.sdk.endpoint import default_state_dir
from scripts.own_node import drop_page_cache, own_node

BIG_MIB = 256
READS = 4000
ROUNDS = 3
MODULES = "asyncio,concurrent.futures,ctypes,decimal,difflib,email.mime.text,http.server,json,logging.config,sqlite3"
MORE = "tarfile,unittest.mock,urllib.request,xml.dom.minidom,xmlrpc.client,zipfile,multiprocessing.pool,pydoc,doctest"
IN_GUEST = f"""
import json, os, random, subprocess, sys, time
what = sys.argv[1]
began = time.monotonic()
if what == "import":
    subprocess.run([sys.executable, "-c", "import {MODULES},{MORE}"], check=True)
else:
    fd = os.open("/data/big", os.O_RDONLY)
    if what == "sequential":
        while os.read(fd, 1 << 20):
            pass
    else:
        blocks = random.Random(7).sample(range({BIG_MIB << 20} // 4096), {READS})
        for block in blocks:
            os.pread(fd, 4096, block * 4096)
print(json.dumps(time.monotonic() - began))
"""
KINDS: tuple[LayerKind, ...] = ("erofs", "dir", "lazy")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/images-read"))
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("needs root (try: sudo make bench-images)")
    with TemporaryDirectory(prefix="barchan-read-", dir="/var/tmp") as name:
        folder = Path(name)
        tree = _tree(folder)
        _image(tree, folder / "erofs", "erofs")
        _image(tree, folder / "dir", "dir")
        _barchan(folder, "image", "push", "read", str(folder / "store"))
        (folder / "lazy").mkdir()
        results = {kind: asyncio.run(_measure(folder, kind)) for kind in KINDS}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "images-read.json").write_text(json.dumps(results, indent=2) + "\n")
    _table(results)
    return 0


def _tree(folder: Path) -> Path:
    """The base image's files, and one of random bytes."""
    images = ImageStore(default_state_dir() / "images")
    base = images.resolve("debian")
    (layer,) = base.layers
    shutil.copyfile(images.layer_path(layer), folder / "packed")
    tree = keep_as(folder / "packed", layer.digest, folder, "dir").path
    (tree / "data").mkdir()
    with (tree / "data" / "big").open("wb") as file:
        for _ in range(BIG_MIB):
            file.write(os.urandom(1 << 20))
    return tree


def _image(tree: Path, root: Path, kind: LayerKind) -> Template:
    base = ImageStore(default_state_dir() / "images").resolve("debian")
    store = ImageStore(root)
    with store.workspace() as workspace:
        return store.commit(config_of(base, name="read"), (make_layer(tree, workspace, kind),))


async def _measure(folder: Path, kind: LayerKind) -> dict[str, float]:
    """Medians; `cold` with an empty page cache, `warm` right after. Of `lazy` all is cached on disk before."""
    words = ("--store", (folder / "store").as_uri()) if kind == "lazy" else ()
    with ExitStack() as stack:
        node = stack.enter_context(own_node(folder / kind, *words))
        async with (
            barchan.connect_async(state_dir=node.state_dir) as client,
            await client.create("read", memory_mib=1024, cpus=2) as sandbox,
        ):
            await sandbox.files.write("/tmp/measure.py", IN_GUEST.encode())
            for what in ("sequential", "import"):
                await _timed(sandbox, what)
            found: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                for what in ("sequential", "random", "import"):
                    await asyncio.to_thread(drop_page_cache)
                    found.setdefault(f"{what}_cold_s", []).append(await _timed(sandbox, what))
                    found.setdefault(f"{what}_warm_s", []).append(await _timed(sandbox, what))
    return {name: sorted(values)[len(values) // 2] for name, values in found.items()}


async def _timed(sandbox: AsyncSandbox, what: str) -> float:
    done = await sandbox.exec(["python3", "/tmp/measure.py", what], timeout_s=300)
    done.check()
    return float(done.text)


def _barchan(folder: Path, *words: str) -> None:
    state = folder / "state"
    state.mkdir(exist_ok=True)
    (state / "images").symlink_to(folder / "erofs")
    environment = {**os.environ, "BARCHAN_STATE_DIR": str(state)}
    subprocess.run([Path(sys.executable).parent / "barchan", *words], env=environment, check=True)


def _table(results: dict[LayerKind, dict[str, float]]) -> None:
    print(f"\n{'':6} {'in order, MiB/s':>22} {'4 KiB at random, /s':>22} {'imports, ms':>18}")
    print(f"{'':6} {'cold':>11} {'warm':>10} {'cold':>11} {'warm':>10} {'cold':>9} {'warm':>8}")
    for kind, row in results.items():
        print(
            f"{kind:6} {BIG_MIB / row['sequential_cold_s']:11.0f} {BIG_MIB / row['sequential_warm_s']:10.0f} "
            f"{READS / row['random_cold_s']:11.0f} {READS / row['random_warm_s']:10.0f} "
            f"{row['import_cold_s'] * 1e3:9.0f} {row['import_warm_s'] * 1e3:8.0f}"
        )


if __name__ == "__main__":
    sys.exit(main())
