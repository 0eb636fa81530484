"""What a reward file says."""

import pytest

from barchan.rollout.graders.script import NoReward, parsed

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("text", "reward"), [(b"1", 1.0), (b" 0.25\n", 0.25), (b"-3e2", -300.0), (b"100", 100.0), (b"+.5", 0.5)]
)
def test_a_number(text: bytes, reward: float) -> None:
    """Any finite number counts, as it is."""
    assert parsed(text, is_json=False) == (reward, {})


def test_an_object_of_numbers() -> None:
    """`reward` or the only member is the reward, the others are metrics."""
    assert parsed(b'{"reward": 0.5, "tests": 3}', is_json=True) == (0.5, {"tests": 3.0})
    assert parsed(b'{"score": 1}', is_json=True) == (1.0, {})


@pytest.mark.parametrize(
    "text", [b"nan", b"inf", b"1_000", b"one", b"1 2", b"\xff", b"1e999", "\u0661".encode(), b"0x1"]
)
def test_text_that_is_no_reward(text: bytes) -> None:
    """Malformed, whatever a generous reader would make of it."""
    found = parsed(text, is_json=False)
    assert isinstance(found, NoReward)
    assert found.cause == "reward_malformed"


@pytest.mark.parametrize(
    "text",
    [
        b"1",
        b"[1]",
        b"{}",
        b'{"a": 1, "b": 2}',
        b'{"reward": "1"}',
        b'{"reward": null}',
        b'{"reward": NaN}',
        b'{"reward": 1e999}',
        b'{"reward": 1, "more": {"a": 1}}',
        b'{"reward": ' + b"9" * 400 + b"}",
        b"[" * 5000,
        b"\xff\xfe",
        b'{"reward": 1',
    ],
    ids=range(13),
)
def test_json_that_is_no_reward(text: bytes) -> None:
    """Anything but an object of finite numbers is malformed."""
    found = parsed(text, is_json=True)
    assert isinstance(found, NoReward)
    assert found.cause == "reward_malformed"


def test_an_empty_file_is_a_missing_reward() -> None:
    """A file that was made and never written says nothing."""
    for is_json in (False, True):
        found = parsed(b" \n", is_json=is_json)
        assert isinstance(found, NoReward)
        assert found.cause == "reward_missing"
