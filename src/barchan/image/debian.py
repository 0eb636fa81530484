"""The base template: a small Debian with Python, made by mmdebstrap from Debian packages."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from barchan.errors import BackendError, Conflict, InvalidSpec, NotFound, RequirementMissing
from barchan.image.erofs import Erofs
from barchan.image.pack import MTIME_UNIX_S, make_layer
from barchan.image.store import ImageStore
from barchan.image.template import GUEST_PATH, Layer, LayerKind, Template, TemplateConfig
from barchan.image.tools import Progress, in_namespaces, require, run

PACKAGES = ("ca-certificates", "netbase", "procps", "python3")
USER, UID = "agent", 1000
HOME = f"/home/{USER}"
HOSTNAME = "sandbox"
LEFT_OUT = ("/usr/share/doc", "/usr/share/info", "/usr/share/lintian", "/usr/share/locale", "/usr/share/man")
CACHES = ("var/cache/apt", "var/cache/debconf", "var/cache/ldconfig", "var/lib/apt/lists", "var/log")
EMPTIED = ("dev", "run", "tmp", *CACHES, *(path.lstrip("/") for path in LEFT_OUT))
REMOVED = ("etc/apt/apt.conf.d/99mmdebstrap", "etc/apt/preferences.d/barchan", "etc/dpkg/dpkg.cfg.d/99mmdebstrap")
REMOVED_GLOBS = ("var/lib/dpkg/*-old", "etc/*-")
# usrmerge would bring all of Perl (50 MB) to do nothing: the tree is merged from the start.
# Some packages (Java's) link manual pages when they are installed, and fail where the directories are left out.
MANUAL = 'for part in 1 2 3 4 5 6 7 8; do mkdir -p "$1/usr/share/man/man$part"; done'
NO_USRMERGE = "Package: usrmerge\nPin: release *\nPin-Priority: -1\n"


class DebianSpec(Struct, frozen=True, kw_only=True):
    """What to build: a suite's essential packages, Python, and `include`."""

    name: str = "debian"
    suite: str = "bookworm"
    include: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return f"debian:{self.suite} {' '.join(sorted({*PACKAGES, *self.include}))}"

    def check(self) -> None:
        """Raise `InvalidSpec` for what can't be a suite or a package name."""
        if not re.fullmatch(r"[a-z][a-z0-9.-]*", self.suite):
            raise InvalidSpec(f"{self.suite!r} is no Debian suite (try: bookworm)")
        for package in self.include:
            if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", package):
                raise InvalidSpec(f"{package!r} is no Debian package name")


def build_debian(store: ImageStore, spec: DebianSpec, kind: LayerKind, progress: Progress, *, force: bool) -> Template:
    """Build the template, or return the one that was built from the same packages before, if its layers can be read.

    Raises:
        Conflict: The name is taken by something else, and `force` is not set.
        RequirementMissing: Not root, or a tool is missing.
        BackendError: mmdebstrap failed: mostly an unknown package, or no mirror in reach.
    """
    spec.check()
    config = TemplateConfig(
        name=spec.name,
        user=USER,
        workdir=HOME,
        env={"LANG": "C.UTF-8", "PATH": GUEST_PATH},
        source=spec.source,
    )
    config.check()
    if not force:
        existing = _existing(store, spec)
        if existing is not None:
            return existing
    if os.geteuid() != 0:
        raise RequirementMissing("building a Debian image needs root (try: sudo barchan image build debian)")
    with store.workspace() as workspace:
        root = workspace / "root"
        bootstrap(root, spec, progress)
        progress("compiling Python to bytecode")
        compile_python(root)
        progress("tidying")
        finish(root)
        progress("packing the layer")
        layer = make_layer(root, workspace, kind)
        progress("storing the layer")
        return store.commit(config, (layer,))


def _existing(store: ImageStore, spec: DebianSpec) -> Template | None:
    try:
        template = store.resolve(spec.name)
    except NotFound:
        return None
    if template.source != spec.source:
        raise Conflict(
            f"there is an image {spec.name!r} already, made from {template.source or 'something else'!r} "
            "(try: another --name, or --force to replace it)"
        )
    return template if all(_is_current(store, layer) for layer in template.layers) else None


def _is_current(store: ImageStore, layer: Layer) -> bool:
    """Whether it is made as layers are now: earlier releases compressed them, and then they can only be mounted."""
    if layer.kind != "erofs":
        return True
    try:
        Erofs.open(store.layer_path(layer)).close()
    except RequirementMissing:
        return False
    return True


def bootstrap(root: Path, spec: DebianSpec, progress: Progress) -> None:
    """Unpack and configure the packages into `root`."""
    mmdebstrap = require("mmdebstrap", "mmdebstrap", needed_for="building a Debian image")
    preferences = (
        f'mkdir -p "$1/etc/apt/preferences.d" && '
        f'printf %s {shlex.quote(NO_USRMERGE)} > "$1/etc/apt/preferences.d/barchan"'
    )
    argv: list[str | Path] = [
        mmdebstrap,
        "--mode=root",
        "--variant=essential",
        "--format=directory",
        f"--include={','.join(sorted({*PACKAGES, *spec.include}))}",
        f"--setup-hook={preferences}",
        f"--setup-hook={MANUAL}",
        "--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr",
        '--aptopt=Acquire::Languages "none"',
        *(f"--dpkgopt=path-exclude={path}/*" for path in LEFT_OUT),
        spec.suite,
        root,
        *host_sources(spec.suite),
    ]
    run_mmdebstrap(argv, progress)


def run_mmdebstrap(argv: Sequence[str | Path], progress: Progress) -> None:
    """Run it so that it makes the same of the same packages, and tell its steps.

    Raises:
        BackendError: It failed; the message has the last lines it wrote.
    """
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(MTIME_UNIX_S), "DEBIAN_FRONTEND": "noninteractive"}

    def on_line(line: str) -> None:
        if line.startswith("I: ") and "-hook" not in line:
            progress(line.removeprefix("I: "))

    run(in_namespaces(argv), env=environment, on_line=on_line)


def host_sources(suite: str) -> list[str]:
    """The host's own apt sources for a suite, as lines for mmdebstrap; none: mmdebstrap takes Debian's."""
    apt_get = shutil.which("apt-get")
    if apt_get is None:
        return []
    wanted = {suite, f"{suite}-updates", f"{suite}-security", f"{suite}/updates"}
    done = subprocess.run(
        [apt_get, "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Identifier: Packages"],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [row for row in (line.split() for line in done.stdout.splitlines()) if len(row) == 3]
    return sorted({f"deb {uri} {release} main" for uri, release, part in rows if release in wanted and part == "main"})


def compile_python(root: Path) -> None:
    """Compile the standard library by the guest's own interpreter.

    The bytecode names its source by hash and is not checked at import: file times don't matter, and no source is read.
    """
    argv: list[str | Path] = ["chroot", root, "/usr/bin/python3", "-I", "-m", "compileall", "-q", "-f"]
    options = ["--invalidation-mode", "unchecked-hash", "/usr/lib/python3", *_stdlib(root)]
    run(in_namespaces([*argv, *options]), env={"PATH": GUEST_PATH, "PYTHONHASHSEED": "0"})


def _stdlib(root: Path) -> list[str]:
    found = sorted(path.name for path in (root / "usr/lib").glob("python3.*") if path.is_dir())
    if not found:
        raise BackendError("the image has no Python standard library")
    return [f"/usr/lib/{name}" for name in found]


def finish(root: Path) -> None:
    """Make the tree a sandbox's: its user, its names, and nothing that differs from build to build."""
    for name in EMPTIED:
        _empty(root / name)
    for path in [*(root / name for name in REMOVED), *(hit for glob in REMOVED_GLOBS for hit in root.glob(glob))]:
        path.unlink(missing_ok=True)
    put(root / "etc/hosts", f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost ip6-localhost ip6-loopback\n")
    put(root / "etc/hostname", f"{HOSTNAME}\n")
    put(root / "etc/resolv.conf", "")
    if (root / "etc/machine-id").exists():
        put(root / "etc/machine-id", "")
    _add_line(root / "etc/passwd", f"{USER}:*:{UID}:{UID}:{USER}:{HOME}:/bin/bash")
    _add_line(root / "etc/group", f"{USER}:*:{UID}:")
    _add_line(root / "etc/shadow", f"{USER}:*:{MTIME_UNIX_S // 86_400}::::::")
    _add_line(root / "etc/gshadow", f"{USER}:*::")
    home = root / HOME.lstrip("/")
    shutil.copytree(root / "etc/skel", home, symlinks=True)
    _give(home)


def put(path: Path, text: str) -> None:
    """Write a file of the guest; a symbolic link in its place is replaced, not followed out of the tree."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(text)


def _add_line(path: Path, line: str) -> None:
    """Add an account to one of the guest's databases, where it has that one (`passwd` makes the shadowed ones)."""
    if path.is_symlink() or not path.is_file():
        return
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _give(home: Path) -> None:
    home.chmod(0o755)
    entries: Iterable[Path] = (home, *home.rglob("*"))
    for path in entries:
        os.chown(path, UID, UID, follow_symlinks=False)


def _empty(directory: Path) -> None:
    if directory.is_symlink() or not directory.is_dir():
        return
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
