"""The drills' hostile programs, and how a sandbox gets them."""

import os
from pathlib import Path
from typing import Unpack

from barchan.sdk.options import CreateOptions
from barchan.sdk.sandbox import Sandbox
from tests.security import lab

BACKENDS = os.environ.get("BARCHAN_BACKENDS", "container").split()
TEMPLATES = {"vm": "debian-disk"}  # of the others: debian
GUEST = Path(__file__).parent / "guest"
PACKAGE = "tests.drills.guest"


def template_of(backend: str | None) -> str:
    return TEMPLATES.get(backend or "", "debian")


class DrillLab(lab.Lab):
    """Sandboxes of whatever their backend makes them of."""

    def create(self, *switches: str, **options: Unpack[CreateOptions]) -> Sandbox:
        """See `Lab.create`."""
        sandbox = self.client(*switches).create(template_of(options.get("backend")), **options)
        lab.install(sandbox)
        return sandbox


def install(sandbox: Sandbox) -> Sandbox:
    """The lab has put the programs of the security tests there already."""
    files = sandbox.files.as_user("root")
    for program in GUEST.glob("*.py"):
        files.write(f"/opt/{PACKAGE.replace('.', '/')}/{program.name}", program.read_bytes())
    return sandbox


def command(program: str, *arguments: str) -> list[str]:
    return ["python3", "-B", "-m", f"{PACKAGE}.{program}", *arguments]
