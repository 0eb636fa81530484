"""Names of containers that hold a guest of another backend: its sandbox's id, `-`, and the backend's name."""


def outer_id(sandbox_id: str, backend: str) -> str:
    return f"{sandbox_id}-{backend}"


def is_outer(container_id: str) -> bool:
    """No id that a node gives has a `-` in it."""
    return "-" in container_id


def guest_of(container_id: str) -> str:
    """The id of the sandbox that it is, or holds."""
    return container_id.partition("-")[0]


def backend_of(container_id: str) -> str:
    """The name of the backend whose guest it holds; empty: it is a sandbox itself."""
    return container_id.partition("-")[2]
