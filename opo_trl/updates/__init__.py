"""From a rollout to optimizer steps: which completions share a micro-batch, and their log-probabilities."""
