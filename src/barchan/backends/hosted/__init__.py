"""Guests of another kind inside containers, the outers: what their backends share. docs/decisions/0024-outers.md."""
