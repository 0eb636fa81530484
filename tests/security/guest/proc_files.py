"""A guest tries to read or write what /proc and /sys know of the host's kernel."""

import os

from tests.security.guest import kit

SECRET = [
    *("iomem", "ioports", "interrupts", "kallsyms", "kcore", "key-users", "keys", "kmsg", "kpagecgroup", "kpagecount"),
    *("kpageflags", "latency_stats", "modules", "pagetypeinfo", "sched_debug", "slabinfo", "timer_list", "vmallocinfo"),
]


def readable(name: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        return kit.read(f"/proc/{name}", 64).decode("latin-1") or None

    return attempt


def sysrq() -> kit.Evidence:
    """The help key, which only prints to the kernel's log."""
    kit.write("/proc/sysrq-trigger", b"h")
    return "sysrq h"


def same_again(path: str) -> kit.Attempt:
    """Writing a setting's own value back harms nobody, and shows whether it can be written."""

    def attempt() -> kit.Evidence:
        kit.write(path, kit.read(path))
        return f"{path} was written"

    return attempt


def _opens_for_writing(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def writable_below(root: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        found = []
        for directory, names, files in os.walk(root):
            # One's own processes are one's own to change; process 1 has a program for itself.
            names[:] = [
                name for name in names if not (directory == "/proc" and (name.isdigit() or name.endswith("self")))
            ]
            found += [path for name in files if _opens_for_writing(path := os.path.join(directory, name))]
        return f"{len(found)} files, such as {found[:20]}" if found else None

    return attempt


def creates_in(path: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        os.mkdir(f"{path}/made")
        return f"{path}/made"

    return attempt


ATTEMPTS: dict[str, kit.Attempt] = {
    **{f"read {name}": readable(name) for name in SECRET},
    "sysrq": sysrq,
    "core_pattern": same_again("/proc/sys/kernel/core_pattern"),
    "printk": same_again("/proc/sys/kernel/printk"),
    "overcommit_memory": same_again("/proc/sys/vm/overcommit_memory"),
    "hostname": same_again("/proc/sys/kernel/hostname"),
    "ip_forward": same_again("/proc/sys/net/ipv4/ip_forward"),
    "writable in /proc": writable_below("/proc"),
    "writable in /sys": writable_below("/sys"),
    "mkdir in /sys": creates_in("/sys"),
    "mkdir in /sys/devices": creates_in("/sys/devices/system"),
}

if __name__ == "__main__":
    kit.run(ATTEMPTS)
