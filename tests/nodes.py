"""A node of a test's own: the shipped one."""

from barchan.testing.node import END_TIMEOUT_S, FILES, READY_TIMEOUT_S, NodeProcess

__all__ = ["END_TIMEOUT_S", "FILES", "READY_TIMEOUT_S", "NodeProcess"]
