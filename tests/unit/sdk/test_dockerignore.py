"""What of a context stays behind, by Docker's rules."""

from pathlib import Path

import pytest

from barchan.errors import InvalidSpec
from barchan.sdk.dockerignore import Ignored, read_ignored


def read(folder: Path, text: str) -> Ignored:
    (folder / ".dockerignore").write_text(text)
    return read_ignored(folder, folder / "Dockerfile")


@pytest.mark.parametrize(
    ("patterns", "ignored", "kept"),
    [
        ("a", "a a/b a/b/c", "b b/a ab"),
        ("/a/", "a a/b", "b/a"),
        ("*.log", "x.log .log x.log/y", "a/x.log x.logs"),
        ("**/*.log", "x.log a/x.log a/b/x.log", "x.txt"),
        ("a/**", "a/b a/b/c", "a b/a"),
        ("a/**/z", "a/z a/b/z a/b/c/z", "z az"),
        ("?x", "ax bx", "x a/x aax"),
        ("[a-c].[!o]", "a.c c.h", "d.c a.o"),
        ("*\n!keep", "a a/b", "keep keep/x"),
        ("*\n!a/keep", "a a/b b", "a/keep a/keep/x"),
        ("!a\na", "a", "b"),
        ("a\n!a\na/b", "a/b a/b/c", "a a/c"),
        ("# a\n  b  \n\n#c", "b", "a c"),
        ("a/../b", "b", "a"),
        (".", "", "a b/c"),
        ("\\*", "*", "a"),
        ("a.b+(c)", "a.b+(c)", "axb"),
        ("", "", "a"),
    ],
)
def test_patterns(tmp_path: Path, patterns: str, ignored: str, kept: str) -> None:
    """The last one that matches a path, or a folder above it, decides."""
    found = read(tmp_path, patterns)
    assert [path for path in ignored.split() if path not in found] == []
    assert [path for path in kept.split() if path in found] == []


def test_what_stays_behind_of_a_folder(tmp_path: Path) -> None:
    """A folder alone where all of it does, else its entries; paths are relative to the folder that is sent."""
    for name in ("s/a/x", "s/b/x", "s/b/keep", "s/c", "t/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = read(tmp_path, "s/a\ns/b\nt\n!s/b/keep\n")
    assert sorted(found.below(tmp_path, "s")) == ["a", "b/x"]
    assert sorted(found.below(tmp_path, ".")) == ["s/a", "s/b/x", "t"]
    assert list(read(tmp_path, "").below(tmp_path, ".")) == []


def test_what_is_no_pattern(tmp_path: Path) -> None:
    """It is said with file and line."""
    with pytest.raises(InvalidSpec, match=r"\.dockerignore:2: a `!` needs a pattern"):
        read(tmp_path, "a\n!\n")
    with pytest.raises(InvalidSpec, match=r"\.dockerignore:1: .* is no pattern"):
        read(tmp_path, "[z-a]\n")
