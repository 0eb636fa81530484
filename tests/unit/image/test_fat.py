"""The file systems of seed disks."""

import subprocess
from pathlib import Path

import pytest

from barchan.errors import InvalidSpec
from barchan.image.fat import CLUSTER_BYTES, CLUSTERS_MAX, file_system

FILES = {
    "meta-data": b"instance-id: x\n",
    "user-data": b"#cloud-config\n" * 1000,
    "a-name-of-more-than-thirteen-characters": bytes(range(256)) * 40,
    "empty": b"",
}


def test_the_same_files_give_the_same_bytes() -> None:
    """Nothing in it depends on when it was made."""
    assert file_system("CIDATA", FILES) == file_system("CIDATA", FILES)


@pytest.mark.requires("fsck.fat", "mtools")
def test_others_read_it(tmp_path: Path) -> None:
    """A checker that is not ours finds no fault, and readers find the label, and every file under its long name."""
    image = tmp_path / "seed"
    image.write_bytes(file_system("CIDATA", FILES))
    checked = subprocess.run(["fsck.fat", "-n", image], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout.count("\n")) == (0, 2), checked.stdout
    label = subprocess.run(["blkid", "-p", "-s", "LABEL", "-o", "value", image], capture_output=True, check=True)
    assert label.stdout == b"CIDATA\n"
    for name, data in FILES.items():
        assert subprocess.run(["mtype", "-i", image, f"::{name}"], capture_output=True, check=True).stdout == data


@pytest.mark.parametrize(
    "files",
    [{"ä": b""}, {"": b""}, {"x": bytes(CLUSTERS_MAX * CLUSTER_BYTES + 1)}, {f"{n:040}": b"" for n in range(40)}],
)
def test_what_does_not_fit_is_refused(files: dict[str, bytes]) -> None:
    """Names and sizes are bounded."""
    with pytest.raises(InvalidSpec):
        file_system("CIDATA", files)
