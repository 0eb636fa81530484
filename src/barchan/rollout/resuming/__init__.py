"""Going on with a rollout that was cut short: its log is the truth, and nothing in it is done or sampled again."""
