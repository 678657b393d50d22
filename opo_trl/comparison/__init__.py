"""Runs side by side: what may be compared, what is measured, with which uncertainty, and the report of it."""
