"""Checks of input before any work starts: a `ValueError` names the field, its value and the fix."""
