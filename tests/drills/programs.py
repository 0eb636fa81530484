"""The drills' hostile programs, and how a sandbox gets them."""

from pathlib import Path

from barchan.sdk.sandbox import Sandbox

GUEST = Path(__file__).parent / "guest"
PACKAGE = "tests.drills.guest"


def install(sandbox: Sandbox) -> Sandbox:
    """The lab has put the programs of the security tests there already."""
    files = sandbox.files.as_user("root")
    for program in GUEST.glob("*.py"):
        files.write(f"/opt/{PACKAGE.replace('.', '/')}/{program.name}", program.read_bytes())
    return sandbox


def command(program: str, *arguments: str) -> list[str]:
    return ["python3", "-B", "-m", f"{PACKAGE}.{program}", *arguments]
