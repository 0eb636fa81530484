"""A guest tries to reach the host or anything beyond. Arguments: a port, an abstract socket name, a multicast port."""

import os
import socket
import sys

from tests.security.guest import kit

PORT, NAME = int(sys.argv[1]), sys.argv[2]


def tcp(host: str) -> kit.Attempt:
    def attempt() -> kit.Evidence:
        with socket.create_connection((host, PORT), timeout=3) as peer:
            return f"the host said {peer.recv(16)!r}"

    return attempt


def abstract() -> kit.Evidence:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(3)
        peer.connect(f"\0{NAME}")
        return f"the host said {peer.recv(16)!r}"


def interfaces() -> kit.Evidence:
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    return f"{names}" if names else None


def route() -> kit.Evidence:
    """A connected datagram socket needs a route, and sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as peer:
        peer.connect(("198.51.100.1", 9))
        return f"from {peer.getsockname()}"


def raw_socket() -> kit.Evidence:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    return "a raw socket"


def change_network() -> kit.Evidence:
    """RTM_NEWLINK of a dummy interface."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as peer:
        kind = b"\x0a\x00\x01\x00dummy\x00\x00\x00"
        info = (4 + len(kind)).to_bytes(2, "little") + b"\x12\x00" + kind
        body = bytes(16) + info
        header = (16 + len(body)).to_bytes(4, "little") + b"\x10\x00" + b"\x05\x06" + bytes(8)
        peer.send(header + body)
        answer = peer.recv(256)
        error = int.from_bytes(answer[16:20], "little", signed=True)
        if error < 0:
            raise OSError(-error, os.strerror(-error))
    return "an interface was made"


def host_abstract_names() -> kit.Evidence:
    names = [line.split()[-1] for line in kit.lines("/proc/net/unix") if " @" in line]
    return f"{names[:10]}" if names else None


ATTEMPTS: dict[str, kit.Attempt] = {
    "tcp": tcp("127.0.0.1"),
    "abstract socket": abstract,
    "interfaces": interfaces,
    "route": route,
    "raw socket": raw_socket,
    "rtnetlink": change_network,
    "abstract names": host_abstract_names,
}

if __name__ == "__main__":
    kit.run(ATTEMPTS)
