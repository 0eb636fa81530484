"""What `auto` comes to."""

from typing import Any

import pytest

from barchan.core.choosing import (
    FIRST_START_S,
    SEEN_MAX,
    TEMPLATES_MAX,
    Offer,
    Starts,
    chosen,
    none_fits,
    ranked,
    unfit,
)
from barchan.errors import InvalidSpec, RequirementMissing
from barchan.model.image import needs_of
from barchan.model.sandbox import SandboxSpec, Zygote


def offer(name: str, isolation: Any = "container", **changes: Any) -> Offer:
    fields: dict[str, Any] = {
        "has": frozenset({"fork", "memory_snapshot"}),
        "kinds": frozenset({"root"}),
        "memory_mib_min": 16,
        "networks": frozenset({"none", "open", "allow"}),
        "roots": frozenset({"plain"}),
        "start_s": 0.01,
    }
    return Offer(name=name, isolation=isolation, **{**fields, **changes})


CONTAINER = offer(
    "container", has=frozenset({"fork", "memory_snapshot", "zygote"}), roots=frozenset({"plain", "capable"})
)
GVISOR = offer("gvisor", "user_kernel", has=frozenset({"fork", "own_kernel"}), start_s=0.3)
MICROVM = offer(
    "microvm", "kernel", has=frozenset({"own_kernel"}), networks=frozenset({"none"}), memory_mib_min=64, start_s=2.0
)
VM = offer("vm", "machine", has=frozenset({"own_kernel", "screen"}), kinds=frozenset({"disk"}), start_s=30.0)
ALL = (CONTAINER, GVISOR, MICROVM, VM)


def auto(**fields: Any) -> SandboxSpec:
    return SandboxSpec(template="debian", backend="auto", **fields)


def fitting(spec: SandboxSpec, kind: Any = "root", needs: Any = ()) -> list[str]:
    """The strongest first."""
    return [item.name for item in ranked(ALL) if not unfit(item, spec, kind, needs)]


def test_the_strongest_comes_first() -> None:
    """By isolation, not by the order they are known in; of equals the faster one."""
    assert [item.name for item in ranked(ALL)] == ["vm", "microvm", "gvisor", "container"]
    slow, fast = offer("slow", start_s=2.0), offer("fast", start_s=1.0)
    assert ranked([slow, fast]) == [fast, slow]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (auto(), ["microvm", "gvisor", "container"]),
        (auto(start_within_s=0.5), ["gvisor", "container"]),
        (auto(start_within_s=0.01), ["container"]),
        (auto(start_within_s=0.001), []),
        (auto(network="open"), ["gvisor", "container"]),
        (auto(memory_mib=32), ["gvisor", "container"]),
        (auto(root="capable"), ["container"]),
        (auto(zygote=Zygote()), ["container"]),
        (auto(needs=("fork",)), ["gvisor", "container"]),
        (auto(needs=("own_kernel",)), ["microvm", "gvisor"]),
        (auto(needs=("screen",)), []),
    ],
)
def test_what_is_asked_for_counts(spec: SandboxSpec, expected: list[str]) -> None:
    """A weaker backend that has it goes before a stronger one that has not."""
    assert fitting(spec) == expected


def test_what_the_image_needs_counts() -> None:
    """Its kind and its needs, beside what is asked for."""
    assert fitting(auto(), kind="disk") == ["vm"]
    assert fitting(auto(), needs=("own_kernel",)) == ["microvm", "gvisor"]
    assert fitting(auto(needs=("fork",)), needs=("own_kernel",)) == ["gvisor"]


def test_the_reason_names_what_was_stronger() -> None:
    """Whoever wonders why it is not a virtual machine reads it in one line."""
    choice = chosen(GVISOR, {"vm": "it starts machines' disks only", "microvm": "no QEMU (barchan tools install qemu)"})
    assert choice.backend == "gvisor"
    assert "not microvm: no QEMU (barchan tools install qemu)" in choice.reason


def test_seen_start_times_are_told_as_such() -> None:
    """A refusal for its time says whether that is a guess."""
    spec = auto(start_within_s=0.5)
    assert "unless seen otherwise" in unfit(MICROVM, spec, "root", ())
    assert "as it did here" in unfit(offer("microvm", "kernel", start_s=2.0, is_seen=True), spec, "root", ())


def test_none_fits() -> None:
    """Whose doing it is decides the error: a host that lacks something, or a wish that nothing fulfils."""
    unfitting = {"container": "it has no own_kernel"}
    assert isinstance(none_fits(unfitting, {}), InvalidSpec)
    error = none_fits(unfitting, {"gvisor": "no runsc (barchan tools install runsc)"})
    assert isinstance(error, RequirementMissing)
    assert "install runsc" in str(error) and "own_kernel" in str(error)


class TestStarts:
    """What a start is expected to take."""

    def test_nothing_seen(self) -> None:
        """A table, by isolation."""
        assert Starts().expected("microvm", "kernel", "a") == (FIRST_START_S["kernel"], False)

    def test_the_templates_own_count(self) -> None:
        """The middle one of its starts: one slow first start does not count for long."""
        starts = Starts()
        for took_s in (3.0, 0.1, 0.1):
            starts.seen("microvm", "a", took_s)
        assert starts.expected("microvm", "kernel", "a") == (0.1, True)

    def test_another_template_is_a_first_one(self) -> None:
        """What it takes there is what first starts of others took, not what their clones take."""
        starts = Starts()
        for took_s in (3.0, 0.1, 0.1):
            starts.seen("microvm", "a", took_s)
        assert starts.expected("microvm", "kernel", "b") == (3.0, True)
        assert starts.expected("gvisor", "user_kernel", "b") == (FIRST_START_S["user_kernel"], False)

    def test_only_late_ones_count(self) -> None:
        """A host that has become faster is seen to be."""
        starts = Starts()
        for took_s in (*(9.0 for _ in range(SEEN_MAX)), *(0.2 for _ in range(SEEN_MAX))):
            starts.seen("vm", "a", took_s)
        assert starts.expected("vm", "machine", "a") == (0.2, True)

    def test_it_is_bounded(self) -> None:
        """Templates beyond the bound are forgotten, the one used longest ago first."""
        starts = Starts()
        for number in range(TEMPLATES_MAX + 1):
            starts.seen("container", str(number), float(number))
        assert starts.expected("container", "container", "1") == (1.0, True)
        assert starts.expected("container", "container", "0")[0] != 0.0


def test_the_label_of_needs() -> None:
    """Words between blanks or commas, in order and each once; anything else is refused with what there is."""
    assert needs_of("screen, own_kernel screen", "x") == ("own_kernel", "screen")
    assert needs_of("", "x") == ()
    with pytest.raises(InvalidSpec, match="own_kernel, memory_snapshot, fork, screen"):
        needs_of("gpu", "Dockerfile")
