"""What is known of a sandbox whose processes and memory were stored."""

from msgspec import Struct

FORMAT = 1


class MemoryRecord(Struct, frozen=True, kw_only=True):
    """`record.json` of a memory directory: what a restore needs besides what the backend has put there.

    Attributes:
        format: Of the memory directory.
        backend: Whose it is.
        engine: What must be equal where it is restored, in words of the backend's own. Empty for containers, whose
            fields follow; the others leave out those of CRIU.
        criu: The version that wrote the images.
        kernel: The release of the host's kernel, which programs have asked for their features.
        machine: The processor's architecture, as the kernel names it.
        cpu_features: The processor's flags; programs have chosen their code by them.
        uid_base: The first of the host's user ids that the sandbox had.
        mounts: Paths in the sandbox of the mounts that come from the platform.
        files: CRIU's names of the init's files from outside the sandbox: its program, its spool directory, then one for
            each file in `spool/`.
        places: The group, below the guest's, that each process was in, by its pid in the sandbox; without the init.
        monotonic_ns: The sandbox's monotonic clock at the dump; `boottime_ns`: its clock since boot.
        hostname: That the sandbox had.
        network: Of its spec.
        layers: Digests of its image, topmost first.
        processes: How many it had, without the init.
        resident_bytes: Memory in the images.
    """

    format: int = FORMAT
    backend: str = "container"
    engine: dict[str, str] = {}
    criu: str = ""
    kernel: str
    machine: str
    cpu_features: tuple[str, ...]
    uid_base: int = 0
    mounts: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    places: dict[int, str] = {}
    monotonic_ns: int = 0
    boottime_ns: int = 0
    hostname: str
    network: str
    layers: tuple[str, ...]
    processes: int
    resident_bytes: int
