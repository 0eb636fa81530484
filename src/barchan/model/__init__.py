"""Frozen values: what the parts of Barchan say to each other. No I/O."""
