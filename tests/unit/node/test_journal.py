"""The journal: what it was told survives, another format is refused."""

import sqlite3
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from barchan.errors import BackendError, CapacityError, RequirementMissing
from barchan.image.template import Layer, Template
from barchan.model.sandbox import SandboxSpec
from barchan.node import journal as module
from barchan.node.journal import Journal
from barchan.node.rest import Stored, Used

TEMPLATE = Template(
    name="debian",
    digest="d" * 64,
    layers=(Layer("a" * 64, "erofs"),),
    size_bytes=1,
    created_unix_s=0.0,
    user="agent",
    workdir="/",
    env={},
    source="test",
)
SPEC = SandboxSpec(template="debian", create_id="c1", labels={"a": "b"})


def test_what_was_begun_is_found_by_the_next_node(tmp_path: Path) -> None:
    """A node that was killed right after `begin` has told enough: nothing was closed or flushed."""
    Journal(tmp_path / "journal").begin("sb_1", SPEC, TEMPLATE)
    (row,) = Journal(tmp_path / "journal").live()
    assert (row.sandbox_id, row.spec, row.template, row.ended_unix_s) == ("sb_1", SPEC, TEMPLATE, None)


def test_a_create_id_is_taken_once(tmp_path: Path) -> None:
    """Also after its sandbox ended."""
    journal = Journal(tmp_path / "journal")
    journal.begin("sb_1", SPEC, TEMPLATE)
    journal.end("sb_1", "stopped", "killed")
    with pytest.raises(BackendError):
        journal.begin("sb_2", SPEC, TEMPLATE)
    found = journal.find_create("c1")
    assert found is not None
    assert (found.sandbox_id, found.end_cause) == ("sb_1", "killed")


def test_the_first_end_stands(tmp_path: Path) -> None:
    """A sandbox that ended by its ttl was not killed later."""
    journal = Journal(tmp_path / "journal")
    journal.begin("sb_1", SPEC, TEMPLATE)
    journal.end("sb_1", "stopped", "ttl", 12.5)
    journal.end("sb_1", "lost", "killed")
    row = journal.find("sb_1")
    assert row is not None
    assert (row.phase, row.end_cause, row.create_ms) == ("stopped", "ttl", 12.5)
    assert journal.live() == []


def test_old_ends_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour after its end; what lives stays whatever its age."""
    journal = Journal(tmp_path / "journal")
    journal.begin("sb_old", SPEC, TEMPLATE)
    journal.begin("sb_live", SandboxSpec(template="debian"), TEMPLATE)
    journal.end("sb_old", "stopped", "killed")
    later = time.time() + module.ENDED_KEPT_S + 1
    monkeypatch.setattr(module.time, "time", lambda: later)
    journal.prune()
    assert journal.find("sb_old") is None
    assert journal.find("sb_live") is not None


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A node never guesses at what another release wrote."""
    journal = Journal(tmp_path / "journal")
    journal.close()
    with sqlite3.connect(tmp_path / "journal") as database:
        database.execute("UPDATE meta SET value = '99' WHERE name = 'format'")
    database.close()
    with pytest.raises(RequirementMissing, match="format 99"):
        Journal(tmp_path / "journal")


STORED = Stored(snapshot_id="hib_1", template=TEMPLATE, own_layers=1, frozen_s=0.5, memory_bytes=1 << 20)


def test_sleep_is_known_to_the_next_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since when, whether somebody asked for it, where it is on disk; and after the wake, for how long it slept."""
    journal = Journal(tmp_path / "journal")
    journal.begin("sb_1", SPEC, TEMPLATE)
    journal.pause("sb_1", is_asked=False)
    journal.asked("sb_1")
    (row,) = Journal(tmp_path / "journal").live()
    assert (row.phase, row.is_asked, row.stored) == ("paused", True, None)
    assert row.since_unix_s is not None
    journal.hibernate("sb_1", STORED)
    (row,) = Journal(tmp_path / "journal").live()
    assert (row.phase, row.stored) == ("hibernated", STORED)
    later = time.time() + 100
    monkeypatch.setattr(module.time, "time", lambda: later)
    assert row.awake_s < 50
    other = replace(TEMPLATE, layers=(Layer("b" * 64, "erofs"), *TEMPLATE.layers))
    before = Used(cpu_s=2.5, oom_kills=1, memory_peak_bytes=1 << 20)
    journal.came_back("sb_1", other, 1, before)
    (row,) = Journal(tmp_path / "journal").live()
    assert (row.phase, row.since_unix_s, row.stored, row.is_asked) == ("booting", None, None, False)
    assert (row.template, row.own_layers, row.before) == (other, 1, before)
    assert 99 < row.asleep_s < 101
    assert row.awake_s < 50


def test_what_has_ended_does_not_go_to_sleep(tmp_path: Path) -> None:
    """A kill that crosses a pause stands."""
    journal = Journal(tmp_path / "journal")
    journal.begin("sb_1", SPEC, TEMPLATE)
    journal.end("sb_1", "stopped", "killed")
    journal.pause("sb_1", is_asked=True)
    journal.wake("sb_1")
    row = journal.find("sb_1")
    assert row is not None
    assert (row.phase, row.end_cause) == ("stopped", "killed")


STORED = Stored(snapshot_id="hib_1", template=TEMPLATE, own_layers=1, frozen_s=0.0, memory_bytes=1)


def test_one_on_disk_is_found_there_though_its_pause_was_never_noted(tmp_path: Path) -> None:
    """So is that other nodes may have it."""
    journal = Journal(tmp_path / "journal")
    for sandbox_id in ("sb_1", "sb_2"):
        journal.begin(sandbox_id, replace(SPEC, create_id=None), TEMPLATE)
    journal.hibernate("sb_1", STORED)
    journal.published("sb_2")
    rows = {row.sandbox_id: row for row in Journal(tmp_path / "journal").live()}
    assert (rows["sb_1"].phase, rows["sb_1"].stored) == ("hibernated", STORED)
    assert rows["sb_1"].since_unix_s is not None
    assert rows["sb_2"].is_published
    journal.wake("sb_1")
    row = journal.find("sb_1")
    assert row is not None and row.stored is None


def test_a_full_disk_is_said_and_ends_are_written_later(tmp_path: Path) -> None:
    """What can't be noted is an error, and half of it is not there; an end holds, and is noted when there is room."""
    journal = Journal(tmp_path / "journal")
    journal.begin("sb_1", SPEC, TEMPLATE)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    long = replace(TEMPLATE, source="x" * 20_000)
    with pytest.raises(CapacityError, match="full"):
        journal.hibernate("sb_1", replace(STORED, template=long))
    row = journal.find("sb_1")
    assert row is not None and (row.phase, row.stored) == ("booting", None)
    journal.end("sb_1", "stopped", "killed" * 5000)
    journal.end("sb_1", "lost", "later")
    row = journal.find("sb_1")
    assert row is not None and (row.phase, row.error().code) == ("stopped", "sandbox_expired")
    with pytest.raises(CapacityError):
        journal.settle()
    journal._db.execute("PRAGMA max_page_count = 1000000")
    assert [row.sandbox_id for row in Journal(tmp_path / "journal").live()] == ["sb_1"]
    journal.settle()
    assert Journal(tmp_path / "journal").live() == []


def test_a_moment_of_standing_still_is_no_pause(tmp_path: Path) -> None:
    """A node killed in it leaves one that is awake, and since when it was not."""
    journal = Journal(tmp_path / "journal")
    journal.begin("sb_1", SPEC, TEMPLATE)
    journal.still("sb_1")
    row = Journal(tmp_path / "journal").find("sb_1")
    assert row is not None and row.phase == "booting" and row.since_unix_s is not None
    journal.wake("sb_1")
    row = journal.find("sb_1")
    assert row is not None and row.since_unix_s is None
