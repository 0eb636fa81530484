"""What happened to a rollout, decided by tables: no sandbox, no clock, no policy."""
