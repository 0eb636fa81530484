"""Names of forks' children."""

import re

import pytest

from barchan.node.forks import child_hostname


@pytest.mark.parametrize("parent", ["sandbox", "a", "h" * 56, "h" * 57, "h" * 63])
def test_a_child_is_called_after_its_parent_and_its_own_id(parent: str) -> None:
    """As much of the parent's name as there is room for; always a name that a spec may have."""
    name = child_hostname(parent, "sb_0f_0123456789ab")
    assert name.endswith("-6789ab")
    assert parent.startswith(name.removesuffix("-6789ab"))
    assert re.fullmatch(r"[a-z0-9-]{1,63}", name)


def test_generations_keep_names_apart() -> None:
    """However deep: the end is the child's."""
    name = "sandbox"
    seen = set()
    for number in range(100):
        name = child_hostname(name, f"sb_0f_{number:012x}")
        seen.add(name)
    assert len(seen) == 100
