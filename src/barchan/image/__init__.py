"""Layers and templates: build them, keep them, find them."""
