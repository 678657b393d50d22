"""From a rollout to optimizer steps: which samples share a micro-batch, and their log-probabilities."""
