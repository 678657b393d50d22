"""From prompts to a scored rollout: their order, what samples completions, and what may fail."""
