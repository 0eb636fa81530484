"""Real faults, done to a run from outside its processes, and what became of its rewards (docs/faults.md)."""
