"""What a node can leave behind on its host, and whether it did: the shipped ones."""

from barchan.testing.leaks import CGROUPS, Watch, parent_of, processes

__all__ = ["CGROUPS", "Watch", "parent_of", "processes"]
