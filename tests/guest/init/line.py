"""The guest protocol over a line that never ends, from the host's side."""

import os
import socket

from tests.guest.init.driver import Connection

MAGIC = b"\xff\xff\xff\xff\xfebarchan-ln"
COUNTERS, CONFIGURE = 16, 17
SECRET = bytes(range(32))


class Line(Connection):
    """The host's end of a pair of sockets, over which connections begin with a greeting."""

    def __init__(self, end: socket.socket) -> None:
        self.socket, self.ack = end, True
        self.forget()

    def forget(self) -> None:
        """As a host does that begins anew."""
        self.tag, self.frames = 0, 0
        self.outputs, self.replies, self._buffer = {}, {}, bytearray()

    def call(self, secret: bytes = b"") -> bytes:
        """Say the first word, and return the init's number out of all that comes."""
        number = os.urandom(16)
        self.socket.sendall(secret + MAGIC + b"C" + number)
        mark, seen = MAGIC + b"A" + number, b""
        self.socket.settimeout(60)  # a machine may be on its way up
        while len(seen.partition(mark)[2]) < 16:
            data = self.socket.recv(1 << 16)
            assert data
            seen += data
        own = seen.partition(mark)[2]
        assert len(own) == 16, "nothing follows an answer"
        return own

    def greet(self, secret: bytes = SECRET) -> None:
        own = self.call(secret)
        self.forget()
        self.socket.sendall(MAGIC + b"K" + own + secret)

    def is_silent(self) -> bool:
        self.socket.settimeout(0.3)
        try:
            return not self.socket.recv(1 << 16)
        except TimeoutError:
            return True
