"""Real images: a Debian built twice is the same, and its Python works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from barchan.image.debian import DebianSpec, build_debian
from barchan.image.store import ImageStore
from barchan.image.template import Template

pytestmark = [pytest.mark.requires("root", "mmdebstrap"), pytest.mark.timeout(600)]

IMPORTS = "import asyncio, ctypes, hashlib, json, sqlite3, ssl, unittest, venv, zipfile"
LOOK = f"""
import os, pwd, socket, sys
{IMPORTS}
cached = [m.__cached__ for m in list(sys.modules.values()) if getattr(m, "__cached__", None)]
print(json.dumps({{
    "agent": list(pwd.getpwnam("agent")),
    "certificates": len(ssl.create_default_context().get_ca_certs()),
    "uncompiled": [path for path in cached if not os.path.exists(path)],
    "dev": os.listdir("/dev"),
    "tmp": oct(os.stat("/tmp").st_mode),
    "home": os.stat("/home/agent").st_uid,
    "times": sorted({{os.stat(path).st_mtime for path in ("/etc", "/etc/passwd", "/usr/bin/python3")}}),
    "hosts": open("/etc/hosts").read(),
    "resolv": open("/etc/resolv.conf").read(),
}}))
"""
TOOLS = "bash ls grep sed find ps tar gzip awk python3 dpkg env"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[ImageStore, Template]]:
    """The same build in two stores."""
    built = []
    for name in ("one", "two"):
        store = ImageStore(tmp_path_factory.mktemp(name))
        built.append((store, build_debian(store, DebianSpec(), "erofs", lambda stage: None, force=False)))
    return built


def in_image(store: ImageStore, template: Template, *argv: str) -> str:
    """Run a program in the image's tree, in namespaces that end with it."""
    layer = store.layer_path(template.layers[0])
    # /mnt is only covered in the mount namespace of this one command.
    script = f'mount -t erofs -o ro {layer} /mnt && exec chroot /mnt "$@"'
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script, "sh", *argv],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_builds_have_one_digest(stores: list[tuple[ImageStore, Template]]) -> None:
    """The same package versions give the same file, byte for byte, of about 105 MB; no build leaves anything else."""
    (one, first), (two, second) = stores
    assert first.digest == second.digest
    paths = [one.layer_path(first.layers[0]), two.layer_path(second.layers[0])]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert 60 << 20 < first.size_bytes < 150 << 20
    for store in (one, two):
        assert list((store.root / "tmp").iterdir()) == []


def test_the_base_is_usable(stores: list[tuple[ImageStore, Template]]) -> None:
    """Compiled Python with its standard library and certificates, the agent's account, nothing of the build host."""
    store, template = stores[0]
    found = json.loads(in_image(store, template, "/usr/bin/python3", "-B", "-c", LOOK))
    assert found["agent"] == ["agent", "*", 1000, 1000, "agent", "/home/agent", "/bin/bash"]
    assert found["certificates"] > 100
    assert found["uncompiled"] == []
    assert found["dev"] == []
    assert found["tmp"] == "0o41777"
    assert found["home"] == 1000
    assert found["times"] == [946684800.0]
    assert "sandbox" in found["hosts"]
    assert found["resolv"] == ""
    assert len(in_image(store, template, "/bin/bash", "-c", f"command -v {TOOLS}").split()) == len(TOOLS.split())


def test_building_again_by_the_cli_is_quick_and_says_the_digest(stores: list[tuple[ImageStore, Template]]) -> None:
    """A second `image build` of the same packages does nothing; `--json` prints the image on the last line."""
    store, template = stores[0]
    state_dir = store.root.parent / "state"
    state_dir.mkdir()
    (state_dir / "images").symlink_to(store.root)
    argv = [sys.executable, "-m", "barchan.cli", "image", "build", "debian", "--json", "--state-dir", str(state_dir)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True, timeout=20)
    assert json.loads(done.stdout.splitlines()[-1])["digest"] == template.digest
