"""A sandbox's way out, by its spec: none, through the egress proxy, or open."""

from contextlib import AsyncExitStack

from barchan.backends.base import Handle
from barchan.errors import BackendError
from barchan.model.sandbox import SandboxSpec
from barchan.node.denied import Denied
from barchan.node.egress import EgressProxy, proxy_env
from barchan.node.files import Files
from barchan.node.open_network import RESOLV_CONF, OpenNetwork


class Network:
    """What serves one sandbox's network."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()

    @staticmethod
    def env(spec: SandboxSpec, handle: Handle) -> dict[str, str]:
        """Variables a guest needs to find its way out."""
        return proxy_env(handle.proxy_host) if spec.network == "allow" else {}

    @classmethod
    async def open(
        cls, spec: SandboxSpec, handle: Handle, files: Files, denied: Denied, *, is_new: bool = True
    ) -> "Network | None":
        """Serve the network that `spec` asks for; None when it asks for none.

        Args:
            denied: Hears what the egress proxy decides.
            is_new: Not one that comes back with its files as they were.

        Raises:
            RequirementMissing: `open` needs a program that is not installed.
        """
        if spec.network == "none":
            return None
        network = cls()
        try:
            if spec.network == "allow":
                if handle.listener is None:
                    raise BackendError("the backend gave no listener for the egress proxy")
                await network._stack.enter_async_context(EgressProxy(handle.listener, spec.allow_hosts, denied.note))
            else:
                if handle.netns is None:
                    raise BackendError("the backend gave no network namespace")
                await network._stack.enter_async_context(OpenNetwork(handle.netns))
                if is_new:
                    await files.run("write", "/etc/resolv.conf", "644", "0", user="root", stdin=RESOLV_CONF)
        except BaseException:
            await network.close()
            raise
        return network

    async def close(self) -> None:
        await self._stack.aclose()
