"""Files stay small enough to read in one sitting; the few longer ones may only shrink."""

from tests.tidy.source import files, relative

LONG_LINES = 500
LINES_MAX = 800
SLACK_LINES = 25

# Files longer than LONG_LINES, with the length they must not pass. A bound follows its file down and is never raised.
BOUNDS = {
    "bench/bare/bare.c": 643,
}


def test_file_sizes_only_ratchet_down() -> None:
    """A file over 500 lines has a bound of at most 800 here, keeps it, and the bound follows it down."""
    assert all(bound <= LINES_MAX for bound in BOUNDS.values())
    wrong = []
    long: set[str] = set()
    for path in files(".py", ".c", ".h", ".sh"):
        name, lines = relative(path), path.read_bytes().count(b"\n")
        if lines <= LONG_LINES:
            continue
        long.add(name)
        if name not in BOUNDS:
            wrong.append(f"{name} has {lines} lines: find the part that wants to leave, or give it a bound")
        elif lines > BOUNDS[name]:
            wrong.append(f"{name} grew to {lines} lines, over its bound of {BOUNDS[name]}")
        elif lines < BOUNDS[name] - SLACK_LINES:
            wrong.append(f"{name} shrank to {lines} lines: lower its bound of {BOUNDS[name]}")
    wrong += [f"{name} is not a long file any more: drop its bound" for name in BOUNDS if name not in long]
    assert wrong == []
