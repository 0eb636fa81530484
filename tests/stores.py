"""An image store of a test's own, so that what it builds goes with it."""

import subprocess
from pathlib import Path

from barchan.image.store import ImageStore


def copy_base(machine: Path, to: Path) -> Path:
    """A new store at `to` with the machine's base image `debian` in it."""
    store = ImageStore(machine)
    template = store.resolve("debian")
    for folder in ("templates", "layers"):
        (to / folder).mkdir(parents=True)
    subprocess.run(["cp", "-a", machine / "templates/debian.json", to / "templates"], check=True)
    for layer in template.layers:
        subprocess.run(["cp", "-a", store.layer_path(layer), to / "layers"], check=True)
    return to
