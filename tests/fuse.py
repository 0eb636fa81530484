"""File systems mounted nowhere, for tests that serve them or hand them on."""

import ctypes
import os
from pathlib import Path

_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(returned: int) -> int:
    if returned < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return returned


def _open(kind: str, options: dict[str, str], *flags: str) -> int:
    context = _checked(_libc.syscall(_SYS_FSOPEN, kind.encode(), 1))
    try:
        for key, value in options.items():
            _checked(_libc.syscall(_SYS_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0))
        for flag in flags:
            _checked(_libc.syscall(_SYS_FSCONFIG, context, _SET_FLAG, flag.encode(), None, 0))
        _checked(_libc.syscall(_SYS_FSCONFIG, context, _CREATE, None, None, 0))
        return _checked(_libc.syscall(_SYS_FSMOUNT, context, 1, 1))
    finally:
        os.close(context)


def open_fuse() -> tuple[int, int]:
    """Descriptors of the device and of the file system, as the supervisor makes them."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = {"fd": str(device), "rootmode": "40000", "user_id": "0", "group_id": "0"}
    return device, _open("fuse", options, "allow_other")


def open_erofs(image: Path) -> int:
    """A descriptor of the file system in that file, as the reader makes it."""
    return _open("erofs", {"source": os.fspath(image)})
