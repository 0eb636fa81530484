"""The main job: tasks, groups, rollouts, verdicts."""
