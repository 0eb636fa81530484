"""How an image is made from another one: steps that run in a sandbox, and one more layer of what they did.

Values only.
"""

from typing import Annotated

from msgspec import Meta, Struct

from barchan.model.sandbox import Env, Need, Network


class Run(Struct, frozen=True, kw_only=True, tag="run", forbid_unknown_fields=True):
    """A command: a shell's when it is text, else a program and its arguments. Anything but exit code 0 fails the build.

    Attributes:
        network: What this step may reach, and no other.
        place: Where it is written, for who has to be told; no part of what it makes.
    """

    command: str | tuple[str, ...]
    user: str = "root"
    cwd: str | None = None
    env: Env = {}
    network: Network = "none"
    allow_hosts: tuple[str, ...] = ()
    timeout_s: float = 1800.0
    place: str = ""


class Put(Struct, frozen=True, kw_only=True, tag="put", forbid_unknown_fields=True):
    """Files into the image: exactly one of `source` (a file or folder of the client's machine) and `data`.

    Attributes:
        path: Where it lies in the guest. A folder's content goes below it.
        mode: Permission bits; None: as the source's, or 0644.
        user: The owner.
        without: Paths below a folder that stay behind, with all that is in them.
    """

    path: str
    source: str | None = None
    data: bytes | None = None
    mode: int | None = None
    user: str = "root"
    without: tuple[str, ...] = ()


class Take(Struct, frozen=True, kw_only=True, tag="take", forbid_unknown_fields=True):
    """Files out of another image, which is made first where it is a recipe.

    Attributes:
        source: Its path there, whose last part may hold `*`, `?` and `[...]`. Of a folder its content is taken.
        path: Where it goes; a name that ends with a slash is a folder.
        mode, user: As of `Put`.
    """

    image: "str | Recipe"
    source: str
    path: str
    mode: int | None = None
    user: str = "root"


Step = Run | Put | Take


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image by its making. Recipes of equal content on an equal base are the same image.

    Attributes:
        base: Name or digest of an image that the node has, or the recipe of one.
        layers: Images whose own layers lie above the base, the last one topmost, and below what the steps do.
        env, user, workdir: What sandboxes of the image start with, over the base's.
        entrypoint, cmd: What other runtimes start; None: as the base's. Told to whoever names the image: the files are
            the same.
        needs: What a backend must have for the image's sandboxes, beside what the base needs; told likewise.
        memory_mib, disk_mib: Of the sandbox that the steps run in.
    """

    base: "str | Recipe"
    layers: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    env: Env = {}
    user: str | None = None
    workdir: str | None = None
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None
    needs: tuple[Need, ...] = ()
    memory_mib: Annotated[int, Meta(ge=16)] = 2048
    disk_mib: Annotated[int, Meta(ge=1)] = 8192

    @property
    def origin(self) -> str:
        """Name or digest of the image that it begins with, below all recipes."""
        base = self.base
        while not isinstance(base, str):
            base = base.base
        return base
