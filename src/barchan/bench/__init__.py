"""Benchmarks: workloads, peers and statistics. Speed is told beside a peer or the bare kernel cost of the same run."""
