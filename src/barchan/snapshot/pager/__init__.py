"""Memory of restored sandboxes, page by page as it is wanted: docs/formats/pager-protocol.md."""
