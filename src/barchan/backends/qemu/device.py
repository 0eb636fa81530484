"""Giving an outer the host's KVM: a device file of its own in a mount namespace that knows no devices.

What is mounted there belongs to the host's user namespace, so that the device works. A process of its own does it: only
one with a single thread can enter another mount namespace. Run as a program, with the pid of the outer's init.
"""

import asyncio
import ctypes
import os
import stat
import sys

from barchan.errors import BackendError

DEVICE = "/run/kvm"  # in the outer; nothing else there is used
HOST_DEVICE = "/dev/kvm"
GIVE_S = 10.0
_FSOPEN, _FSCONFIG, _FSMOUNT, _MOVE_MOUNT = 430, 431, 432, 429  # the same on every architecture
_CREATE, _NOSUID_NOEXEC, _EMPTY_PATH, _AT_FDCWD = 6, 0x2 | 0x8, 0x4, -100
_CLONE_NEWNS = 0x20000


async def give(init: int) -> None:
    """Mount the device in the outer whose init has this pid.

    Raises:
        BackendError: It can't be.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-m", "barchan.backends.qemu.device", str(init)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(GIVE_S):
            _, said = await process.communicate()
    except TimeoutError as error:
        raise BackendError("giving a sandbox the host's KVM took too long") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise BackendError(f"the host's KVM can't be given to a sandbox: {said.decode('utf-8', 'replace')[-300:]}")


def main(init: int) -> None:
    device = os.stat(HOST_DEVICE).st_rdev
    context = _call("fsopen", _FSOPEN, b"tmpfs", 1)
    _call("fsconfig", _FSCONFIG, context, 1, b"size", b"16384", 0)
    _call("fsconfig", _FSCONFIG, context, _CREATE, None, None, 0)
    mount = _call("fsmount", _FSMOUNT, context, 1, _NOSUID_NOEXEC)
    # The outer holds one machine and nobody else, so whoever is there may use it.
    os.umask(0)
    os.mknod(os.path.basename(DEVICE), stat.S_IFCHR | 0o666, device, dir_fd=mount)
    namespace = os.open(f"/proc/{init}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNS) < 0:
        raise OSError(ctypes.get_errno(), "setns")
    _call("move_mount", _MOVE_MOUNT, mount, b"", _AT_FDCWD, os.path.dirname(DEVICE).encode(), _EMPTY_PATH)


def _call(name: str, number: int, *arguments: int | bytes | None) -> int:
    words = [ctypes.c_long(word) if isinstance(word, int) else ctypes.c_char_p(word) for word in arguments]
    found = int(ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *words))
    if found < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
