"""`barchan image`: the commands that look and remove; the others are in modules of their own."""

import sys
import time

from cyclopts import App

from barchan.cli.common import DEFAULTS, OK, Common, human_age, human_bytes, print_json, print_table
from barchan.cli.image_build import build_app, import_
from barchan.errors import InvalidSpec
from barchan.image.store import DIGEST_PREFIX_MIN, ImageStore, image_info

app = App(name="image", help_format="plaintext")
# A command that lives in a module of its own needs its import and a line here; what is slow to import, it imports in
# its function.
app.command(build_app)
app.command(import_, name="import")


@app.command(name="list")
def list_(*, common: Common = DEFAULTS) -> int:
    """List the images of this machine.

    For example:

        barchan image list --json
    """
    templates = ImageStore(common.local_state_dir / "images").templates()
    if common.json:
        print_json([image_info(template) for template in templates])
        return OK
    now = time.time()
    rows = [
        [
            template.name,
            template.digest[:DIGEST_PREFIX_MIN],
            human_bytes(template.size_bytes),
            human_age(now - template.created_unix_s),
            template.user,
            template.source,
        ]
        for template in templates
    ]
    columns = ("NAME", "DIGEST", "SIZE", "AGE", "USER", "SOURCE")
    print_table(columns, rows, empty="no images (try: sudo barchan image build debian)")
    return OK


@app.command
def show(image: str, /, *, common: Common = DEFAULTS) -> int:
    """Show one image.

    For example:

        barchan image show debian

    Args:
        image: Its name or digest.
    """
    template = ImageStore(common.local_state_dir / "images").resolve(image)
    if common.json:
        print_json(template)
        return OK
    fields = [
        ("name", template.name),
        ("digest", template.digest),
        ("size", f"{human_bytes(template.size_bytes)} ({template.size_bytes} bytes)"),
        ("created", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(template.created_unix_s))),
        ("source", template.source),
        ("user", template.user),
        ("workdir", template.workdir),
        *(("env", f"{key}={value}") for key, value in template.env.items()),
        *(("layer", f"{layer.digest} ({layer.kind})") for layer in template.layers),
    ]
    for key, value in fields:
        sys.stdout.write(f"{key:8} {value}\n")
    return OK


@app.command
def remove(*images: str, common: Common = DEFAULTS) -> int:
    """Remove images. Sandboxes that run keep their files.

    For example:

        barchan image remove tools

    Args:
        images: Names or digests.
    """
    if not images:
        raise InvalidSpec("say which image (try: barchan image list)")
    store = ImageStore(common.local_state_dir / "images")
    removed = [store.remove(image) for image in images]
    if common.json:
        print_json([image_info(template) for template in removed])
    else:
        for template in removed:
            sys.stdout.write(f"removed {template.name}\n")
    return OK
