"""Trees between sandboxes: what travels arrives as it was, what may not travel is left out or refused."""

import io
import tarfile
from collections.abc import Callable

import pytest

from barchan.errors import InvalidSpec
from barchan.rollout.tars import Tree, packed, unpacked

pytestmark = pytest.mark.timeout(30)


def tar(*entries: tuple[str, bytes, str | bytes], change: Callable[[tarfile.TarInfo], None] | None = None) -> bytes:
    """A tar of (name, type, content or link target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, kind, content in entries:
            entry = tarfile.TarInfo(name)
            entry.type = kind
            if isinstance(content, str):
                entry.linkname = content
                made.addfile(entry)
                continue
            entry.size = len(content)
            entry.mode = 0o4711
            if change is not None:
                change(entry)
            made.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def names(data: bytes) -> dict[str, tuple[int, str]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as found:
        return {member.name: (member.mode, member.linkname) for member in found.getmembers()}


GOOD = (
    ("a/", tarfile.DIRTYPE, b""),
    ("a/b", tarfile.REGTYPE, b"text"),
    ("a/up", tarfile.SYMTYPE, "../c"),
    ("c", tarfile.REGTYPE, b""),
)
BAD = (
    ("/etc/passwd", tarfile.REGTYPE, b"x"),
    ("../x", tarfile.REGTYPE, b"x"),
    ("a/../../x", tarfile.REGTYPE, b"x"),
    ("out", tarfile.SYMTYPE, "/etc/passwd"),
    ("out", tarfile.SYMTYPE, "../x"),
    ("a/out", tarfile.SYMTYPE, "b/../../.."),
    ("hard", tarfile.LNKTYPE, "c"),
    ("device", tarfile.CHRTYPE, b""),
    ("pipe", tarfile.FIFOTYPE, b""),
)


def test_a_tree_arrives_as_it_was() -> None:
    """Folders, files and links that stay in their folder; set-id bits go, and everybody may read."""
    tree = Tree(path="/work/out", is_folder=True, data=tar(*GOOD))
    data, dropped = packed([tree, Tree(path="note.txt", is_folder=False, data=b"n", mode=0o600)])
    assert dropped == ()
    assert sorted(names(data)) == ["note.txt", "work/out", "work/out/a", "work/out/a/b", "work/out/a/up", "work/out/c"]
    folder, note = unpacked(data, ("/work/out", "note.txt"), 1000)
    assert (note.data, note.mode, note.is_folder) == (b"n", 0o644, False)
    found = names(folder.data)
    assert {name: link for name, (_, link) in found.items()} == {"a": "", "a/b": "", "a/up": "../c", "c": ""}
    assert {found[name][0] for name in ("a", "a/b", "c")} == {0o755}


@pytest.mark.parametrize("entry", BAD, ids=[f"{entry[0]} {entry[1].decode()} {entry[2]!r}" for entry in BAD])
def test_what_may_not_travel_is_left_out_and_said(entry: tuple[str, bytes, str | bytes]) -> None:
    """It is left behind with its name; the rest goes on."""
    data, dropped = packed([Tree(path="d", is_folder=True, data=tar(*GOOD, entry))])
    assert dropped == (f"d/{entry[0]}",)
    assert sorted(names(data)) == ["d", "d/a", "d/a/b", "d/a/up", "d/c"]


@pytest.mark.parametrize("entry", BAD, ids=[f"{entry[0]} {entry[1].decode()} {entry[2]!r}" for entry in BAD])
def test_what_may_not_travel_is_refused_where_it_enters(entry: tuple[str, bytes, str | bytes]) -> None:
    """A tar that was changed on its way is refused whole."""
    with pytest.raises(InvalidSpec):
        unpacked(tar((f"d/{entry[0]}", *entry[1:])), ("d",), 1000)
    with pytest.raises(InvalidSpec):
        unpacked(tar(entry), ("d",), 1000)


def test_what_is_not_declared_is_refused() -> None:
    """A tar holds the declared paths and nothing else."""
    with pytest.raises(InvalidSpec, match="declare"):
        unpacked(tar(("d", tarfile.DIRTYPE, b""), ("dd/x", tarfile.REGTYPE, b"")), ("d",), 1000)


def test_bytes_are_counted_as_they_are() -> None:
    """More than the bound is refused, and so is a file that claims more bytes than there are."""
    with pytest.raises(InvalidSpec, match="larger"):
        unpacked(tar(("d", tarfile.REGTYPE, b"x" * 1001)), ("d",), 1000)
    with pytest.raises(InvalidSpec, match="tar"):
        unpacked(tar(("d", tarfile.REGTYPE, b"x" * 5000))[:2048], ("d",), 10000)
    with pytest.raises(InvalidSpec, match="tar"):
        unpacked(b"garbage" * 1000, ("d",), 100000)


def test_a_sparse_file_is_left_out() -> None:
    """One that is holes only costs nothing to send and everything to unpack."""

    def sparse(entry: tarfile.TarInfo) -> None:
        entry.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}

    data = tar(("hole", tarfile.REGTYPE, b"1\n0\n0\n".ljust(512, b"\0")), change=sparse)
    _, dropped = packed([Tree(path="d", is_folder=True, data=data)])
    assert dropped == ("d/hole",)
    assert len(packed([Tree(path="d", is_folder=True, data=data)])[0]) < 20000


def test_many_left_out_are_counted() -> None:
    """The names of the first twenty are told, and how many more there are."""
    pipes = [(f"p{number}", tarfile.FIFOTYPE, b"") for number in range(30)]
    _, dropped = packed([Tree(path="d", is_folder=True, data=tar(*pipes))])
    assert (len(dropped), dropped[-1]) == (21, "and 10 more")
