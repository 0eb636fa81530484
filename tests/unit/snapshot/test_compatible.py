"""Which hosts may restore a memory snapshot of another."""

import platform

import msgspec
import pytest

from barchan.errors import SnapshotIncompatible
from barchan.model.snapshot import FORMAT
from barchan.snapshot.compatible import Host, check, this_host
from tests.memory_dirs import RECORD

HOST = Host("4.1.1", "6.18.5-cloud-amd64", "x86_64", ("avx", "avx2", "sse2"))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"kernel": "6.18.0"},
        {"kernel": "6.18"},
        {"criu": "4.1"},
        {"criu": "3.19"},
        {"cpu_features": ()},
    ],
)
def test_a_host_that_can_do_as_much_restores_it(change: dict[str, object]) -> None:
    """The same series of kernels, no fewer features, and a CRIU that is not older will do."""
    check(msgspec.structs.replace(RECORD, **change), HOST)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernel": "6.17.9"}, r"Linux 6\.17\.9, and this is 6\.18\.5"),
        ({"kernel": "7.18.5"}, "Linux 7"),
        ({"kernel": "unknown"}, "Linux unknown"),
        ({"machine": "aarch64", "cpu_features": ("sve",)}, "of a aarch64, and this is a x86_64"),
        ({"cpu_features": ("avx", "avx512f", "sse2")}, "lacks avx512f, which"),
        ({"cpu_features": tuple(f"f{n}" for n in range(10))}, "and 2 more"),
        ({"criu": "4.2"}, r"CRIU 4\.2 wrote it, and the one here, 4\.1\.1"),
        ({"format": FORMAT + 1}, "format"),
        ({"criu": "5.0", "kernel": "5.4.0"}, "Linux 5.4.0.*CRIU 5.0"),
    ],
)
def test_what_differs_is_named(change: dict[str, object], said: str) -> None:
    """Any other host refuses it, and says everything that stands in the way."""
    with pytest.raises(SnapshotIncompatible, match=said):
        check(msgspec.structs.replace(RECORD, **change), HOST)


def test_this_host_is_like_itself() -> None:
    """What is found of this host lets it restore its own snapshots."""
    host = this_host("4.1.1")
    assert (host.kernel, host.machine) == (platform.release(), platform.machine())
    assert host.cpu_features
    check(msgspec.structs.replace(RECORD, **host._asdict()), host)
