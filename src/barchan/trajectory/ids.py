"""Prompts that continue the call before them are written once: the log of many turns stays linear in their tokens."""

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from barchan.trajectory.format import BadLine, Kind

PROMPT, COMPLETION, EXTENDS = "prompt_ids", "completion_ids", "$extends"
SHARED_MIN = 32  # fewer ids are not worth a reference


class Ids:
    """The token ids of the last model call: what the next prompt most likely starts with."""

    def __init__(self) -> None:
        self._seq = -1
        self._ids: list[int] = []

    def fold(self, seq: int, kind: Kind | None, body: dict[str, Any], of: int | None) -> dict[str, Any]:
        """A body to write as entry `seq`: what its prompt shares with the last call is replaced by a reference."""
        if kind != "model_call":
            return body
        prompt, last, before = body.get(PROMPT), self._seq, self._ids
        self._advance(seq, body, of)
        if not isinstance(prompt, list | tuple):
            return body
        shared = _shared(before, list(prompt))
        if shared < SHARED_MIN:
            return body
        return {**body, PROMPT: {EXTENDS: [last, shared, prompt[shared:]]}}

    def unfold(self, seq: int, kind: Kind | None, body: dict[str, Any], of: int | None) -> dict[str, Any]:
        """The body that `fold` was given.

        Raises:
            BadLine: Its reference leads nowhere.
        """
        if kind != "model_call":
            return body
        prompt = body.get(PROMPT)
        if isinstance(prompt, dict) and EXTENDS in prompt:
            match prompt[EXTENDS]:
                case [int(last), int(shared), [*rest]] if last == self._seq and 0 <= shared <= len(self._ids):
                    body = {**body, PROMPT: [*self._ids[:shared], *rest]}
                case _:
                    raise BadLine("its prompt continues no call before it")
        self._advance(seq, body, of)
        return body

    def _advance(self, seq: int, body: Mapping[str, Any], of: int | None) -> None:
        prompt, completion = body.get(PROMPT), body.get(COMPLETION)
        sampled = list(completion) if isinstance(completion, list | tuple) else []
        if isinstance(prompt, list | tuple):
            self._seq, self._ids = seq, [*prompt, *sampled]
        elif sampled and of == self._seq:
            self._ids = [*self._ids, *sampled]


def _shared(first: list[int], second: list[int]) -> int:
    """Length of the common prefix; halving compares slices in C, which a loop over ids would not."""
    bound = min(len(first), len(second))
    if first[:bound] == second[:bound]:
        return bound
    return bisect_left(range(1, bound + 1), 1, key=lambda length: int(first[:length] != second[:length]))
