"""Guest root tries to have or gain a capability, by inheritance, ambience, a file, or a set-id program."""

import ctypes
import os
import shutil
import subprocess

from tests.security.guest import kit

PR_CAPBSET_READ = 23
PR_SET_SECUREBITS = 28
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2
CAP_VERSION_3 = 0x20080522
libc = ctypes.CDLL(None, use_errno=True)


def _status(pid: str, field: str) -> str:
    for line in kit.read(f"/proc/{pid}/status").decode().splitlines():
        if line.startswith(f"{field}:"):
            return line.split()[1]
    raise AssertionError(field)


def has_one() -> kit.Evidence:
    sets = {field: _status("self", field) for field in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")}
    return " ".join(f"{name}={value}" for name, value in sets.items() if int(value, 16)) or None


def bounding_set() -> kit.Evidence:
    return next((f"capability {number}" for number in range(64) if libc.prctl(PR_CAPBSET_READ, number) == 1), None)


def capset() -> kit.Evidence:
    header = (ctypes.c_uint32 * 2)(CAP_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF] * 2)
    data[3:6] = [0, 0, 0]
    libc.capset(header, data)
    return None if _status("self", "CapEff") == "0" * 16 else _status("self", "CapEff")


def ambient() -> kit.Evidence:
    raised = [number for number in range(41) if libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number, 0, 0) == 0]
    return f"{raised}" if raised else None


def change_root() -> kit.Evidence:
    os.chroot("/tmp")
    return "chroot to /tmp"


def give_file_away() -> kit.Evidence:
    with open("/tmp/given", "w"):
        os.chown("/tmp/given", 1234, 1234)
    return "chown to 1234"


def become_other() -> kit.Evidence:
    os.setgroups([])
    os.setresuid(1234, 1234, 1234)
    return "setresuid to 1234"


def become_init_user() -> kit.Evidence:
    os.setresuid(65535, 65535, 65535)
    return "setresuid to the init's user"


def file_capabilities() -> kit.Evidence:
    shutil.copy("/bin/true", "/tmp/capable")
    # Revision 2, effective, all 41 capabilities permitted.
    os.setxattr("/tmp/capable", "security.capability", b"\x01\x00\x00\x02" + (b"\xff\xff\xff\xff" + bytes(4)) * 2)
    return "security.capability set"


def set_id_program() -> kit.Evidence:
    """Root leaves it, and whoever runs this next tries it."""
    path = "/tmp/set-id"
    if os.getuid() == 0:
        shutil.copy("/usr/bin/id", path)
        os.chmod(path, 0o6755)
        return None
    said = subprocess.run([path, "-u"], capture_output=True, check=True, text=True).stdout.strip()
    return f"euid {said}" if said == "0" else None


ATTEMPTS: dict[str, kit.Attempt] = {
    "has one": has_one,
    "bounding set": bounding_set,
    "capset": capset,
    "ambient": ambient,
    "chroot": change_root,
    "chown": give_file_away,
    "setuid": become_other,
    "setuid init": become_init_user,
    "file capabilities": file_capabilities,
    "set-id program": set_id_program,
}

if __name__ == "__main__":
    # A shell first: what root gains, it gains at an exec.
    subprocess.run(["/bin/sh", "-c", ":"], check=True)
    kit.run(ATTEMPTS)
