"""For tests: the conformance suite that every backend must pass (docs/conformance.md), nodes to test with, and what
they may leave behind. Nothing else of the package imports it.
"""
