"""Memory snapshots at rest: the packed file, a node's shelf of them, their way through a blob store."""
