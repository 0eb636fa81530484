"""`barchan image pull` and `push` where the other side is a blob store."""

import asyncio
import sys
import time
from collections.abc import Callable

from barchan.cli.common import OK, Common, human_bytes, print_json
from barchan.cli.image_build import made, own_store
from barchan.cli.progress import progress
from barchan.errors import InvalidSpec

SCHEMES = ("file://", "s3://", "gs://", "az://", "http://", "https://")
_SAY_EVERY_S = 1.0


def is_store(address: str) -> bool:
    """Whether an address is one of a blob store: a URL of one, or an absolute path."""
    return address.startswith((*SCHEMES, "/"))


def push_to_store(image: str, address: str, common: Common) -> int:
    from barchan.image.blobs import BlobStore
    from barchan.image.remote import push

    with progress(f"pushing {image}") as say:
        pushed = asyncio.run(push(own_store(common), image, BlobStore.open(address), _told(say)))
    if common.json:
        print_json(pushed)
    else:
        sys.stdout.write(
            f"{pushed.manifest}  {human_bytes(pushed.bytes_sent)} sent, "
            f"{pushed.layers_sent} layers; {pushed.layers_there} were there\n"
        )
    return OK


def pull_from_store(address: str, image: str | None, name: str | None, *, lazy: bool, common: Common) -> int:
    from barchan.image.blobs import BlobStore
    from barchan.image.remote import fetch, pull

    if image is None:
        raise InvalidSpec(f"say which image of {address} (try: barchan image pull {address} --image NAME)")
    store, images = BlobStore.open(address), own_store(common)
    with progress(f"pulling {image}") as say:
        if lazy:
            template = asyncio.run(fetch(images, image, store, local_name=name))
        else:
            template = asyncio.run(pull(images, image, store, _told(say), local_name=name))
    return made(template, common)


def _told(say: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """Progress in bytes, for people: each new thing at once, how far it is now and then."""
    last_what, last_s = "", 0.0

    def told(what: str, done: int, total: int) -> None:
        nonlocal last_what, last_s
        now_s = time.monotonic()
        if what != last_what or now_s - last_s >= _SAY_EVERY_S or done == total:
            last_what, last_s = what, now_s
            say(f"{what}, {human_bytes(done)} of {human_bytes(total)}" if total else what)

    return told
