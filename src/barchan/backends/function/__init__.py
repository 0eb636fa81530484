"""Calls: source or a function, run in a fork of a warm interpreter that is used once. docs/decisions/0022-calls.md."""
