"""The node agent: owns the sandboxes of one machine."""
