"""The log of a rollout: what was done, what came of it, and that nobody changed the account since."""
