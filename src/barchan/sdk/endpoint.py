"""Where a node is reached, and with which token: what a handle keeps of its client when it is pickled."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from barchan.errors import InvalidSpec

SYSTEM_STATE_DIR = Path("/var/lib/barchan")
STATE_DIR_VARIABLE = "BARCHAN_STATE_DIR"
SOCKET_NAME = "node.sock"
_UNIX_PATH_BYTES_MAX = 107  # sun_path of sockaddr_un, less the final NUL

_tokens: dict[str, str] = {}


class Endpoint(Struct, frozen=True, kw_only=True):
    """A node's address: `url`, or the embedded node that owns `state_dir`. Holds no secret, so it may be pickled.

    `store`: URL of the blob store that the embedded node has images from; None: whichever it has.
    """

    url: str | None = None
    state_dir: str | None = None
    store: str | None = None

    @property
    def unix_path(self) -> str | None:
        """The unix socket to connect to, None for TCP."""
        if self.state_dir is not None:
            return os.path.join(self.state_dir, SOCKET_NAME)
        parts = urlsplit(self.url or "")
        return parts.path if parts.scheme == "unix" else None

    @property
    def host_port(self) -> tuple[str, int]:
        parts = urlsplit(self.url or "")
        return parts.hostname or "", parts.port or 80

    def __str__(self) -> str:
        return self.url or f"the node of {self.state_dir}"


def default_state_dir() -> Path:
    """The state directory of who names none: that of the environment, else this user's usual one."""
    if given := os.environ.get(STATE_DIR_VARIABLE):
        return Path(given).absolute()
    return SYSTEM_STATE_DIR if os.geteuid() == 0 else Path.home() / ".local/share/barchan"


def endpoint_of(
    url: str | None, state_dir: str | os.PathLike[str] | None, store: str | os.PathLike[str] | None = None
) -> Endpoint:
    """Check and normalise what `connect()` was given.

    Raises:
        InvalidSpec: What was given does not go together, or the address can't be one of a node.
    """
    if url is None:
        directory = os.path.abspath(state_dir if state_dir is not None else default_state_dir())
        endpoint = Endpoint(state_dir=directory, store=store_url(store) if store is not None else None)
    elif store is not None:
        raise InvalidSpec("give a url or a store, not both: a node with a url has its own store")
    elif state_dir is not None:
        raise InvalidSpec("give a url or a state_dir, not both")
    else:
        _check_url(url)
        endpoint = Endpoint(url=url.rstrip("/") if url.startswith("http") else url)
    path = endpoint.unix_path
    if path is not None and len(os.fsencode(path)) > _UNIX_PATH_BYTES_MAX:
        raise InvalidSpec(f"{path} is too long for a unix socket: at most {_UNIX_PATH_BYTES_MAX} bytes")
    return endpoint


def store_url(store: str | os.PathLike[str]) -> str:
    """A store's address as a node is given it, whose working directory is another: paths become whole URLs."""
    text = os.fspath(store)
    return text.rstrip("/") if "://" in text else Path(os.path.abspath(text)).as_uri()


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError as error:
        raise InvalidSpec(f"not an address of a node: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise InvalidSpec("an address carries no credentials: pass token=")
    is_http = parts.scheme == "http" and parts.hostname and port_is_fine and parts.path in ("", "/")
    is_unix = parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/")
    if not (is_http or is_unix) or parts.query or parts.fragment:
        raise InvalidSpec(f"not an address of a node: {url!r}; write http://HOST:PORT or unix:///PATH")


def set_token(url: str, token: str) -> None:
    """Give this process the token of the node at `url`, for handles that come out of a pickle (which never holds one).

    `connect(url, token=...)` does the same, unless a token for that url is already set.
    """
    _tokens[str(endpoint_of(url, None).url)] = checked_token(token)


def remember_token(endpoint: Endpoint, token: str | None) -> None:
    if token is not None and endpoint.url is not None:
        _tokens.setdefault(endpoint.url, checked_token(token))


def token_of(endpoint: Endpoint) -> str | None:
    return _tokens.get(endpoint.url) if endpoint.url is not None else None


def checked_token(token: str) -> str:
    """A token as it may stand in a header; the message of a refusal does not quote it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidSpec("a token is printable ASCII without spaces")
    return token
