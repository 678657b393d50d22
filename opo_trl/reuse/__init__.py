"""Completions that are trained on again, or that others have written: replay, recorded rollouts, agents' logs."""
