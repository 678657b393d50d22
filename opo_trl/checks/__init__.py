"""
Reject bad input before any work starts: values, paths, YAML, and options that libraries would reject late.

Each check raises a `ValueError` that names the field, its value and the fix; an `ImportError` if a package is missing.
"""
