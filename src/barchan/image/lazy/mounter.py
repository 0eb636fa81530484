"""A child of the reader that mounts: its system calls wait for answers of its parent, which must never wait for them.

It is forked before the parent has threads, and ends with it. A parent that is killed while this child waits dies at
once; the child's call is answered by the next reader.
"""

import ctypes
import os
import signal
import socket

_FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 1, 6
_RDONLY, _NOSUID, _NODEV = 1, 2, 4
_CLOEXEC = 1
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432  # the same on every architecture
_PR_SET_PDEATHSIG = 1
_NAME_BYTES = 64

_libc = ctypes.CDLL(None, use_errno=True)


def start_mounter() -> tuple[socket.socket, int]:
    """Fork the child: (the socket to it, its pid). A layer's digest and the directory's descriptor ask for a mount."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    return ours, pid


def ask(mounter: socket.socket, digest: str, directory: int) -> int:
    """A detached read-only mount of an EROFS file of that name in the directory. Blocks; one call at a time.

    Raises:
        OSError: It can't be mounted.
    """
    socket.send_fds(mounter, [digest.encode()], [directory])
    answer, fds, _, _ = socket.recv_fds(mounter, 16, 1)
    if fds:
        return fds[0]
    number = int(answer or b"32")
    raise OSError(number, f"mounting layer {digest}: {os.strerror(number)}")


def _serve(asked: socket.socket) -> None:
    while True:
        digest, fds, _, _ = socket.recv_fds(asked, _NAME_BYTES, 1)
        if not digest or not fds:
            return
        try:
            mounted = _mount(digest.decode(), fds[0])
        except OSError as error:
            asked.send(str(error.errno).encode())
        else:
            socket.send_fds(asked, [b"0"], [mounted])
            os.close(mounted)
        finally:
            os.close(fds[0])


def _mount(digest: str, directory: int) -> int:
    file = os.open(digest, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        context = _checked(_libc.syscall(_SYS_FSOPEN, b"erofs", _CLOEXEC))
        try:
            source = f"/proc/self/fd/{file}".encode()
            _checked(_libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_SET_STRING, b"source", source, 0))
            _checked(_libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0))
            return _checked(_libc.syscall(_SYS_FSMOUNT, context, _CLOEXEC, _RDONLY | _NOSUID | _NODEV))
        finally:
            os.close(context)
    finally:
        os.close(file)


def _checked(returned: int) -> int:
    if returned < 0:
        raise OSError(ctypes.get_errno(), "mount")
    return returned
