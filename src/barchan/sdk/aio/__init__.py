"""The SDK's one implementation, in native async. Handles may be used from any event loop and thread."""
