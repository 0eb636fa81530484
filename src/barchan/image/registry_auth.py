"""Who a registry takes us for: the credentials in Docker's config file, and the challenges that ask for them."""

import base64
import re
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from barchan.errors import InvalidSpec

CONFIG_BYTES_MAX = 1 << 20
HUB = "registry-1.docker.io"  # what answers for the name that images of Docker Hub have
HUB_NAMES = ("index.docker.io", "docker.io")  # and under which Docker keeps its credentials
PARAMETER = re.compile(r'([a-zA-Z_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))\s*,?\s*')


class Credentials(NamedTuple):
    """A user's name and password, or a token that is exchanged for others. Never shown."""

    user: str = ""
    password: str = ""
    identity_token: str = ""

    def __repr__(self) -> str:
        return "Credentials(...)"

    @property
    def basic(self) -> str | None:
        """The header's value; None: there is no password."""
        if not self.user:
            return None
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class Challenge(NamedTuple):
    """What a registry asks for in a `WWW-Authenticate` header."""

    scheme: str  # in lower case
    parameters: dict[str, str]


class _Entry(Struct):
    auth: str | None = None
    username: str | None = None
    password: str | None = None
    identitytoken: str | None = None


class _DockerConfig(Struct):
    auths: dict[str, _Entry] | None = None


def read_credentials(path: Path, host: str) -> Credentials | None:
    """What Docker's config file has for a host, `HOST[:PORT]`; None: nothing, or no such file. Helpers are not run.

    Raises:
        InvalidSpec: The file can't be read. The message says nothing of what is in it.
    """
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidSpec(f"the credentials in {path} can't be read: {error.strerror}") from error
    try:
        config = msgspec.json.decode(data, type=_DockerConfig)
        hosts = (host, *HUB_NAMES) if host == HUB else (host,)
        entry = next((entry for key, entry in (config.auths or {}).items() if _host_of(key) in hosts), None)
        return _credentials(entry) if entry is not None else None
    except (msgspec.MsgspecError, ValueError):  # of the encodings, too
        raise InvalidSpec(f"the credentials in {path} can't be read: it is no config file of Docker's") from None


def _credentials(entry: _Entry) -> Credentials | None:
    user, password = entry.username or "", entry.password or ""
    if entry.auth:
        user, _, password = base64.b64decode(entry.auth, validate=True).decode().partition(":")
    found = Credentials(user, password.rstrip("\0"), entry.identitytoken or "")
    return found if any(found) else None


def _host_of(key: str) -> str:
    """`https://HOST/v1/` and `HOST` name the same registry."""
    return key.partition("://")[2].partition("/")[0] if "://" in key else key.partition("/")[0]


def parse_challenge(header: str) -> Challenge | None:
    """The first challenge of a header that is Bearer or Basic; None: there is none."""
    for found in re.finditer(r"(?i)(?:^|,)\s*(bearer|basic)\b\s*", header[:8192]):
        parameters: dict[str, str] = {}
        position = found.end()
        while match := PARAMETER.match(header, position):
            quoted, plain = match[2], match[3]
            parameters[match[1].lower()] = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            position = match.end()
        return Challenge(found[1].lower(), parameters)
    return None
