"""What the host sees of a guest: ids, layers, and what reading everything does."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import barchan
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import Layer, TemplateConfig
from barchan.sdk.sandbox import Sandbox
from tests.nodes import NodeProcess
from tests.security.lab import Lab, host_pids

UID_FIRST = 1 << 20
UIDS = 1 << 16
SECRET_FILES = {"/proc/kallsyms", "/proc/interrupts", "/proc/timer_list", "/proc/keys", "/proc/iomem"}


def host_ids(sandbox: Sandbox) -> set[int]:
    """As the host sees them: the user of a process of guest root, and of a file that it makes."""
    process = sandbox.start("touch /tmp/mine; echo made; exec sleep 60", user="root")
    next(iter(process.output()))
    (pid,) = host_pids(sandbox)
    try:
        made = os.stat(f"/proc/{pid}/root/tmp/mine")
        assert Path(f"/proc/{pid}/root/etc/passwd").read_text() == sandbox.files.read_text("/etc/passwd")
        return {made.st_uid, made.st_gid, os.stat(f"/proc/{pid}").st_uid}
    finally:
        process.kill()


class TestIds:
    """Promise 1."""

    def test_guest_root_is_nobody_on_the_host(self, lab: Lab) -> None:
        """Its files and processes carry one unprivileged id, the first of a range that no other sandbox has."""
        with lab.create() as one, lab.create() as other:
            ids = [host_ids(sandbox) for sandbox in (one, other)]
            assert [len(found) for found in ids] == [1, 1]
            first, second = (found.pop() for found in ids)
            assert first >= UID_FIRST
            assert abs(first - second) >= UIDS

    def test_without_a_user_namespace_it_is_root(self, lab: Lab) -> None:
        """The same look finds the host's root."""
        with lab.create("no-userns") as sandbox:
            assert host_ids(sandbox) == {0}


@pytest.fixture(scope="module")
def directory_images(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base image with its layer as a directory, the kind that could be written to."""
    store = ImageStore(images)
    (layer,) = store.resolve("debian").layers
    root = tmp_path_factory.mktemp("images")
    tree = root / "unpacked"
    if layer.kind == "erofs":
        subprocess.run(
            ["fsck.erofs", "-d1", f"--extract={tree}", "--preserve", store.layer_path(layer)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        tree.chmod(0o755)
    else:
        subprocess.run(["cp", "-a", store.layer_path(layer), tree], check=True)
    ImageStore(root / "store").commit(TemplateConfig(name="debian"), (NewLayer(Layer(layer.digest, "dir"), tree),))
    return root / "store"


@pytest.fixture
def connect_to_directory(
    directory_images: Path, make_node: Callable[[], NodeProcess]
) -> Iterator[Callable[..., barchan.Client]]:
    """A client of a node whose base image lies in a directory; the switches weaken the node."""
    with ExitStack() as clients:

        def connect(*switches: str) -> barchan.Client:
            node = make_node()
            (node.state_dir / "images").unlink()
            (node.state_dir / "images").symlink_to(directory_images)
            node.start(*(word for switch in switches for word in ("--weaken", switch)))
            return clients.enter_context(barchan.connect(state_dir=node.state_dir))

        yield connect


def tree_state(root: Path) -> dict[str, tuple[int, ...]]:
    """Every entry with its mode, owner, size and both times of change."""
    return {
        os.path.join(directory, name): (
            *(
                (status := os.lstat(os.path.join(directory, name))).st_mode,
                status.st_uid,
                status.st_gid,
                status.st_size,
            ),
            *(status.st_mtime_ns, status.st_ctime_ns),
        )
        for directory, names, files in os.walk(root)
        for name in [".", *names, *files]
    }


VANDALISM = """
echo hacked > /etc/hacked; echo hacked >> /etc/passwd; chmod 777 /etc/shadow; chown 1000 /etc/hostname
rm -f /usr/bin/id; mv /etc/profile /etc/elsewhere; rm -rf /usr/share/doc; ln -sf /tmp /opt/link
for path in / /usr /etc; do mount -o remount,rw $path; done 2>/dev/null
"""


def vandalise(client: barchan.Client, layers: Path) -> tuple[bool, bool, dict[str, tuple[int, ...]]]:
    """Whether a sandbox that is there and one that comes later see it, and what has changed on the host."""
    before = tree_state(layers)
    with client.create("debian") as vandal, client.create("debian") as present:
        vandal.exec(VANDALISM, user="root")
        assert vandal.files.exists("/etc/hacked")
        with client.create("debian") as later:
            seen = [
                sandbox.files.exists("/etc/hacked") or not sandbox.files.exists("/usr/bin/id")
                for sandbox in (present, later)
            ]
    after = tree_state(layers)
    changed = {path: state for path, state in after.items() if before.get(path) != state}
    changed |= {path: () for path in before if path not in after}
    return seen[0], seen[1], changed


class TestLayers:
    """Promise 7."""

    def test_what_one_sandbox_writes_no_other_sees(
        self, connect_to_directory: Callable[..., barchan.Client], directory_images: Path
    ) -> None:
        """Guest root changes, removes and moves files of the image: no other sandbox and no layer is any different."""
        present, later, changed = vandalise(connect_to_directory(), directory_images / "layers")
        assert (present, later, changed) == (False, False, {})

    def test_with_writable_layers_everybody_sees_it(
        self, connect_to_directory: Callable[..., barchan.Client], directory_images: Path
    ) -> None:
        """The same vandalism reaches the layer and every sandbox. Runs last: it spoils the image."""
        present, later, changed = vandalise(connect_to_directory("writable-layers"), directory_images / "layers")
        assert present and later
        assert any(path.endswith("/etc/hacked") for path in changed)


def grep_everything(sandbox: Sandbox) -> set[str]:
    """The files of the kernel in which guest root finds an `x`.

    A process's own page map has 256 GiB, nearly all holes; the kernel can't hide it, and it costs the reader's time.
    """
    search = "grep -rls x /proc /sys /dev --exclude=pagemap"
    result = sandbox.exec(search, user="root", timeout_s=100, max_output_bytes=16 << 20)
    assert not result.timed_out and result.exit_code in (0, 1, 2)
    assert sandbox.exec(["true"]).ok
    return set(result.text.splitlines())


class TestReadingEverything:
    """Promise 6: see also the program `proc_files`."""

    def test_it_ends_and_finds_no_secret(self, lab: Lab) -> None:
        """`grep -r x` over all of them as guest root ends, harms nothing, and has read nothing of the host's kernel."""
        found = grep_everything(lab.shared())
        assert "/proc/cpuinfo" in found
        assert found & SECRET_FILES == set()

    def test_without_masks_it_finds_some(self, lab: Lab) -> None:
        """The same command reads them."""
        assert {"/proc/kallsyms", "/proc/interrupts"} - grep_everything(lab.shared("no-masks")) == set()
