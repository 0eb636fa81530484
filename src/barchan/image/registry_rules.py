"""How registries are spoken to: how long and how often, and how much of an answer is read."""

import ipaddress
import random
import re
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time

import aiohttp
from yarl import URL

from barchan.errors import BarchanError, BlobCorrupt

CONNECT_S_MAX = 10
SILENCE_S_MAX = 60
REQUEST_S_MAX = 600  # of all but a blob's bytes
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass(frozen=True)
class Retries:
    """How often and how patiently something is tried again.

    Args:
        attempts: Of one request, the first one included.
        first_s, longest_s: Bounds of the wait before the next attempt, which doubles; each is a random part of it.
        retry_after_max_s: A registry that asks for more is not waited for.
    """

    attempts: int = 6
    first_s: float = 0.5
    longest_s: float = 30.0
    retry_after_max_s: float = 60.0

    def wait_s(self, attempt: int) -> float:
        return random.uniform(0.5, 1.0) * min(self.longest_s, self.first_s * 2.0 ** (attempt - 1))


DEFAULT_RETRIES = Retries()


class Again(Exception):
    """An answer that another attempt may change."""

    def __init__(self, failure: BarchanError, after_s: float | None = None) -> None:
        self.failure, self.after_s = failure, after_s


def is_loopback(host: str) -> bool:
    """Whether `HOST[:PORT]` is this machine."""
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def is_address(url: URL) -> bool:
    """Whether it is one of HTTP, with a host that can be looked up."""
    labels = (url.raw_host or "").removesuffix(".").split(".")
    return url.scheme in ("http", "https") and all(label.isascii() and 0 < len(label) < 64 for label in labels)


def new_session() -> aiohttp.ClientSession:
    """A session for registries; the caller closes it."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX, sock_connect=CONNECT_S_MAX, sock_read=SILENCE_S_MAX)
    headers = {"User-Agent": "barchan", "Accept-Encoding": "identity"}
    return aiohttp.ClientSession(timeout=timeout, headers=headers, auto_decompress=False)


async def read_bounded(response: aiohttp.ClientResponse, bytes_max: int, what: str) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_chunked(64 << 10):
        data += chunk
        if len(data) > bytes_max:
            raise BlobCorrupt(f"{what} has more than {bytes_max} bytes")
    return bytes(data)


def retry_after_s(value: str) -> float | None:
    """Seconds, as a number or until a date; None: not said, or not understood."""
    if re.fullmatch(r"[0-9]{1,9}", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except (ValueError, OverflowError):
        return None
