"""Metrics of an optimizer step, their healthy bounds, and the plan of a run."""
