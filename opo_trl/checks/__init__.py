"""Reject bad input before any work starts: values, paths, YAML, and options that libraries would reject late."""
