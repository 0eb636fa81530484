"""Guests with a kernel of their own, booted from a template's layers (decision 0020)."""
