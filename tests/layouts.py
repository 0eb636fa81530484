"""Image layouts written by hand, so that a test can say in them what no tool would."""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path
from typing import Any

GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def tar_of(*entries: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    """An archive of files, by name and content, and of whatever else is given."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                member = tarfile.TarInfo(entry[0])
                member.size = len(entry[1])
                tar.addfile(member, io.BytesIO(entry[1]))
    return out.getvalue()


def member(name: str, kind: bytes, link: str = "", **fields: int) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, link
    for key, value in fields.items():
        setattr(made, key, value)
    return made


class Layout:
    """A layout with one image of the given layers (tar archives, lowest first)."""

    def __init__(self, path: Path, *layers: bytes, config: dict[str, Any] | None = None, **running: Any) -> None:
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        self.layers = [{"mediaType": GZIP, **self.put(gzip.compress(layer, 1, mtime=0))} for layer in layers]
        self.config = {
            "architecture": MACHINE,
            "os": "linux",
            "config": running,
            "rootfs": {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]},
            **(config or {}),
        }
        self.write()

    def put(self, data: bytes) -> dict[str, Any]:
        digest = sha256(data)
        (self.path / "blobs/sha256" / digest.removeprefix("sha256:")).write_bytes(data)
        return {"digest": digest, "size": len(data)}

    def blob(self, digest: str) -> Path:
        return self.path / "blobs/sha256" / digest.removeprefix("sha256:")

    def write(self, **manifest: Any) -> None:
        """Write config, manifest and index again, after a change."""
        config = {"mediaType": "application/vnd.oci.image.config.v1+json", **self.put(json.dumps(self.config).encode())}
        whole = {"schemaVersion": 2, "config": config, "layers": self.layers, **manifest}
        self.manifest = {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            **self.put(json.dumps(whole).encode()),
        }
        self.index(self.manifest)

    def index(self, *manifests: dict[str, Any]) -> None:
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
