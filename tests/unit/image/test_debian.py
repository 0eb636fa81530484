"""The Debian base: what is asked of mmdebstrap, what is refused, how a tree becomes a sandbox's."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from barchan.errors import Conflict, InvalidSpec, RequirementMissing
from barchan.image.debian import DebianSpec, build_debian, finish, host_sources, put
from barchan.image.pack import make_layer
from barchan.image.store import ImageStore, NewLayer
from barchan.image.template import Layer, TemplateConfig


def no_progress(stage: str) -> None:
    raise AssertionError(f"nothing was to be done, yet: {stage}")


@pytest.mark.parametrize(
    "spec",
    [
        DebianSpec(suite="-o"),
        DebianSpec(suite="Book worm"),
        DebianSpec(include=("--option",)),
        DebianSpec(include=("git=1",)),
        DebianSpec(include=("?essential",)),
        DebianSpec(name="-x"),
    ],
)
def test_what_is_no_suite_or_package_is_refused(tmp_path: Path, spec: DebianSpec) -> None:
    """Nothing that could be an option or a pattern reaches the tools."""
    with pytest.raises(InvalidSpec):
        build_debian(ImageStore(tmp_path), spec, "erofs", no_progress, force=False)


def test_the_same_packages_are_not_built_twice(tmp_path: Path) -> None:
    """A template made from the same packages is returned as it is; one made from others is a `Conflict`."""
    store = ImageStore(tmp_path)
    spec = DebianSpec(include=("git", "make"))
    built = store.commit(TemplateConfig(name="debian", source=spec.source), ())
    same = DebianSpec(include=("make", "git", "git", "python3"))
    assert build_debian(store, same, "erofs", no_progress, force=False) == built
    with pytest.raises(Conflict, match="--force"):
        build_debian(store, DebianSpec(), "erofs", no_progress, force=False)


@pytest.mark.requires("mkfs.erofs")
def test_one_that_an_earlier_release_compressed_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that reads layers without a mount could use it; one that was packed as now is returned as it is."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    store, spec = ImageStore(tmp_path / "images"), DebianSpec()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("the same again " * 1000)
    for name in ("new", "old"):
        with store.workspace() as workspace:
            if name == "new":
                layer = make_layer(tmp_path / "tree", workspace, "erofs")
            else:
                argv = ["mkfs.erofs", "--quiet", "-zlz4hc", workspace / "old", tmp_path / "tree"]
                subprocess.run(argv, check=True, capture_output=True)
                layer = NewLayer(Layer("0" * 64, "erofs"), workspace / "old")
            built = store.commit(TemplateConfig(name="debian", source=spec.source), (layer,))
        if name == "new":
            assert build_debian(store, spec, "erofs", no_progress, force=False) == built
        else:
            with pytest.raises(RequirementMissing, match="building a Debian image needs root"):
                build_debian(store, spec, "erofs", no_progress, force=False)


def test_building_as_anyone_but_root_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RequirementMissing`, before anything is downloaded or written."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RequirementMissing, match="needs root"):
        build_debian(ImageStore(tmp_path / "images"), DebianSpec(), "erofs", no_progress, force=False)
    assert not (tmp_path / "images").exists()


def test_only_the_host_sources_of_the_suite_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite, its updates and its security, main only, each once; without apt none."""
    rows = [
        "http://mirror.test/debian/ trixie main",
        "http://mirror.test/debian/ trixie contrib",
        "http://mirror.test/debian/ trixie main",
        "http://mirror.test/debian/ trixie-updates main",
        "http://mirror.test/security/ trixie-security main",
        "http://mirror.test/debian/ bookworm main",
        "http://elsewhere.test/ nodistro main",
        "broken",
    ]
    fake = tmp_path / "apt-get"
    fake.write_text("#!/bin/sh\ncat <<E\n" + "\n".join(rows) + "\nE\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert host_sources("trixie") == [
        "deb http://mirror.test/debian/ trixie main",
        "deb http://mirror.test/debian/ trixie-updates main",
        "deb http://mirror.test/security/ trixie-security main",
    ]
    assert host_sources("sid") == []
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert host_sources("trixie") == []


@pytest.mark.requires("root")
def test_a_tree_becomes_a_sandbox_s(tmp_path: Path) -> None:
    """User, names, empty /dev and caches; accounts only in the databases that are there."""
    for name in ("dev", "tmp", "etc/skel", "home", "var/cache/apt/archives", "usr/share/doc/x", "var/lib/dpkg"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (tmp_path / "etc/group").write_text("root:x:0:\n")
    (tmp_path / "etc/skel/.profile").write_text("p")
    (tmp_path / "var/cache/apt/archives/x.deb").write_text("x")
    (tmp_path / "var/lib/dpkg/status-old").write_text("x")
    (tmp_path / "var/lib/dpkg/status").write_text("x")
    (tmp_path / "usr/share/doc/x/copyright").write_text("x")
    os.mknod(tmp_path / "dev/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    finish(tmp_path)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    assert found == {
        "etc/passwd",
        "etc/group",
        "etc/hosts",
        "etc/hostname",
        "etc/resolv.conf",
        "etc/skel/.profile",
        "home/agent/.profile",
        "var/lib/dpkg/status",
    }
    assert (tmp_path / "etc/passwd").read_text().splitlines()[1] == "agent:*:1000:1000:agent:/home/agent:/bin/bash"
    assert (tmp_path / "etc/group").read_text().splitlines()[1] == "agent:*:1000:"
    assert "127.0.0.1 localhost sandbox" in (tmp_path / "etc/hosts").read_text()
    assert (tmp_path / "etc/resolv.conf").read_text() == ""
    for path in (tmp_path / "home/agent", tmp_path / "home/agent/.profile"):
        assert (path.stat().st_uid, path.stat().st_gid) == (1000, 1000)


def test_a_link_in_the_tree_does_not_lead_out_of_it(tmp_path: Path) -> None:
    """A file that is written into the tree replaces a link in its place; what that pointed to stays as it was."""
    outside = tmp_path / "outside"
    outside.write_text("host")
    inside = tmp_path / "resolv.conf"
    inside.symlink_to(outside)
    put(inside, "guest")
    assert outside.read_text() == "host"
    assert (inside.read_text(), inside.is_symlink()) == ("guest", False)
