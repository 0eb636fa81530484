"""The clients of one inspect process: one for each node and event loop, as long as somebody uses it."""

import asyncio
from collections.abc import Hashable
from pathlib import Path

from barchan.compat.inspect_ai.config import BarchanConfig
from barchan.errors import InvalidSpec
from barchan.model.node import LeaseRequest
from barchan.sdk.aio.client import AsyncClient
from barchan.sdk.endpoint import checked_token, endpoint_of
from barchan.sdk.lease import Lease
from barchan.sdk.transport import Transport

LABEL = "made-by"
MAKER = "inspect_ai"


class _Shared:
    """A client, the one greeting of its node that all wait for, and how many use it."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.greeting = asyncio.ensure_future(client.greet())
        self.users = 0


_shared: dict[Hashable, _Shared] = {}


def client_for(config: BarchanConfig) -> AsyncClient:
    """A new client, whose sandboxes end a while after this process was killed."""
    endpoint = endpoint_of(config.url, config.state_dir)
    token = None
    if config.token_file is not None:
        try:
            token = checked_token(Path(config.token_file).read_text("utf-8").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSpec(f"the token file {config.token_file} can't be read: {error}") from error
    transport = Transport(endpoint, token)
    terms = LeaseRequest(grace_s=config.grace_s, labels={LABEL: MAKER})
    return AsyncClient(endpoint, token, transport=transport, lease=Lease(transport, terms))


async def take(config: BarchanConfig) -> AsyncClient:
    """The client for this configuration; whoever took it gives it back.

    Raises:
        InvalidSpec: inspect runs on another event loop than asyncio's.
        ConnectTimeout, ConnectionLost, Denied: The node can't be had.
    """
    key = _key(config)
    shared = _shared.get(key)
    if shared is None:
        shared = _shared[key] = _Shared(client_for(config))
    shared.users += 1
    try:
        return await asyncio.shield(shared.greeting)
    except BaseException:
        await give_back(config)
        raise


async def give_back(config: BarchanConfig) -> None:
    """The last one to do so ends the client, and with it what it has left."""
    key = _key(config)
    shared = _shared.get(key)
    if shared is None:
        return
    shared.users -= 1
    if shared.users == 0:
        del _shared[key]
        await asyncio.gather(shared.greeting, return_exceptions=True)
        await shared.client.close()


def _key(config: BarchanConfig) -> Hashable:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError as error:
        raise InvalidSpec("Barchan's sandboxes need inspect's asyncio backend, not trio") from error
    return loop, config.url, config.token_file, config.state_dir, config.grace_s
