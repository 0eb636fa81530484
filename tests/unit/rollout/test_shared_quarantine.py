"""A task that is quarantined by one process of a run is so for all of them."""

from pathlib import Path

from barchan.rollout.quarantine import FILE, HELD_OFF, Quarantine


async def test_all_processes_know_it(tmp_path: Path) -> None:
    """Also those that were there before, and those that come later; the first reason stands."""
    one, two = Quarantine(tmp_path), Quarantine(tmp_path)
    assert await two.why("t1") is None
    await one.add("t1", "no control")
    await two.add("t1", "another reason")
    await two.add("t2", "it stalls")
    three = Quarantine(tmp_path)
    for process in (one, two, three):
        assert [await process.why(task_id) for task_id in ("t1", "t2", "t3")] == ["no control", "it stalls", None]
    assert len((tmp_path / FILE).read_text().splitlines()) == 2


async def test_a_line_that_was_cut_short_is_cut_off(tmp_path: Path) -> None:
    """Its writer was killed: it had quarantined nothing."""
    await Quarantine(tmp_path).add("t1", "no control")
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"task_id":"t2","wh')
    later = Quarantine(tmp_path)
    await later.add("t3", "it stalls")
    assert [await later.why(task_id) for task_id in ("t1", "t2", "t3")] == ["no control", None, "it stalls"]


async def test_what_a_process_holds_off_ends_with_it(tmp_path: Path) -> None:
    """All know it as long as that process goes on; whoever goes on with the run, once what was wrong is mended, begins
    the task again, and of a process that was killed nothing stays.
    """
    one, two = Quarantine(tmp_path), Quarantine(tmp_path)
    for task_id in ("t1", "t2", "t1"):
        await one.hold_off(task_id, "voids piled up")
    assert [await two.why(task_id) for task_id in ("t1", "t2", "t3")] == ["voids piled up", "voids piled up", None]
    held_off = next((tmp_path / HELD_OFF).iterdir())
    (held_off.with_name("killed.jsonl")).write_bytes(held_off.read_bytes().replace(b"t1", b"t3"))
    one.close()
    assert [await two.why(task_id) for task_id in ("t1", "t2", "t3")] == [None, None, None]
    assert (list((tmp_path / HELD_OFF).iterdir()), await one.why("t1")) == ([], "voids piled up")


async def test_without_a_folder_it_is_the_process_own() -> None:
    """Nothing is written."""
    alone = Quarantine()
    await alone.add("t1", "no control")
    assert (await alone.why("t1"), await Quarantine().why("t1")) == ("no control", None)
