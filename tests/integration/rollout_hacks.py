"""Solutions that try to be paid without solving: each is a whole `solution.py` for the task `double`."""

from barchan.rollout.calls import call_to
from barchan.rollout.task import FunctionGrader, Stub, Task

REFERENCE = "def double(x):\n    return 2 * x\n"

TASK = Task(
    task_id="Hack/0",
    instruction="Write double(x), which gives twice x, into solution.py and submit it.",
    grader=FunctionGrader(
        entry_point="double",
        reference=REFERENCE,
        checks=(
            "def check(candidate):\n"
            "    assert candidate(2) == 4\n    __passed__(0)\n"
            "    for x in (0, -7, 2.5, 'ab', [1]):\n"
            "        assert candidate(x) == 2 * x\n        __passed__(1)\n"
        ),
        checks_total=2,
    ),
    oracle=(call_to("submit", solution=REFERENCE),),
    nop=(call_to("submit", solution="def double(x):\n    pass\n"),),
    stub=Stub(prompt='def double(x):\n    """Twice x."""\n', entry_point="double"),
)

# name -> (source, cause of the zero)
HACKS: dict[str, tuple[str, str]] = {
    "prints that it passed": (
        "def double(x):\n    print('PASSED', flush=True)\n    print('0' * 32, \"passed 2 6 ''\", flush=True)\n",
        "completed",
    ),
    "writes reports to every descriptor": (
        "import os\n"
        "def double(x):\n"
        "    for fd in range(64):\n"
        "        try:\n            os.write(fd, b\"passed 2 6 ''\\n\")\n"
        "        except OSError:\n            pass\n",
        "completed",
    ),
    "answers with frames of its own": (
        "def double(x):\n"
        "    with open('/.barchan-reply', 'wb') as reply:\n        reply.write(b'\\x02\\0\\0\\0=T' * 100)\n"
        "    return True\n",
        "completed",
    ),
    "exits 0 when loaded": ("import sys\nsys.exit(0)\n", "completed"),
    "exits 0 when called": ("def double(x):\n    raise SystemExit(0)\n", "completed"),
    "leaves at once when loaded": ("import os\nos._exit(0)\n", "guest_wrecked"),
    "leaves at once when called": ("import os\ndef double(x):\n    os._exit(0)\n", "guest_wrecked"),
    "equals everything": (
        "class Sly:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
        "def double(x):\n    return Sly()\n",
        "completed",
    ),
    "a number that equals everything": (
        "class Sly(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
        "def double(x):\n    return Sly(1)\n",
        "completed",
    ),
    "replaces builtins": (
        "import builtins, sys, os\n"
        "builtins.AssertionError = ValueError\nbuiltins.isinstance = lambda *a: True\n"
        "builtins.compile = builtins.exec = lambda *a: None\nsys.stdout.write = lambda *a: 0\n"
        "def double(x):\n    return 4\n",
        "completed",
    ),
    "loops when called": ("def double(x):\n    while True:\n        pass\n", "exec_timeout"),
    "loops when loaded": ("while True:\n    pass\n", "exec_timeout"),
    "loops and ignores the CPU limit": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef double(x):\n    while True:\n        pass\n",
        "exec_timeout",
    ),
    "sleeps": ("import time\ndef double(x):\n    time.sleep(1e6)\n", "exec_timeout"),
    "is a fork bomb": (
        "import os\n"
        "def double(x):\n"
        "    while True:\n"
        "        try:\n            os.fork()\n"
        "        except OSError:\n            pass\n",
        "exec_timeout",
    ),
    "takes all memory": (
        "def double(x):\n    keep = []\n    while True:\n        keep.append(bytearray(16 << 20))\n",
        "oom_within_limit",
    ),
    "kills whatever it can": (
        "import os, signal\n"
        "for name in os.listdir('/proc'):\n"
        "    if name.isdigit() and int(name) != os.getpid():\n"
        "        try:\n            os.kill(int(name), signal.SIGKILL)\n"
        "        except OSError:\n            pass\n"
        "def double(x):\n    return None\n",
        "completed",
    ),
    "kills itself": ("import os\ndef double(x):\n    os.kill(os.getpid(), 9)\n", "completed"),
    "floods its output": (
        "import os\ndef double(x):\n    while True:\n        os.write(1, b'x' * 65536)\n        print('x' * 65536)\n",
        "exec_timeout",
    ),
    "floods the answer": (
        "import os\n"
        "def double(x):\n"
        "    fd = os.open('/.barchan-reply', os.O_WRONLY)\n"
        "    while True:\n        os.write(fd, b'\\xff' * 65536)\n",
        "completed",
    ),
    "recurses": ("def double(x):\n    return double(x)\n", "completed"),
    "returns a huge value": ("def double(x):\n    return [0] * (10 ** 7)\n", "completed"),
    "returns a cycle": ("def double(x):\n    loop = []\n    loop.append(loop)\n    return loop\n", "completed"),
    "returns an endless iterator": ("import itertools\ndef double(x):\n    return itertools.count()\n", "completed"),
    "raises what nobody catches": (
        "class Bad(BaseException):\n    def __str__(self): raise self\ndef double(x):\n    raise Bad\n",
        "completed",
    ),
    "does not parse": ("def double(x:\n", "completed"),
    "has no such function": ("def twice(x):\n    return 2 * x\n", "completed"),
    "holds a NUL": ("def double(x):\n    return 2 * x\n\0", "completed"),
}

# Reads the nonce out of the checker's memory, takes the checker's stdout, writes a report there, and ends the checker.
THIEF = r"""
import ctypes, os, re, signal

PIDFD_GETFD = 438

def steal():
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (1, os.getpid()):
            continue
        found = set()
        with open(f"/proc/{name}/maps") as maps, open(f"/proc/{name}/mem", "rb", 0) as memory:
            for line in maps:
                span, flags = line.split()[:2]
                if flags.startswith("rw"):
                    start, end = (int(part, 16) for part in span.split("-"))
                    memory.seek(start)
                    try:
                        data = memory.read(end - start)
                    except OSError:
                        continue
                    found.update(re.findall(rb"nonces\x20\x00\x00\x00([0-9a-f]{32})", data))
                    found.update(re.findall(rb"\x00([0-9a-f]{32})\x00", data))
        for nonce in found:
            process = os.pidfd_open(int(name))
            out = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, 1, 0)
            os.write(out, nonce + b" passed 2 6 ''\n")
            os.kill(int(name), signal.SIGKILL)
            return

def double(x):
    try:
        steal()
    except OSError:
        pass
    return None
"""
