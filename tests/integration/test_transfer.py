"""Images between this machine, a real registry and the tools of others: the same content, whichever way it went."""

import asyncio
import base64
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace

import barchan
from barchan.cli.main import main
from barchan.errors import Denied, NotFound
from barchan.image import sources
from barchan.image.compose import config_of
from barchan.image.erofs import Erofs
from barchan.image.export import push
from barchan.image.sources import RegistryOptions, Wishes
from barchan.image.stack import Stack
from barchan.image.store import ImageStore
from barchan.image.template import Template
from barchan.sdk.build import build
from barchan.sdk.recipe import Recipe, Run
from tests.layouts import Layout, tar_of
from tests.leaks import processes
from tests.nodes import NodeProcess
from tests.registries import blobs_in, running_registry
from tests.stores import node_of_its_own

TOOLS = ("root", "skopeo", "umoci", "buildah", "docker-registry", "htpasswd")
pytestmark = [pytest.mark.timeout(120), pytest.mark.requires(*TOOLS)]

SCRIPT = """
set -eu
cd "$1"
b() { buildah --root store --runroot run --storage-driver vfs "$@"; }
mkdir -p root/opt root/etc root/data/sub root/gone/deep
echo setting >root/etc/app
echo first >root/data/file
ln root/data/file root/data/same
ln -s ../etc/app root/data/link
printf '#!/bin/sh\\n' >root/opt/tool
chmod 4755 root/opt/tool
chown 1000:1000 root/data/sub
echo x >root/gone/deep/x
one=$(b from scratch)
b copy -q "$one" root / >/dev/null
b config --env A=1 --user 1000:1000 --workingdir /data --entrypoint '["/opt/tool"]' --cmd 'now' "$one"
b commit -q "$one" oci:layout:base >/dev/null
two=$(b from -q oci:layout:base)
tree=$(b mount "$two")
rm -r "$tree/gone" "$tree/data/sub"
mkdir "$tree/data/sub"
echo new >"$tree/data/sub/new"
echo second >"$tree/data/file"
b umount "$two" >/dev/null
b config --env B=2 "$two"
b commit -q "$two" oci:layout:app >/dev/null
b rm -a >/dev/null
b rmi -a -f >/dev/null
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a layout that buildah made: `base`, and `app`, a layer more that changes and removes things."""
    folder = tmp_path_factory.mktemp("made")
    done = subprocess.run(["bash", "-c", SCRIPT, "bash", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("registry")
    with running_registry(folder) as host:
        yield host, folder


def skopeo(source: str, target: str, *options: str) -> None:
    argv = ["skopeo", "copy", "-q", "--src-tls-verify=false", "--dest-tls-verify=false", *options, source, target]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


async def pull(store: ImageStore, source: str, name: str, registries: RegistryOptions | None = None) -> Template:
    return await sources.pull(
        store,
        source,
        kind="erofs",
        progress=lambda said: None,
        wishes=Wishes(name=name),
        registries=registries or RegistryOptions(),
    )


def shown(store: ImageStore, template: Template) -> dict[str, object]:
    """What a sandbox of an image sees: path -> mode, owner and content or target."""
    layers = [Erofs.open(store.layer_path(layer)) for layer in template.layers]
    stack = Stack(layers)
    found: dict[str, object] = {}
    for path, node in stack.walk():
        mode = node.inode.mode
        content: bytes = b""
        if stat.S_ISREG(mode):
            content = b"".join(stack.stream(node))
        elif stat.S_ISLNK(mode):
            content = stack.readlink(node)
        found[os.fsdecode(path)] = (oct(mode), node.inode.uid, content)
    for layer in layers:
        layer.close()
    found.pop("", None)
    return found


def unpacked(layout: Path, tag: str, target: Path) -> dict[str, object]:
    """The same of what umoci makes of an image."""
    done = subprocess.run(["umoci", "unpack", "--image", f"{layout}:{tag}", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    root = target / "rootfs"
    found: dict[str, object] = {}
    for path in root.rglob("*"):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        content = os.fsencode(path.readlink()) if path.is_symlink() else content
        found[str(path.relative_to(root))] = (oct(status.st_mode), status.st_uid, content)
    return found


async def test_every_way_in_gives_the_same_layers(made: Path, registry: tuple[str, Path], tmp_path: Path) -> None:
    """Registry (OCI and Docker manifests, gzip and zstd), layout, both archives; and umoci sees the same tree."""
    host, _ = registry
    skopeo(f"oci:{made}/layout:app", f"docker://{host}/app:oci")
    skopeo(f"oci:{made}/layout:app", f"docker://{host}/app:docker", "--format", "v2s2")
    skopeo(f"oci:{made}/layout:app", f"oci:{tmp_path}/zstd:app", "--dest-compress-format", "zstd")
    skopeo(f"oci:{made}/layout:app", f"oci-archive:{tmp_path}/oci.tar:app")
    skopeo(f"oci:{made}/layout:app", f"docker-archive:{tmp_path}/docker.tar:team/app:1")
    ways = (
        f"oci:{made}/layout:app",
        f"docker://{host}/app:oci",
        f"docker://{host}/app:docker",
        f"oci:{tmp_path}/zstd:app",
        f"oci-archive:{tmp_path}/oci.tar",
        f"docker-archive:{tmp_path}/docker.tar",
    )
    digests = set()
    for number, way in enumerate(ways):
        store = ImageStore(tmp_path / f"images{number}")
        template = await pull(store, way, "app")
        digests.add(template.digest)
        assert shown(store, template) == unpacked(made / "layout", "app", tmp_path / f"bundle{number}")
        assert (template.user, template.workdir, template.entrypoint) == ("1000:1000", "/data", ("/opt/tool",))
        assert (template.cmd, template.env["A"], template.env["B"]) == (("now",), "1", "2")
        assert len(template.layers) == 2
    assert len(digests) == 1


@pytest.mark.parametrize("options", [[], ["--zstd"]])
def test_the_way_out_and_back(
    made: Path,
    registry: tuple[str, Path],
    tmp_path: Path,
    options: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Pushed by the command, read by others' tools, pulled again: the same; a second push sends nothing."""
    host, folder = registry
    state = ["--state-dir", str(tmp_path / "state"), "--json"]
    there = f"docker://{host}/out{len(options)}:v1"
    assert main(["image", "pull", f"oci:{made}/layout:app", "--name", "app", *state]) == 0
    assert main(["image", "push", "app", there, *options, *state]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["blobs_bytes"] > 0
    before = blobs_in(folder)
    assert main(["image", "push", "app", there, *options, *state]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again == {"digest": first["digest"], "blobs_bytes": 0}
    assert blobs_in(folder) == before
    skopeo(there, f"oci:{tmp_path}/copy:v1")
    if not options:  # umoci of Debian 12 knows no zstd
        expected = unpacked(made / "layout", "app", tmp_path / "expected")
        assert unpacked(tmp_path / "copy", "v1", tmp_path / "bundle") == expected
    store = ImageStore(tmp_path / "other")
    back = asyncio.run(pull(store, there, "app"))
    assert back.digest == ImageStore(tmp_path / "state/images").resolve("app").digest
    by_digest = asyncio.run(pull(store, f"{there.removesuffix(':v1')}@{first['digest']}", "other"))
    assert by_digest.digest == back.digest


async def test_a_registry_that_wants_to_know_who_we_are(made: Path, tmp_path: Path) -> None:
    """Nobody and the wrong one are denied, by name; with the right credentials both ways work."""
    (tmp_path / "registry").mkdir()
    with running_registry(tmp_path / "registry", user="me", password="pass word") as host:
        store = ImageStore(tmp_path / "images")
        await pull(store, f"oci:{made}/layout:app", "app")

        def known(user: str) -> RegistryOptions:
            auth = base64.b64encode(f"{user}:pass word".encode()).decode()
            (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
            return RegistryOptions(auth_file=tmp_path / "config.json")

        for registries in (RegistryOptions(), known("other")):
            with pytest.raises(Denied, match=host) as caught:
                await push(store, "app", f"docker://{host}/a:1", progress=lambda said: None, registries=registries)
            assert "pass word" not in str(caught.value)
            with pytest.raises(Denied, match=host):
                await pull(store, f"docker://{host}/a:1", "b", registries)
        await push(store, "app", f"docker://{host}/a:1", progress=lambda said: None, registries=known("me"))
        made_again = await pull(ImageStore(tmp_path / "other"), f"docker://{host}/a:1", "b", known("me"))
        assert made_again.layers == store.resolve("app").layers
        with pytest.raises(NotFound, match="has no such thing"):
            await pull(store, f"docker://{host}/a:2", "b", known("me"))


async def test_a_dead_mirror_is_passed_over(made: Path, registry: tuple[str, Path], tmp_path: Path) -> None:
    """One that nobody listens at, one that lacks the image, and one that has it: the image comes all the same."""
    host, _ = registry
    skopeo(f"oci:{made}/layout:app", f"docker://{host}/mirrored:1")
    retries = sources.Retries(attempts=2, first_s=0.01)
    (tmp_path / "empty").mkdir()
    with running_registry(tmp_path / "empty") as empty:
        options = RegistryOptions(mirrors=("127.0.0.1:1", empty), retries=retries)
        template = await pull(ImageStore(tmp_path / "images"), f"docker://{host}/mirrored:1", "app", options)
    options = RegistryOptions(mirrors=(host,), retries=retries)
    again = await pull(ImageStore(tmp_path / "more"), "docker://127.0.0.1:1/mirrored:1", "app", options)
    assert again.digest == template.digest


class HalfALayer(BaseHTTPRequestHandler):
    """Serves a layout as a registry would, but of its layer only the first half, and then keeps silent."""

    layout: Layout
    hanging = threading.Event()

    def do_GET(self) -> None:
        reference = self.path.rpartition("/")[2]
        digest = reference if reference.startswith("sha256:") else self.layout.manifest["digest"]
        data = self.layout.blob(digest).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if digest != self.layout.layers[0]["digest"]:
            self.wfile.write(data)
            return
        self.wfile.write(data[: len(data) // 2])
        self.hanging.wait(60)

    def log_message(self, format: str, *args: object) -> None:
        """Tests say nothing."""


def test_a_killed_pull_leaves_nothing(tmp_path: Path) -> None:
    """Its packer dies with it, and the next one clears what it had begun."""
    HalfALayer.layout = Layout(tmp_path / "layout", tar_of(("a", os.urandom(4 << 20))))
    HalfALayer.hanging.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), HalfALayer)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        source = f"docker://127.0.0.1:{server.server_address[1]}/a:1"
        state = tmp_path / "state"
        argv = [sys.executable, "-m", "barchan.cli", "image", "pull", source, "--state-dir", str(state)]
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
            begun = state / "images/tmp"
            deadline = time.monotonic() + 30
            while not any(begun.glob("*/*.erofs")) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert any(begun.glob("*/*.erofs"))
            process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while _packers(state) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _packers(state) == []
        with ImageStore(state / "images").workspace():
            assert len(list(begun.iterdir())) == 1
        assert [
            path.name for folder in ("layers", "templates", "tmp") for path in (state / "images" / folder).iterdir()
        ] == []
    finally:
        HalfALayer.hanging.set()
        server.shutdown()
        server.server_close()
        serving.join()


def _packers(state: Path) -> list[int]:
    return [pid for pid, argv in processes() if any(str(state) in argument for argument in argv)]


@pytest.fixture
def node(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    yield from node_of_its_own(images, tmp_path_factory)


@pytest.mark.requires("cgroup", "userns", "mkfs.btrfs")
async def test_sandboxes_see_what_was_pulled(node: NodeProcess, made: Path, tmp_path: Path) -> None:
    """An image of other tools and a repository, each over the base image of a real node."""
    repository = tmp_path / "repository"
    subprocess.run(["git", "init", "-q", repository], check=True)
    (repository / "main.py").write_text("print('hello')\n")
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", "-C", repository, "add", "main.py"], check=True)
    subprocess.run(["git", "-C", repository, *who, "commit", "-q", "-m", "x"], check=True)
    store = ImageStore(node.state_dir / "images")
    await pull(store, f"git:{repository}@HEAD:/srv/code", "code")
    await pull(store, f"oci:{made}/layout:app", "app")
    script = """
        python3 /srv/code/main.py
        cat /data/file /data/same /data/sub/new
        ls -d /gone
        ls /srv/code/.git
    """
    async with (
        barchan.connect_async(state_dir=node.state_dir) as client,
        await client.create("debian", layers=["app", "code"]) as sandbox,
    ):
        words = (await sandbox.exec(script)).text.split()
        assert words[:4] == ["hello", "second", "second", "new"]
        assert {"HEAD", "objects", "refs"} <= set(words)


# crun 1.8 refuses hosts that have version 1 hierarchies and a version 2 one beside them: it is shown one without.
CRUN = """
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
exec crun --cgroup-manager=cgroupfs run "$1"
"""


@pytest.mark.requires("cgroup", "userns", "mkfs.btrfs", "crun")
async def test_others_run_what_was_pulled_extended_and_pushed(
    node: NodeProcess, registry: tuple[str, Path], tmp_path: Path
) -> None:
    """Out to a registry, in again under another name, one built layer more, out again: crun runs its program."""
    host, _ = registry
    store = ImageStore(node.state_dir / "images")
    await push(store, "debian", f"docker://{host}/base:1", progress=lambda said: None)
    await pull(store, f"docker://{host}/base:1", "pulled")
    recipe = Recipe(
        base="pulled",
        steps=(Run(command="echo 'import os; print(os.environ[\"GREETING\"])' > /srv/say.py"),),
        env={"GREETING": "from a built layer"},
        workdir="/srv",
        cmd=("python3", "say.py"),
    )
    async with barchan.connect_async(state_dir=node.state_dir) as client:
        built = await build(client, recipe)
        async with await client.create(built) as sandbox:
            assert (await sandbox.exec(recipe.cmd)).text == "from a built layer\n"
    config = replace(config_of(store.resolve(built)), name="built", cmd=recipe.cmd)
    store.commit(config, store.resolve(built).layers)
    await push(store, "built", f"docker://{host}/built:1", progress=lambda said: None)
    skopeo(f"docker://{host}/built:1", f"oci:{tmp_path}/layout:1", "--src-tls-verify=false")
    bundle = tmp_path / "bundle"
    subprocess.run(["umoci", "unpack", "--image", f"{tmp_path}/layout:1", bundle], check=True, capture_output=True)
    runtime = json.loads((bundle / "config.json").read_text())
    assert (runtime["process"]["args"], runtime["process"]["cwd"]) == (["python3", "say.py"], "/srv")
    runtime["process"]["terminal"] = False
    (bundle / "config.json").write_text(json.dumps(runtime))
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", CRUN, "sh", f"barchan-test-{os.getpid()}"]
    ran = subprocess.run(argv, cwd=bundle, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "from a built layer\n", "")
