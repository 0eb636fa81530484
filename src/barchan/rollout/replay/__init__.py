"""What a rollout's log lets one do again: go on from a snapshot, carry everything out once more, or answer from it."""
