"""Dump a live sandbox with CRIU, restore it twice, and check that its init and its programs live on in both.

    sudo python scripts/criu_trial.py --criu COMMAND --layer FILE.erofs|DIR [--build DIR] [--keep]

The layer needs bash and python3. COMMAND may have arguments (a loader in front of a newer release's binary). One
restore takes the uid range of the dumped sandbox, the other, a fork of it, a range of its own. Prints a line per check
and the times; ends with 1 if a check failed. What was learnt: docs/decisions/0007-memory-snapshots-with-criu.md.
"""

import argparse
import ast
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from criu_links import Guest, Supervisor
from criu_steps import (
    CGROUPS,
    HOSTNAME,
    NAMESPACES,
    PROGRAM,
    SANDBOX,
    SPOOLED,
    UIDS,
    Dumped,
    Restored,
    pid_inside,
    processes_of,
    shift_user_namespace,
)

from barchan.wire import guest


class Checks:
    """What must hold in a restored sandbox."""

    def __init__(self, dumped: Dumped) -> None:
        self.dumped, self.passed = dumped, True
        self.namespaces = {os.readlink(path) for path in Path("/proc/self/ns").iterdir()}

    def check(self, what: str, ok: bool, seen: object = "") -> None:
        print(f"{'ok' if ok else 'FAILED':7}{what}{f': {seen}' if seen != '' else ''}")
        self.passed &= ok

    def protocol(self, link: Guest) -> None:
        dumped = self.dumped
        shell, python, bulk = dumped.shell.handle, dumped.python.handle, dumped.bulk.handle
        listed = guest.decode_list(link.request(lambda tag: guest.list_from(0, tag)))
        self.check("LIST shows the same processes", listed == dumped.listed, [item.process_id for item in listed])
        for handle in (shell, bulk):
            link.follow(handle, 0)
        text = link.expect(bulk, "x")
        self.check("a spool file is whole", (len(text), text.strip()) == (SPOOLED, "x"))
        self.check("the terminal's output is whole", "go2" in link.expect(shell, "go2"))
        started = link.start("python", ["/usr/bin/python3", "-c", PROGRAM], guest.StartFlag.STDIN)
        self.check("a repeated START starts nothing", (started.handle, started.existing) == (python, True))
        link.expect(python, "\n")
        fresh = link.start("fresh", ["/bin/bash", "-c", "cat /tmp/file; hostname"], guest.StartFlag(0))
        self.check("a new START runs and sees the files", f"kept\n{HOSTNAME}" in link.expect(fresh.handle, HOSTNAME))

    def programs(self, link: Guest, gap_s: float) -> None:
        dumped, shell, python = self.dumped, self.dumped.shell.handle, self.dumped.python.handle
        at = link.stdin(shell, dumped.shell_in, "echo again$((value+1)); jobs; stty size; echo done$((2))\n")
        text = link.expect(shell, "done2")
        self.check(
            "the shell keeps variable, job and terminal", all(word in text for word in ("again42", "Running", "24 80"))
        )
        link.request(lambda tag: guest.resize(tag, shell, 50, 132))
        link.stdin(shell, at, "stty size; echo end$((1))\n")
        self.check("the terminal can be resized", "50 132" in link.expect(shell, "end1"))
        asked = "counter, os.getpid(), connected(), read_unlinked(), read_semaphore(), denied(), time.monotonic()"
        link.stdin(python, dumped.python_in, f"({asked})\n")
        *kept, denied, monotonic_s = ast.literal_eval(link.expect(python, "\n"))
        expected = [2, dumped.python.pid, b"through", b"unlinked", 7]
        self.check("the program keeps counter, pid, thread, socket, file and semaphore", kept == expected, kept)
        self.check("its filter is in force", denied == (-1, 1), denied)
        went_s = monotonic_s - dumped.monotonic_s
        self.check("its clock goes on from the dump", 0 <= went_s < gap_s, f"{went_s:.3f} s of {gap_s:.3f} s")
        count = guest.decode_number(
            link.request(lambda tag: guest.signal(tag, dumped.bulk.handle, 9, guest.Scope.ALL)), "<I"
        )
        self.check("SIGNAL reaches every process of a start", count == 2, count)

    def isolation(self, restored: Restored) -> None:
        for pid in processes_of(restored.pid):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            seen = status["Seccomp"], status["NoNewPrivs"], int(status["CapBnd"], 16), int(status["Uid"].split()[0])
            own = seen[:3] == ("2", "1", 0) and 0 <= seen[3] - restored.uid_base < UIDS
            self.check(
                f"process {pid_inside(pid)} ({status['Name']}): filter, no_new_privs, bounding set, uid", own, seen
            )
        # A sibling's are there, too, from its own call.
        for name in ("user", "mnt", "pid", "ipc", "cgroup", *NAMESPACES):
            namespace = os.readlink(f"/proc/{restored.pid}/ns/{name}")
            self.check(f"a {name} namespace of its own", namespace not in self.namespaces, namespace)
            self.namespaces.add(namespace)
        owner = os.stat(f"/proc/{restored.pid}/oom_score_adj").st_uid
        self.check(
            "the init's files in /proc are nobody's in the guest", not 0 <= owner - restored.uid_base < UIDS, owner
        )
        parent = int(Path(f"/proc/{restored.pid}/stat").read_text().split()[3])
        self.check("the init's parent is its starter", parent == os.getpid())


def run(options: argparse.Namespace, work: Path, cleanup: contextlib.ExitStack) -> bool:
    command, images = shlex.split(options.criu), work / "images"
    supervisor = Supervisor(options.build, work)
    cleanup.callback(supervisor.shut_down)
    layer = work / "layer"
    layer.mkdir()
    kind = ("--bind",) if options.layer.is_dir() else ("-t", "erofs", "-o", "ro")
    subprocess.run(["mount", *kind, options.layer, layer], check=True)
    cleanup.callback(lambda: subprocess.run(["umount", layer], check=True))

    # The one that sandboxes start from can't be read by anybody in them; CRIU opens it as guest root.
    program = work / "barchan-init"
    shutil.copy(options.build / "barchan-init", program)
    dumped = Dumped(supervisor, options.layer.resolve())
    dumped.start_programs()
    checks = Checks(dumped)
    checks.check("DETACH closes the connection", dumped.detach())
    dumped.pause(CGROUPS / "unified/barchan" / supervisor.name / SANDBOX)
    dumped.look()
    begin = time.monotonic()
    dump_ms = dumped.dump(command, images)
    times = {"dump_ms": dump_ms, "image_kib": sum(path.stat().st_size for path in images.glob("*.img")) >> 10}
    time.sleep(1)
    fork_images = work / "fork-images"
    shutil.copytree(images, fork_images)
    shift_user_namespace(fork_images, dumped.uid_base + UIDS)
    for name, uid_base, source in (("same", dumped.uid_base, images), ("fork", dumped.uid_base + UIDS, fork_images)):
        print(f"--- {name}: uids from {uid_base}")
        restored = Restored(dumped, supervisor, name, uid_base, cleanup)
        restored.make_cgroups()
        restored.make_mounts(layer, program)
        restored.restore(command, source, work)
        gap_s = time.monotonic() - begin
        checks.isolation(restored)
        checks.protocol(restored.link)
        checks.programs(restored.link, gap_s)
        times |= {f"{name}_criu_ms": restored.criu_ms, f"{name}_restore_to_first_ping_ms": restored.first_ping_ms}
    print(json.dumps({key: round(value, 1) for key, value in times.items()}))
    return checks.passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--criu", required=True, help="CRIU 4 and its arguments")
    parser.add_argument("--layer", type=Path, required=True)
    parser.add_argument("--build", type=Path, default=Path(__file__).parents[1] / "src/barchan/_guest")
    parser.add_argument("--keep", action="store_true", help="keep images and logs")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="criu-trial-", dir="/var/tmp"))
    try:
        with contextlib.ExitStack() as cleanup:
            passed = run(options, work, cleanup)
    finally:
        if options.keep:
            print(f"kept {work}")
        else:
            shutil.rmtree(work)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
