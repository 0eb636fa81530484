"""What a guest is kept from, seen from inside by its root, and what of it must be its own."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from barchan.errors import Denied
from barchan.testing.check import check
from barchan.testing.expect import equal, holds, until
from barchan.testing.lab import Lab, text

# Tries to reach HOST:PORT; prints `reached` or the name of the error.
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3).close()
    print("reached")
except OSError as error:
    print(type(error).__name__)
"""
FETCH = """
import sys, urllib.error, urllib.request
try:
    print(urllib.request.build_opener(urllib.request.ProxyHandler()).open(sys.argv[1], timeout=10).read().decode())
except urllib.error.HTTPError as error:
    print("refused", error.code)
except OSError as error:
    print("failed")
"""
# A server on loopback and a client of it, in one program.
LOOPBACK = """
import socket
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
peer.sendall(b"hello")
print(client.recv(5).decode())
"""
PROXY_FOR_ALL = {"no_proxy": "", "NO_PROXY": ""}  # the server that is reached is on an address that is usually left out


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def web() -> Iterator[int]:
    """The port of a web server on the host's loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@check()
async def without_a_network_nothing_is_reached(lab: Lab) -> None:
    """Neither the host's loopback nor an address outside; the guest's own loopback works."""
    sandbox = await lab.create()
    with socket.create_server(("127.0.0.1", 0)) as host:
        port = str(host.getsockname()[1])
        for address in ("127.0.0.1", "192.0.2.1"):
            said = await text(sandbox, ["python3", "-c", CONNECT, address, port], user="root")
            holds(said != "reached\n", f"{address} was not reached")
    equal(await text(sandbox, ["python3", "-c", LOOPBACK]), "hello\n")
    devices = [line.split(":")[0].strip() for line in (await text(sandbox, "cat /proc/net/dev")).splitlines()[2:]]
    equal([name for name in devices if name not in ("lo", "sit0", "tunl0", "ip6tnl0")], [])


@check("network allow")
async def an_allowed_host_is_reached_and_no_other(lab: Lab) -> None:
    """By HTTP, through the platform's proxy; a name that is not on the list is refused, and so is going around it."""
    with web() as port:
        sandbox = await lab.create(allow=[f"127.0.0.1:{port}"])
        url = f"http://127.0.0.1:{port}/"
        equal(await text(sandbox, ["python3", "-c", FETCH, url], env=PROXY_FOR_ALL), "hello\n")
        other = await text(sandbox, ["python3", "-c", FETCH, "http://127.0.0.1:9/"], env=PROXY_FOR_ALL)
        equal(other, "refused 403\n")
        around = await text(sandbox, ["python3", "-c", CONNECT, "127.0.0.1", str(port)])
        holds(around != "reached\n", "going around the proxy leads nowhere")


@check("network open")
async def an_open_network_has_a_way_out_and_a_resolver(lab: Lab) -> None:
    """An interface that comes by a default route, and an address to ask for names; the host's loopback stays closed."""
    sandbox = await lab.create(network="open")

    async def has_route() -> bool:
        routes = [line.split() for line in (await text(sandbox, "cat /proc/net/route")).splitlines()[1:]]
        return any(route[1] == "00000000" for route in routes)

    await until(has_route, "there is a default route", lab.s(5))
    holds("nameserver" in await text(sandbox, "cat /etc/resolv.conf"), "there is a resolver")
    with socket.create_server(("127.0.0.1", 0)) as host:
        port = str(host.getsockname()[1])
        said = await text(sandbox, ["python3", "-c", CONNECT, "127.0.0.1", port], user="root")
        holds(said != "reached\n", "the host's loopback was not reached")


@check()
async def sandboxes_see_nothing_of_each_other(lab: Lab) -> None:
    """Neither files nor processes, shared memory or names of sockets, as root."""
    one, other = await lab.create(user="root"), await lab.create(user="root")
    await text(one, "for d in /tmp /dev/shm /var /root; do echo x > $d/secret-4242; done")
    await one.start(["sleep", "4242"])
    await one.start(
        ["python3", "-c", "import socket, time; s = socket.socket(1); s.bind('\\0name-4242'); time.sleep(300)"]
    )
    equal((await other.exec("ls /tmp /dev/shm /var /root | grep 4242")).stdout, b"")
    equal((await other.exec("grep -las 'slee[p]' /proc/[0-9]*/cmdline")).stdout, b"")
    equal((await other.exec("grep 4242 /proc/net/unix")).stdout, b"")


@check("bounded root")
async def the_init_is_out_of_a_guests_reach(lab: Lab) -> None:
    """Root can't end it, stop it, trace it, or read its memory; and the platform answers as before."""
    sandbox = await lab.create(user="root")
    for signal in ("KILL", "STOP", "TERM", "SEGV"):
        await sandbox.exec(f"kill -{signal} 1")
        equal(await text(sandbox, "echo on", timeout_s=lab.s(20)), "on\n")
    for name in ("mem", "environ"):
        result = await sandbox.exec(["dd", f"if=/proc/1/{name}", "of=/dev/null", "bs=1", "count=1"])
        holds(not result.ok or b"0+0 records in" in result.stderr, f"/proc/1/{name} can't be read")
    with suppress(Denied):  # where it can be read by everybody, it has nothing to tell
        equal(await sandbox.files.read("/proc/1/environ"), b"")


@check()
async def a_host_name_is_what_was_asked_for(lab: Lab) -> None:
    """And another one elsewhere."""
    sandbox = await lab.create(hostname="box-7")
    equal(await text(sandbox, ["uname", "-n"]), "box-7\n")
    equal(await text(await lab.create(), ["uname", "-n"]), "sandbox\n")


@check()
async def random_numbers_are_each_sandboxs_own(lab: Lab) -> None:
    """Sandboxes made in the same way at the same time draw different bytes, ids and layouts of memory."""
    look = "head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid; grep -m1 stack /proc/self/maps"
    seen = [(await text(await lab.create(), look)).splitlines() for _ in range(3)]
    for kind in zip(*seen, strict=True):
        equal(len(set(kind)), 3, f"different ones of {kind}")


@check("root capable")
async def a_capable_root_has_power_over_other_users_files(lab: Lab) -> None:
    """It gives files away and becomes others, as installers need it."""
    sandbox = await lab.create(root="capable", user="root")
    said = await text(
        sandbox, "echo x > /tmp/f; chown 1234:2345 /tmp/f; chmod 600 /tmp/f; cat /tmp/f; stat -c %u:%g /tmp/f"
    )
    equal(said, "x\n1234:2345\n")


@check("bounded root")
async def a_plain_root_has_no_power_over_other_users_files(lab: Lab) -> None:
    """It is a user like any other, and can't give files away."""
    plain = await lab.create(user="root")
    holds(not (await plain.exec("echo x > /tmp/f; chown 1234 /tmp/f")).ok, "a plain root can't give files away")
