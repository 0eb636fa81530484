"""Whatever is appended verifies, and whatever is changed afterwards is found."""

import tempfile
from pathlib import Path
from typing import Any, get_args

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from barchan.trajectory.format import Kind
from barchan.trajectory.reader import load, verify
from barchan.trajectory.values import from_json, to_json
from barchan.trajectory.writer import TrajectoryWriter
from tests.unit.trajectory.logs import header

KINDS = st.sampled_from([kind for kind in get_args(Kind) if kind != "verdict"])  # with which a log ends
IDS = st.lists(st.integers(0, 3), max_size=60)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
BODIES = st.dictionaries(
    st.sampled_from(["a", "$bytes", "$$", "stdout", "é\n"]), VALUES, max_size=4
) | st.fixed_dictionaries({"prompt_ids": IDS, "completion_ids": IDS})


class LogMachine(RuleBasedStateMachine):
    """A log and what it must hold, under appends, new writers and torn ends."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "log"
        self.log = TrajectoryWriter.create(self.path, header())
        self.bodies: list[dict[str, Any] | None] = [None]  # None: a header
        self.open: list[int] = []

    @rule(kind=KINDS, body=BODIES)
    def entry(self, kind: Kind, body: dict[str, Any]) -> None:
        assert self.log.entry(kind, body) == len(self.bodies)
        self.bodies.append(body)

    @rule(kind=KINDS, body=BODIES)
    def intent(self, kind: Kind, body: dict[str, Any]) -> None:
        self.open.append(self.log.intent(kind, body))
        self.bodies.append(body)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), body=BODIES)
    def result(self, data: st.DataObject, body: dict[str, Any]) -> None:
        seq = data.draw(st.sampled_from(self.open))
        self.log.result(seq, body)
        self.open.remove(seq)
        self.bodies.append(body)

    @rule(torn=st.binary(max_size=20).filter(lambda data: b"\n" not in data))
    def take_over(self, torn: bytes) -> None:
        self.log.close()
        with self.path.open("ab") as file:
            file.write(torn)
        self.log = TrajectoryWriter.reopen(self.path)
        self.bodies.append(None)

    @invariant()
    def the_log_is_what_was_appended(self) -> None:
        read = load(self.path)
        assert [None if entry.part == "header" else entry.body for entry in read.entries] == self.bodies
        assert [entry.seq for entry in read.open_intents] == self.open
        found = verify(self.path, head_hash=self.log.head_hash)
        assert (found.ok, found.entries, found.torn_bytes) == (True, len(self.bodies), 0)

    def teardown(self) -> None:
        self.log.close()
        self.folder.cleanup()


LogMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
TestLogMachine = LogMachine.TestCase


@settings(deadline=None)
@given(VALUES)
def test_every_value_comes_back(value: Any) -> None:
    """What a policy, a guest or a caller can make of JSON's values and bytes is read back equal."""
    assert from_json(to_json(value)) == value


def a_log(folder: Path) -> bytes:
    with TrajectoryWriter.create(folder / "log", header()) as log:
        seq = log.intent("exec", {"command": "ls -l é", "stdin": b"\xff"}, op_id="1")
        log.result(seq, {"exit_code": 0, "stdout": b"a\nb"})
        log.entry("model_call", {"prompt_ids": list(range(40)), "completion_ids": [1]})
        log.entry("model_call", {"prompt_ids": [*range(40), 1, 2]})
        log.entry("verdict", {"reward": 1.0})
    return (folder / "log").read_bytes()


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    """Every byte of the log, with a bit changed and as a newline: the check names the line that holds it.

    The one exception is the last newline: without it, the last line is torn.
    """
    data = a_log(tmp_path)
    changed = tmp_path / "changed"
    for position in range(len(data) - 1):
        line = data.count(b"\n", 0, position)
        for bits in (0x01, data[position] ^ 0x0A):
            if bits == 0:
                continue  # it is a newline
            broken = bytearray(data)
            broken[position] ^= bits
            changed.write_bytes(broken)
            found = verify(changed)
            assert (found.ok, found.bad_seq) == (False, line), (position, bits)
    changed.write_bytes(data[:-1] + b"x")
    assert verify(changed).entries == data.count(b"\n") - 1


def test_a_log_cut_anywhere_keeps_its_whole_lines(tmp_path: Path) -> None:
    """A writer killed after any number of bytes: the whole lines verify, and the next writer goes on behind them."""
    data = a_log(tmp_path)
    first = data.index(b"\n") + 1
    for length in range(first, len(data), 3):
        cut = tmp_path / f"cut{length}"
        cut.write_bytes(data[:length])
        whole = data.count(b"\n", 0, length)
        assert (verify(cut).ok, verify(cut).entries) == (True, whole)
        with TrajectoryWriter.reopen(cut) as log:
            assert log.entry("note", {}) == whole + 1
        assert verify(cut).ok
        cut.unlink()
