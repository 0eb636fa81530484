"""`barchan image pull` and `push`: images from anywhere, and back to where others run them."""

import asyncio
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from barchan.cli.common import DEFAULTS, OK, Common, bytes_of, human_bytes, key_values, print_json
from barchan.cli.image_build import Words, layer_kind, made, own_store
from barchan.cli.image_store import is_store, pull_from_store, push_to_store
from barchan.cli.progress import progress
from barchan.errors import InvalidSpec
from barchan.image.pack import Limits

LIMITS = {
    "entries": "entries_max",
    "bytes": "bytes_max",
    "depth": "depth_max",
    "attribute-bytes": "xattr_bytes_max",
    "text-bytes": "text_bytes_max",
    "git-memory": "git_bytes_max",
}
COUNTS = ("entries", "depth")


def pull(
    source: str,
    /,
    *,
    image: str | None = None,
    lazy: bool = False,
    name: str | None = None,
    user: str | None = None,
    workdir: str | None = None,
    env: Words = (),
    owner: int = 0,
    mirror: Words = (),
    plain_http: bool = False,
    auth_file: Path | None = None,
    limit: Words = (),
    common: Common = DEFAULTS,
) -> int:
    """Make an image of one that is elsewhere, of a directory or of a git
    repository.

    A source is one of

        docker://HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]  an image in a registry
        oci:PATH[:TAG]                                 an image layout
        oci-archive:FILE[:TAG]                         the same in an archive
        docker-archive:FILE[:NAME]                     what docker save writes
        dir:PATH                                       a root file system
        git:PATH_OR_URL@COMMIT[:/WORKDIR]              a repository, in /workspace
        s3://BUCKET/PREFIX, gs://, az://, https://HOST/PATH, file:///PATH
                                                       --image of a blob store

    For example:

        barchan image pull docker://registry.example.com/tools/go:1.24
        barchan image pull dir:./rootfs --name mine --user agent
        barchan image pull git:https://example.com/repo.git@v1.2 --owner 1000
        barchan image pull s3://bucket/images --image tools

    Args:
        source: Where from.
        image: Name or whole digest of the image in a blob store.
        lazy: Leave the data in the blob store; sandboxes read what they need on demand.
        name: Name of the image; an older image of that name is replaced. [default: made of the source]
        user: Default user of commands. [default: the image's; of dir: `agent` where it has such a user, else root]
        workdir: Where commands start. [default: the image's]
        env: KEY=VALUE beside the image's own; may be repeated.
        owner: User and group number of the files of git:.
        mirror: HOST[:PORT] of a registry to ask first; may be repeated.
        plain_http: Speak to the registry without TLS, as to one on this machine.
        auth_file: Docker's config file with the credentials. [default: ~/.docker/config.json]
        limit: NAME=VALUE, of what an image may hold; may be repeated. [default: entries=4000000, bytes=256GiB,
            depth=2048, attribute-bytes=256MiB, text-bytes=128MiB, git-memory=4GiB]
    """
    if is_store(source):
        given = {"user": user, "workdir": workdir, "env": env, "owner": owner, "mirror": mirror, "limit": limit}
        _refuse({**given, "plain-http": plain_http, "auth-file": auth_file}, f"a blob store ({source})")
        return pull_from_store(source, image, name, lazy=lazy, common=common)
    _refuse({"image": image, "lazy": lazy}, f"anything but a blob store ({source})")

    from barchan.image.sources import RegistryOptions, Wishes
    from barchan.image.sources import pull as pull_image

    wishes = Wishes(name=name, user=user, workdir=workdir, env=key_values(env, "--env"), owner=owner)
    registries = RegistryOptions(mirrors=mirror, plain_http=plain_http, auth_file=_auth_file(auth_file))
    with progress(f"pulling {name or source}") as say:
        template = asyncio.run(
            pull_image(
                own_store(common),
                source,
                kind=layer_kind(),
                progress=say,
                wishes=wishes,
                registries=registries,
                limits=limits_of(key_values(limit, "--limit")),
            )
        )
    return made(template, common)


def push(
    image: str,
    destination: str,
    /,
    *,
    zstd: bool = False,
    plain_http: bool = False,
    auth_file: Path | None = None,
    common: Common = DEFAULTS,
) -> int:
    """Write an image to where other runtimes take it from.

    What is there already is not sent again.

    For example:

        barchan image push mine docker://registry.example.com/mine:1
        barchan image push mine oci-archive:mine.tar
        barchan image push mine s3://bucket/images

    Args:
        image: Its name or digest.
        destination: docker://HOST[:PORT]/REPOSITORY[:TAG], oci:PATH[:TAG], oci-archive:FILE[:TAG], or a blob store:
            s3://BUCKET/PREFIX, gs://, az:// or file:///PATH.
        zstd: Compress layers with zstd instead of gzip.
        plain_http: Speak to the registry without TLS, as to one on this machine.
        auth_file: Docker's config file with the credentials. [default: ~/.docker/config.json]
    """
    if is_store(destination):
        _refuse({"zstd": zstd, "plain-http": plain_http, "auth-file": auth_file}, f"a blob store ({destination})")
        return push_to_store(image, destination, common)

    from barchan.image.export import push as push_image
    from barchan.image.sources import RegistryOptions

    registries = RegistryOptions(plain_http=plain_http, auth_file=_auth_file(auth_file))
    with progress(f"pushing {image}") as say:
        pushed = asyncio.run(
            push_image(
                own_store(common),
                image,
                destination,
                progress=say,
                compression="zstd" if zstd else "gzip",
                registries=registries,
            )
        )
    if common.json:
        print_json(pushed)
    else:
        sys.stdout.write(f"{pushed.digest}  {human_bytes(pushed.blobs_bytes)} sent\n")
    return OK


def _refuse(given: Mapping[str, object], where: str) -> None:
    """Options that would do nothing.

    Raises:
        InvalidSpec: One of them was given.
    """
    if names := [f"--{name}" for name, value in given.items() if value]:
        raise InvalidSpec(f"{', '.join(names)}: no option for {where} (try: without, see --help)")


def limits_of(given: Mapping[str, str]) -> Limits:
    """The limits of `--limit`, the usual ones where it names none.

    Raises:
        InvalidSpec: There is no such limit, or the value is no number of its kind.
    """
    values: dict[str, int] = {}
    for name, text in given.items():
        if name not in LIMITS:
            raise InvalidSpec(f"--limit {name}={text}: there is no such limit; there are: {', '.join(LIMITS)}")
        if name in COUNTS and not re.fullmatch(r"[0-9]{1,15}", text):
            raise InvalidSpec(f"--limit {name}={text}: give a whole number")
        values[LIMITS[name]] = int(text) if name in COUNTS else bytes_of(text, f"--limit {name}")
    return Limits(**values)


def _auth_file(given: Path | None) -> Path:
    """Raises `InvalidSpec` if one is given that is not there: without it, who asks would be nobody."""
    if given is not None and not given.is_file():
        raise InvalidSpec(f"--auth-file {given}: there is no such file")
    return given or Path("~/.docker/config.json").expanduser()
