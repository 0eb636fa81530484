"""Decisions as functions of data: event in, commands out; no clock, socket or randomness of their own."""
