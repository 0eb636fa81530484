"""`barchan kernel`: the kernel that microVMs boot."""

import sys

from cyclopts import App

from barchan.cli.common import DEFAULTS, OK, Common, print_json, print_table
from barchan.cli.progress import progress

app = App(name="kernel", help_format="plaintext")


@app.command
def build(*, common: Common = DEFAULTS) -> int:
    """Build a kernel for microVMs from Debian's kernel source.

    It has only what a sandbox needs and boots in half the time of the
    distribution's. Takes some four minutes on two processors, 3 GiB of disk
    meanwhile, and a Debian mirror in reach; where it was built of the same
    source before, it does nothing.

    For example:

        sudo barchan kernel build
    """
    from barchan.backends.microvm import kernel_build

    with progress("building a kernel") as say:
        record = kernel_build.build(common.local_state_dir, say)
    return _tell(record.version, record.package, common)


@app.command
def install(*, common: Common = DEFAULTS) -> int:
    """Take the distribution's kernel for microVMs.

    It takes half a minute and needs a Debian mirror in reach. A kernel that
    was built here is used rather than this one.

    For example:

        sudo barchan kernel install
    """
    from barchan.backends.microvm import kernel_install

    with progress("installing a kernel") as say:
        record = kernel_install.install(common.local_state_dir, say)
    return _tell(record.version, record.package, common)


@app.command(name="list")
def list_(*, common: Common = DEFAULTS) -> int:
    """Show the kernels there are, and which one microVMs boot.

    For example:

        barchan kernel list
    """
    from barchan.backends.microvm import kernel

    found = list(kernel.installed(common.local_state_dir))
    best = kernel.best(common.local_state_dir)
    chosen = best[0] if best else None
    if common.json:
        print_json(
            [
                {"version": record.version, "package": record.package, "path": str(path), "used": path == chosen}
                for path, record in found
            ]
        )
        return OK
    rows = [
        (record.version, record.package, "yes" if path == chosen else "no", str(path.parent)) for path, record in found
    ]
    print_table(("version", "made of", "used", "in"), rows, empty="no kernels (try: sudo barchan kernel install)")
    return OK


def _tell(version: str, package: str, common: Common) -> int:
    if common.json:
        print_json({"version": version, "package": package})
    else:
        sys.stdout.write(f"Linux {version} of {package}\n")
    return OK
