"""Names of sources, and the documents of images: what is taken from them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from barchan.errors import BlobCorrupt, InvalidSpec, NotFound
from barchan.image import oci
from barchan.image.git import GitSource
from barchan.image.oci import Descriptor, ImageConfig, Index, Platform, Running, template_config
from barchan.image.registry_image import RegistryImage
from barchan.image.sources import FileImage, parse
from barchan.image.template import GUEST_PATH, Layer, Template

DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docker://host.example/a/b:1", RegistryImage("host.example", "a/b", "1")),
        ("docker://127.0.0.1:5000/a", RegistryImage("127.0.0.1:5000", "a", "latest")),
        ("docker://localhost/a", RegistryImage("localhost", "a", "latest")),
        ("docker://[::1]:80/a-b__c.d:x", RegistryImage("[::1]:80", "a-b__c.d", "x")),
        (f"docker://h.x/a:1@{DIGEST}", RegistryImage("h.x", "a", DIGEST)),
        ("docker://docker.io/python:3", RegistryImage("registry-1.docker.io", "library/python", "3")),
        ("docker://docker.io/a/b", RegistryImage("registry-1.docker.io", "a/b", "latest")),
        ("oci:/none/there:tag", FileImage("oci", Path("/none/there"), "tag")),
        ("oci:/", FileImage("oci", Path("/"), None)),
        ("oci-archive:/f.tar", FileImage("oci-archive", Path("/f.tar"), None)),
        ("docker-archive:/f.tar:a/b:1", FileImage("docker-archive", Path("/f.tar"), "a/b:1")),
        ("dir:/a:b", FileImage("dir", Path("/a:b"), None)),
        ("git:https://u@h.x:1/a.git@v1", GitSource("https://u@h.x:1/a.git", "v1", "/workspace")),
        ("git:git@h.x:a/b@abc123:/srv//code/", GitSource("git@h.x:a/b", "abc123", "/srv/code")),
        ("git:/a@feature/x", GitSource("/a", "feature/x", "/workspace")),
    ],
)
def test_sources_are_read(text: str, expected: object) -> None:
    """Each form gives its parts, with the usual defaults."""
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "debian",
        "docker:host.x/a",
        "docker://busybox:latest",
        "docker://library/busybox",
        "docker://h.x/UPPER",
        "docker://h.x/a/../b",
        "docker://h.x/a:-tag",
        "docker://h.x/a@sha256:00",
        "docker://user:secret@h.x/a",
        "oci:",
        "dir:",
        "git:/a",
        "git:/a@",
        "git:--upload-pack=x@abc",
        "git:/a@-x",
        "git:/a@x..y",
        "git:/a@x:/",
        "git:/a@x:/a/../..",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    """What is no source is said with the form that was meant."""
    with pytest.raises(InvalidSpec, match=r"is none of|is not|is no folder"):
        parse(text)


def test_a_repository_s_password_is_not_shown() -> None:
    """The name of a source that is kept and shown has no credentials."""
    assert GitSource.parse("https://me:secret@h.x/a@v1").shown == "git:https://h.x/a@v1"


def index_of(*platforms: Platform | None) -> Index:
    return Index(manifests=tuple(Descriptor("m", f"sha256:{n:064x}", 1, platform=p) for n, p in enumerate(platforms)))


def test_the_image_of_this_machine_is_chosen() -> None:
    """By system and architecture; attestations and other machines' images are passed over."""
    arm, ours, none = Platform("arm64", "linux", "v8"), Platform("amd64", "linux"), Platform("unknown", "unknown")
    assert oci.choose(index_of(none, arm, ours), "x", ours).digest.endswith("2")
    assert oci.choose(index_of(arm, ours), "x", Platform("arm64", "linux")).digest.endswith("0")
    assert oci.choose(index_of(None), "x", ours).digest.endswith("0")


def test_a_missing_platform_lists_those_there_are() -> None:
    """Nobody has to look them up elsewhere."""
    with pytest.raises(NotFound, match=r"no image for linux/amd64; it has: linux/arm64/v8, windows/amd64"):
        oci.choose(
            index_of(Platform("arm64", "linux", "v8"), Platform("amd64", "windows")), "x", Platform("amd64", "linux")
        )


def test_a_config_is_honoured() -> None:
    """Variables, user, directory, entry point and command become the template's; what is not said has a default."""
    running = Running(user="12:13", env=("A=1", "PATH=/x", "E="), entrypoint=("/e",), cmd=("a", "b"), working_dir="srv")
    made = template_config(ImageConfig(config=running), name="n", source="s")
    assert (made.user, made.workdir, made.env) == ("12:13", "/srv", {"PATH": "/x", "A": "1", "E": ""})
    assert (made.entrypoint, made.cmd) == (("/e",), ("a", "b"))
    plain = template_config(ImageConfig(), name="n", source="s")
    assert (plain.user, plain.workdir, plain.env, plain.cmd) == ("root", "/", {"PATH": GUEST_PATH}, ())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ImageConfig(architecture="s390x"), "is an image for linux/s390x|is an image for /s390x"),
        (ImageConfig(os="windows"), "is an image for windows"),
        (ImageConfig(config=Running(env=("A",))), "'A' is not NAME=VALUE"),
        (ImageConfig(config=Running(env=("=x",))), "'=x' is not NAME=VALUE"),
        (ImageConfig(config=Running(user="a b")), "user 'a b'"),
    ],
)
def test_an_impossible_config_is_refused(config: ImageConfig, said: str) -> None:
    """What no sandbox here could be is said before a layer is fetched."""
    with pytest.raises(InvalidSpec, match=said):
        template_config(config, name="n", source="s")


LAYER = {"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": DIGEST, "size": 1}
FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": [{**LAYER, "mediaType": FOREIGN}]}, "foreign layer"),
        ({"layers": [{**LAYER, "urls": ["https://x"]}]}, "foreign layer"),
        ({"layers": [{**LAYER, "mediaType": "application/x-thing"}]}, "no layer of a file system"),
        ({"layers": [{**LAYER, "mediaType": LAYER["mediaType"] + "+encrypted"}]}, "no layer of a file system"),
        ({"layers": [{**LAYER, "digest": "sha512:" + "0" * 128}]}, "no other kind is read"),
        ({"layers": [{**LAYER, "digest": "sha256:../../etc/passwd"}]}, "no other kind is read"),
        ({"layers": [{**LAYER, "size": -1}]}, "size -1"),
        ({"layers": [LAYER] * 1001}, "1001 layers"),
    ],
)
def test_layers_that_are_none_are_refused(change: dict[str, Any], said: str) -> None:
    """Foreign, encrypted and absurd layers are named, and nothing of them is fetched."""
    document = {"config": LAYER, "layers": [], **change}
    with pytest.raises(InvalidSpec, match=said):
        oci.read_manifest(json.dumps(document).encode(), "it")


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b'{"config": 1, "layers": []}', b"[" * 100_000])
def test_damaged_documents_are_corrupt(data: bytes) -> None:
    """Whatever a source sends instead of a manifest is an error of one kind."""
    with pytest.raises(BlobCorrupt):
        oci.read_manifest(data, "it")
    assert not oci.is_index(data)


def test_a_document_that_is_too_large_is_not_read() -> None:
    """4 MiB are enough for any."""
    with pytest.raises(BlobCorrupt, match="more than 4194304 bytes"):
        oci.read_manifest(b" " * (oci.DOCUMENT_BYTES_MAX + 1), "it")


def test_the_first_schema_is_refused_by_name() -> None:
    """Old registries' manifests have no digests of what layers hold."""
    with pytest.raises(InvalidSpec, match="first manifest schema"):
        oci.is_index(b'{"schemaVersion": 1, "fsLayers": []}')


def test_diff_ids_must_match_the_layers() -> None:
    """A config of another image is noticed."""
    manifest = oci.read_manifest(json.dumps({"config": LAYER, "layers": [LAYER]}).encode(), "it")
    with pytest.raises(BlobCorrupt, match="names 0 layers, its manifest 1"):
        oci.read_config(b"{}", manifest, "it")


def test_equal_templates_are_exported_as_equal_bytes() -> None:
    """Name and age change nothing; the config says what the template does."""

    def exported(name: str, created: float) -> bytes:
        template = Template(
            name=name,
            digest="d",
            layers=(Layer("1" * 64, "erofs"), Layer("2" * 64, "dir")),
            size_bytes=1,
            created_unix_s=created,
            user="agent",
            workdir="/w",
            env={"A": "1"},
            source="s",
            entrypoint=("/e",),
            cmd=("c",),
        )
        return oci.image_config(template, [DIGEST, DIGEST])

    assert exported("a", 1.0) == exported("b", 2.0)
    read = msgspec.json.decode(exported("a", 1.0), type=ImageConfig)
    assert read.config == Running("agent", ("A=1",), ("/e",), ("c",), "/w")
    assert read.rootfs.diff_ids == (DIGEST, DIGEST)
