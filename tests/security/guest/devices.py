"""A guest looks for device nodes that do more than the harmless ones, and tries to make some."""

import os
import stat

from tests.security.guest import kit

HARMLESS = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}  # null zero full random urandom tty ptmx
WANTED = {"mem": (1, 1), "kmsg": (1, 11), "tun": (10, 200), "fuse": (10, 229), "loop-control": (10, 237)}


def present() -> kit.Evidence:
    found = []
    for directory, _, files in os.walk("/dev"):
        for name in files:
            status = os.lstat(os.path.join(directory, name))
            device = (os.major(status.st_rdev), os.minor(status.st_rdev))
            if stat.S_ISBLK(status.st_mode) or (
                stat.S_ISCHR(status.st_mode) and device not in HARMLESS and device[0] != 136
            ):
                found.append(f"{directory}/{name} {device}")
    return f"{found}" if found else None


def opens(name: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        os.open(f"/dev/{name}", os.O_RDWR | os.O_NONBLOCK)
        return f"/dev/{name} is open"

    return attempt


def reads_log() -> kit.Evidence:
    return kit.read("/dev/kmsg", 8192).decode("utf-8", "replace")


def makes(place: str, name: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        path = f"{place}/made-{name}"
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*WANTED[name]))
        return f"{path} was made"

    return attempt


def makes_in_dev() -> kit.Evidence:
    with open("/dev/made", "w"):
        return "a file in /dev"


def replaces_null() -> kit.Evidence:
    os.rename("/dev/null", "/dev/none")
    return "/dev/null was renamed"


def opens_controlling_console() -> kit.Evidence:
    os.open("/dev/console", os.O_RDWR | os.O_NONBLOCK)
    return "the console"


ATTEMPTS: dict[str, kit.Attempt] = {
    "present": present,
    **{f"open {name}": opens(name) for name in WANTED},
    "kernel log": reads_log,
    **{f"mknod {name} in {place}": makes(place, name) for place in ("/tmp", "/dev/shm") for name in ("mem", "kmsg")},
    "file in /dev": makes_in_dev,
    "rename null": replaces_null,
    "console": opens_controlling_console,
}

if __name__ == "__main__":
    kit.run(ATTEMPTS)
