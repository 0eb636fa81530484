"""Guests that QEMU runs, inside containers: what the backends `microvm` and `vm` share (decision 0020)."""
