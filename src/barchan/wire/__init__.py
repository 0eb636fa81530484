"""Bytes to model and back: guest frames, supervisor messages, HTTP bodies. No I/O."""
