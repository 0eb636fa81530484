"""`barchan snapshot`: keep sandboxes as they are, look at what is kept, send it to other nodes, and remove it."""

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from cyclopts import App

import barchan
from barchan.cli.common import (
    DEFAULTS,
    FAILED,
    OK,
    Common,
    human_age,
    human_bytes,
    key_values,
    print_error,
    print_json,
    print_table,
)
from barchan.cli.run import Words
from barchan.errors import InvalidSpec, NotFound
from barchan.model.snapshot_info import SnapshotInfo, SnapshotKind

app = App(name="snapshot", help_format="plaintext")


@app.command
def make(
    sandbox: str,
    /,
    *,
    name: str | None = None,
    kind: SnapshotKind = "fs",
    metadata: Words = (),
    common: Common = DEFAULTS,
) -> int:
    """Keep a sandbox as it is at this moment, and print the snapshot's id.

    For example:

        barchan snapshot make sb_x1
        barchan snapshot make sb_x1 --kind memory --metadata step=12

    Args:
        sandbox: Its id; it goes on.
        name: Of the image of its files; one of that name gives way.
        kind: fs: its files. memory: its processes, too.
        metadata: KEY=VALUE, to find it by; may be repeated.
    """
    with barchan.connect(**common.connection) as client:
        made = client.attach(sandbox).snapshot(name, kind=kind, metadata=key_values(metadata, "--metadata"))
    if common.json:
        print_json(made.info)
    else:
        sys.stdout.write(f"{made.id}\n")
    return OK


@app.command(name="list")
def list_(*, tree: bool = False, metadata: Words = (), common: Common = DEFAULTS) -> int:
    """List the snapshots of a node.

    OWN is what goes from its disk with a snapshot; SHARED is what other
    images have, too.

    For example:

        barchan snapshot list
        barchan snapshot list --tree --metadata job=eval

    Args:
        tree: Each below the one that it came of.
        metadata: KEY=VALUE that a snapshot must have; may be repeated.
    """
    with barchan.connect(**common.connection) as client:
        found = [snapshot.info for snapshot in client.snapshots(metadata=key_values(metadata, "--metadata"))]
    if common.json:
        print_json(found)
        return OK
    rows = list(_tree_rows(found, "", "", "")) if tree else [_row(info, "") for info in found]
    columns = ("SNAPSHOT", "KIND", "AGE", "OWN", "SHARED", "IMAGE", "METADATA")
    print_table(columns, rows, empty="no snapshots (try: barchan snapshot make SANDBOX)")
    return OK


def _row(info: SnapshotInfo, branch: str) -> list[str]:
    return [
        branch + info.snapshot_id,
        info.kind,
        human_age(time.time() - info.created_unix_s),
        human_bytes(info.own_bytes),
        human_bytes(info.shared_bytes),
        info.image.name,
        ",".join(f"{key}={value}" for key, value in info.metadata.items()),
    ]


def _tree_rows(found: Sequence[SnapshotInfo], parent: str, branch: str, below: str) -> Iterator[list[str]]:
    """Those that came of `parent`, each with what came of it. One whose parent is not listed is a root."""
    ids = {info.snapshot_id for info in found}
    children = [info for info in found if (info.parent if info.parent in ids else "") == parent]
    for info in children:
        is_last = info is children[-1]
        turn, straight = ("└─ " if is_last else "├─ ", "   " if is_last else "│  ") if parent else ("", "")
        yield _row(info, branch + turn)
        yield from _tree_rows(found, info.snapshot_id, below + straight, below + straight)


@app.command
def show(snapshot: str, /, *, common: Common = DEFAULTS) -> int:
    """Show one snapshot.

    For example:

        barchan snapshot show snap_0123456789abcdef

    Args:
        snapshot: Its id.
    """
    with barchan.connect(**common.connection) as client:
        info = client.snapshot(snapshot).info
    if common.json:
        print_json(info)
        return OK
    lines: dict[str, Any] = {
        "snapshot": info.snapshot_id,
        "kind": info.kind,
        "of": info.sandbox_id,
        "parent": info.parent or "-",
        "image": f"{info.image.name} ({len(info.image.layers)} layers, {human_bytes(info.image.size_bytes)})",
        "own": human_bytes(info.own_bytes),
        "shared": human_bytes(info.shared_bytes),
    }
    if info.kind == "memory":
        lines["memory"] = f"{human_bytes(info.memory_bytes)} on disk, of {human_bytes(info.resident_bytes)}"
    lines |= {f"metadata {key}": value for key, value in info.metadata.items()}
    print_table(("", ""), [[key, value] for key, value in lines.items()], empty="")
    return OK


@app.command
def rm(*snapshots: str, common: Common = DEFAULTS) -> int:
    """Remove snapshots with their images. What came of them stays.

    For example:

        barchan snapshot rm snap_0123456789abcdef

    Args:
        snapshots: Their ids.
    """
    if not snapshots:
        raise InvalidSpec("give the ids of snapshots")
    missing = []
    with barchan.connect(**common.connection) as client:
        for snapshot_id in snapshots:
            try:
                client.snapshot(snapshot_id).remove()
            except NotFound:
                missing.append(snapshot_id)
    if common.json:
        print_json({"removed": len(snapshots) - len(missing), "not_found": missing})
    else:
        sys.stdout.write(f"removed {len(snapshots) - len(missing)}\n")
    if missing:
        print_error(f"no snapshot {', '.join(missing)}", "barchan snapshot list")
    return FAILED if missing else OK


@app.command
def push(*snapshots: str, store: str | None = None, common: Common = DEFAULTS) -> int:
    """Send snapshots to the node's blob store, from where other nodes have them. They stay here, too.

    For example:

        barchan snapshot push snap_0123456789abcdef
        barchan snapshot push snap_0123456789abcdef --store s3://bucket/images

    Args:
        snapshots: Their ids.
        store: The blob store that this user's own node is started with. [default: the node's]
    """
    with barchan.connect(**_with_store(snapshots, store, common)) as client:
        for snapshot_id in snapshots:
            pushed = client.snapshot(snapshot_id).push()
            if common.json:
                print_json(pushed)
            else:
                sys.stdout.write(f"{pushed.snapshot_id}  {human_bytes(pushed.bytes_sent)} sent to {pushed.store}\n")
    return OK


@app.command
def pull(*snapshots: str, store: str | None = None, name: str | None = None, common: Common = DEFAULTS) -> int:
    """Have snapshots that other nodes have sent to the node's blob store here, too.

    They keep their ids. Sandboxes of one with memory go on with its
    processes where kernel and processor are of the same kind.

    For example:

        barchan snapshot pull snap_0123456789abcdef
        barchan snapshot pull snap_0123456789abcdef --name mine

    Args:
        snapshots: Their ids.
        store: The blob store that this user's own node is started with. [default: the node's]
        name: Of the image of its files here; goes with one id. [default: as where it was made]
    """
    if name is not None and len(snapshots) != 1:
        raise InvalidSpec("--name goes with one id")
    with barchan.connect(**_with_store(snapshots, store, common)) as client:
        for snapshot_id in snapshots:
            pulled = client.pull_snapshot(snapshot_id, name=name)
            if common.json:
                print_json(pulled.info)
            else:
                sys.stdout.write(f"{pulled.id}  {pulled.kind}  {pulled.name}\n")
    return OK


def _with_store(snapshots: tuple[str, ...], store: str | None, common: Common) -> dict[str, Any]:
    if not snapshots:
        raise InvalidSpec("give the ids of snapshots")
    return common.connection if store is None else {**common.connection, "store": store}
