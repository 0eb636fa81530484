"""What became of all attacks, a line for each class."""

from collections.abc import Sequence

from tests.hacks.play import Outcome, Played

OUTCOMES: tuple[Outcome, ...] = ("blocked", "detected", "silent", "void")


def rows(played: Sequence[Played]) -> list[dict[str, str | int]]:
    """A row for each class, and one for all of them."""
    classes = list(dict.fromkeys(one.hack for one in played))
    return [_row(name, [one for one in played if one.hack == name]) for name in classes] + [_row("all", played)]


def _row(name: str, played: Sequence[Played]) -> dict[str, str | int]:
    return {
        "class": name,
        "attacks": len(played),
        **{outcome: sum(one.outcome == outcome for one in played) for outcome in OUTCOMES},
        "noticed": sum(one.noticed for one in played),
        "twins paid": sum(one.twin_reward == 1.0 for one in played),
        "false alarms": sum(bool(one.false_alarms) for one in played),
    }


def text(played: Sequence[Played]) -> str:
    """The table, and what is wrong in it."""
    found = rows(played)
    heads = list(found[0])
    widths = [max(len(head), *(len(str(row[head])) for row in found)) for head in heads]
    lines = [
        "  ".join(str(word).ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in (heads, *(row.values() for row in found))
    ]
    for one in played:
        if one.outcome in ("silent", "void", "detected"):
            lines.append(f"{one.outcome}: {one.format}: {one.name} ({one.cause})")
        if one.twin_reward != 1.0:
            lines.append(f"twin unpaid: {one.format}: {one.name}: {one.twin_reward}")
        lines += [f"false alarm: {one.format}: {one.name}: {alarm}" for alarm in one.false_alarms]
    return "\n".join(lines)


def is_good(played: Sequence[Played]) -> bool:
    """No attack was paid in silence, none bought a void, and every twin was paid."""
    return all(one.outcome in ("blocked", "detected") and one.twin_reward == 1.0 for one in played)
