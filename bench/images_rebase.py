"""A new base under 1,000 task images: time and bytes. `make bench-images`.

On a node of its own: a base, 1,000 images of one small layer each on it, and a second base; then `client.rebase`.
Prints what it took beside what building each image again would write. Writes images-rebase.json to --out.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import barchan
from barchan.image.compose import config_of
from barchan.image.pack import make_layer
from barchan.image.store import ImageStore
from barchan.image.template import Template
from barchan.sdk.endpoint import default_state_dir
from scripts.own_node import own_node


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--templates", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/images-rebase"))
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("needs root (try: sudo make bench-images)")
    with TemporaryDirectory(prefix="barchan-rebase-", dir="/var/tmp") as name, own_node(_nothing(Path(name))) as node:
        machine = ImageStore(default_state_dir() / "images")
        store = ImageStore(node.state_dir / "images")
        base = _copied(machine, store, "debian", "base-1", b"one\n")
        _copied(machine, store, "debian", "base-2", b"two\n")
        for number in range(options.templates):
            _task(store, base, number)
        before = _bytes(store.root)
        result = asyncio.run(_rebase(node.state_dir, options.templates))
        result["written_bytes"] = _bytes(store.root) - before
        result["template_bytes"] = store.resolve("task-0").size_bytes
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "images-rebase.json").write_text(json.dumps(result, indent=2) + "\n")
    whole = result["template_bytes"] * result["templates"]
    print(
        f"{result['templates']:.0f} templates: {result['rebase_s']:.2f} s, the store grew by "
        f"{result['written_bytes'] / 2**10:.0f} KiB; a rebuild of each would write {whole / 2**30:.0f} GiB; "
        f"a sandbox of the last one started in {result['create_s'] * 1e3:.0f} ms and saw the new base"
    )
    return 0


async def _rebase(state_dir: Path, count: int) -> dict[str, float]:
    async with barchan.connect_async(state_dir=state_dir) as client:
        began = time.monotonic()
        done = await client.rebase("base-1", "base-2")
        rebase_s = time.monotonic() - began
        if len(done) != count or any(each.refused for each in done):
            sys.exit(f"not all were rebased: {[each for each in done if each.refused][:3]}")
        began = time.monotonic()
        async with await client.create(f"task-{count - 1}") as sandbox:
            create_s = time.monotonic() - began
            seen = (await sandbox.exec("cat /etc/base /task/number")).check().text.split()
            if seen != ["two", str(count - 1)]:
                sys.exit(f"the sandbox saw {seen}")
    return {"templates": count, "rebase_s": rebase_s, "create_s": create_s}


def _copied(machine: ImageStore, store: ImageStore, image: str, name: str, word: bytes) -> Template:
    """The machine's image under another name, with a word of its own in a layer above."""
    template = machine.resolve(image)
    with store.workspace() as workspace:
        for layer in template.layers:
            target = store.layer_path(layer)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.write_bytes(machine.layer_path(layer).read_bytes())
        (workspace / "tree/etc").mkdir(parents=True)
        (workspace / "tree/etc/base").write_bytes(word)
        made = make_layer(workspace / "tree", workspace, "erofs")
        return store.commit(config_of(template, name=name), (made, *template.layers))


def _task(store: ImageStore, base: Template, number: int) -> None:
    with store.workspace() as workspace:
        (workspace / "tree/task").mkdir(parents=True)
        (workspace / "tree/task/number").write_text(f"{number}\n")
        made = make_layer(workspace / "tree", workspace, "erofs")
        config = config_of(base, name=f"task-{number}", base_layers=len(base.layers))
        store.commit(config, (made, *base.layers))


def _nothing(folder: Path) -> Path:
    (folder / "nothing").mkdir()
    return folder / "nothing"


def _bytes(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
