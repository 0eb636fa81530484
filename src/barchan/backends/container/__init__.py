"""Containers: namespaces, cgroups, seccomp and an overlay root, started by our own supervisor."""
