"""Rows for a trainer."""

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from barchan.cli.main import main
from barchan.errors import InvalidSpec
from barchan.rollout.advantages import advantages
from barchan.rollout.export import rows, write_jsonl, write_parquet
from barchan.rollout.record import Completion, RolloutRecord
from barchan.rollout.store import RunFolder, iter_rollouts
from tests.unit.rollout.test_store import folder_at
from tests.unit.rollout.test_summary import ONE, VOID, ZERO, record

pytestmark = pytest.mark.timeout(60)

SAID = (
    Completion(prompt_ids=(1, 2), completion_ids=(3,), logprobs=(-0.5,), policy_version=7, wait_ms=1.5, text="a"),
    Completion(prompt_ids=(1, 2, 3), completion_ids=(4, 5), logprobs=(-0.25, -1.0), text="b"),
)


def told() -> list[RolloutRecord]:
    return [
        replace(record(ONE, sample_index=0), completions=SAID, verdict=ONE.with_metrics({"tests": 3.0})),
        record(VOID, sample_index=1),
        record(ZERO, sample_index=2),
        record(ONE, "b"),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made: RunFolder
    with folder_at(tmp_path / "run") as made:
        for item in told():
            made.add(item)
    return made.path


def test_parquet_holds_what_a_trainer_needs(folder: Path, tmp_path: Path) -> None:
    """A row per rollout: ids, verdict, advantage and mask, and each model call's tokens, log-probs and version."""
    parquet = pytest.importorskip("pyarrow.parquet")
    target = tmp_path / "out.parquet"
    assert write_parquet(target, rows(folder, advantages(iter_rollouts(folder), normalize="none"))) == 4
    first, lost, zero, alone = parquet.read_table(target).to_pylist()
    assert (first["reward"], first["advantage"], first["mask"], first["metrics"]) == (1.0, 0.5, True, [("tests", 3.0)])
    assert first["prompt_ids"] == [[1, 2], [1, 2, 3]]
    assert first["completion_ids"] == [[3], [4, 5]]
    assert first["logprobs"] == [[-0.5], [-0.25, -1.0]]
    assert (first["policy_versions"], first["texts"], first["wait_ms"]) == (["7", None], ["a", "b"], [1.5, None])
    assert (lost["reward"], lost["advantage"], lost["mask"], lost["cause"]) == (None, 0.0, False, "boot_failure")
    assert (zero["advantage"], zero["truncated"], zero["total_ms"]) == (-0.5, True, 9.0)
    assert (alone["mask"], alone["group"] == first["group"]) == (False, False)


def test_both_formats_say_the_same(folder: Path, tmp_path: Path) -> None:
    """The columns of the one are the members of the other, in the same order."""
    parquet = pytest.importorskip("pyarrow.parquet")
    found = advantages(iter_rollouts(folder))
    write_jsonl(tmp_path / "out.jsonl", rows(folder, found))
    write_parquet(tmp_path / "out.parquet", rows(folder, found))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [list(line) for line in lines] == [list(row) for row in table]
    assert lines == [{**row, "metrics": dict(row["metrics"])} for row in table]


def test_a_run_of_many_rows_is_written_in_parts(tmp_path: Path) -> None:
    """More rows than are held at once are all there, in order."""
    parquet = pytest.importorskip("pyarrow.parquet")
    with folder_at(tmp_path / "run") as made:
        for number in range(1100):
            made.add(record(ONE, sample_index=number))
    found = advantages(iter_rollouts(made.path))
    assert write_parquet(tmp_path / "out.parquet", rows(made.path, found)) == 1100
    assert parquet.read_table(tmp_path / "out.parquet")["sample_index"].to_pylist() == list(range(1100))


def test_a_run_that_goes_on_is_exported_as_far_as_it_was_judged(folder: Path) -> None:
    """Records that come while it is written wait for the next export."""
    found = advantages(told()[:2])
    assert [row["rollout_id"] for row in rows(folder, found)] == [item.rollout_id for item in told()[:2]]


def test_the_command_writes_either(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the target's name; it says how many rows may be trained on."""
    assert main(["export", str(folder), str(tmp_path / "out.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "path": str(tmp_path / "out.jsonl"),
        "rollouts": 4,
        "trainable": 2,
    }
    assert main(["export", str(folder), str(tmp_path / "out.csv")]) == 2
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out.jsonl")]) == 1
    assert main(["export", str(folder), str(tmp_path / "no" / "out.jsonl")]) == 2


def test_without_pyarrow_the_extra_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["export", str(folder), str(tmp_path / "out.parquet")]) == 3
    assert "barchan[parquet]" in capsys.readouterr().err


def test_what_parquet_can_not_hold_is_told(tmp_path: Path) -> None:
    """A token id beyond 64 bits is no row."""
    pytest.importorskip("pyarrow")
    with folder_at(tmp_path / "run") as made:
        made.add(replace(record(ONE), completions=(Completion(completion_ids=(1 << 70,)),)))
    with pytest.raises(InvalidSpec, match="written"):
        write_parquet(tmp_path / "out.parquet", rows(made.path, advantages(iter_rollouts(made.path))))
