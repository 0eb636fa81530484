"""What the soak's samples must look like to pass."""

import pytest

from scripts.soak_report import AT_REST, COUNTS, MIB, SHOWN, Soak, judge, picture, table

pytestmark = pytest.mark.timeout(30)

MINUTES = 60
NAMES = (*MIB, *COUNTS, *SHOWN)


def soak(**growth: float) -> Soak:
    """An hour of 10 of everything and execs of 10 ms, with what is named ending that many times higher."""

    def value(name: str, share: float) -> float:
        return 10.0 * (1.0 + (growth.get(name, 1.0) - 1.0) * share)

    samples = [
        {"t_s": t_s, **{name: value(name, t_s / 3600) for name in NAMES}} for t_s in map(float, range(300, 3600, 5))
    ]
    execs = [(t_s, value("exec", t_s / 3600)) for t_s in map(float, range(300, 3600))]
    rest = dict.fromkeys(AT_REST, 10.0)
    return Soak(
        duration_s=MINUTES * 60.0, window_s=300.0, began=0.0, done={}, samples=samples, execs=execs, rest_before=rest,
        rest_after=dict(rest),
    )  # fmt: skip


def grown(of: Soak) -> set[tuple[str, str]]:
    return {(row.name, row.when) for row in judge(of) if not row.is_held}


def test_an_even_hour_passes() -> None:
    """Nothing grew, and what is only shown may grow."""
    assert grown(soak(journal_mib=3.0, slab_unreclaimable_mib=3.0)) == set()


@pytest.mark.parametrize("name", MIB)
def test_memory_that_grows_is_seen(name: str) -> None:
    """A fifth more over the hour is more than a tenth between the windows; a twentieth is not."""
    assert grown(soak(**{name: 1.2})) == {(name, "load")}
    assert grown(soak(**{name: 1.05})) == set()


@pytest.mark.parametrize("name", COUNTS)
def test_counts_that_grow_are_seen(name: str) -> None:
    """Under load by more than a tenth and two; at rest by one."""
    assert grown(soak(**{name: 1.5})) == {(name, "load")}
    at_rest = soak()
    at_rest.rest_after[name] += 1
    assert grown(at_rest) == {(name, "rest")}


def test_slow_execs_are_seen_and_a_slow_spell_is_not() -> None:
    """All execs a fifth slower at the end fail; one slice of the last window that is ten times slower does not."""
    assert grown(soak(exec=1.2)) == {("exec_ms_p50", "load"), ("exec_ms_p99", "load")}
    spell = soak()
    spell.execs = [(t_s, spent_ms * 10 if 3400 <= t_s < 3410 else spent_ms) for t_s, spent_ms in spell.execs]
    assert grown(spell) == set()


def test_what_a_person_sees() -> None:
    """The table marks what grew, and has a line per minute; the picture has a panel for each number."""
    of = soak(node_rss_mib=1.5)
    text = table(of, judge(of)).splitlines()
    assert [line.split()[0] for line in text if line.endswith("GREW")] == ["node_rss_mib"]
    assert "5-10 min" in text[0]
    assert "55-60 min" in text[0]
    minutes = [line for line in text if line.strip() and line.split()[0].isdecimal() and len(line.split()) == 4]
    assert len(minutes) == MINUTES - 5
    assert picture(of).count("<polyline") == len(NAMES) + 2
