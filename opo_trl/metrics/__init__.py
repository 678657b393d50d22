"""Metrics of an optimizer step, and bounds on them that are watched."""
