"""A FUSE file system mounted nowhere, as the supervisor makes one, for tests that serve it."""

import ctypes
import os

_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(returned: int) -> int:
    if returned < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return returned


def open_fuse() -> tuple[int, int]:
    """Descriptors of the device and of the file system."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    context = _checked(_libc.syscall(_SYS_FSOPEN, b"fuse", 1))
    options = {"fd": str(device), "rootmode": "40000", "user_id": "0", "group_id": "0"}
    for key, value in options.items():
        _checked(_libc.syscall(_SYS_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0))
    _checked(_libc.syscall(_SYS_FSCONFIG, context, _SET_FLAG, b"allow_other", None, 0))
    _checked(_libc.syscall(_SYS_FSCONFIG, context, _CREATE, None, None, 0))
    mounted = _checked(_libc.syscall(_SYS_FSMOUNT, context, 1, 1))
    os.close(context)
    return device, mounted
