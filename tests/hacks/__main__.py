"""`python -m tests.hacks [--json FILE] [--only WORD]`: every attack and twin, on a node of their own, as a table."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec

import barchan
from barchan.sdk.endpoint import default_state_dir
from tests.hacks import CASES
from tests.hacks.play import Played, Player
from tests.hacks.table import is_good, rows, text
from tests.integration.test_tests_grader import IMAGE
from tests.nodes import NodeProcess
from tests.stores import copy_base


async def _play(folder: Path, node: NodeProcess, only: str) -> list[Played]:
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        cases = [case for case in CASES if only in f"{case.format}: {case.hack}: {case.name}"]
        return await Player(client, folder).play_all(cases)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.hacks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="cases whose format, class or name holds this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hacks-") as name:
        folder = Path(name)
        node = NodeProcess(folder / "node", copy_base(default_state_dir() / "images", folder / "images", IMAGE))
        (folder / "tasks").mkdir()
        node.start()
        try:
            played = asyncio.run(_play(folder / "tasks", node, arguments.only))
        finally:
            left = node.end()
    print(text(played))
    if left:
        print(f"left behind: {left}")
    if arguments.json is not None:
        table = {"classes": rows(played), "cases": played}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(table)) + b"\n")
    return 0 if is_good(played) and not left else 1


if __name__ == "__main__":
    sys.exit(main())
