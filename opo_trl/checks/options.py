"""Options in mappings, such as `generation_kwargs`."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn


# Keys whose value may be any text.
_TEXTS = {"stop", "bad_words", "stop_strings"}
_SWITCHES = {"true", "false", "yes", "no", "on", "off"}


def reject(field: str, options: Mapping[str, Any], key: str, problem: str, fix: str) -> NoReturn:
    """Raise a `ValueError` about one option of a field."""
    raise ValueError(f"{field}={options!r}: {key!r} {problem}. {fix}.")


def check_options(field: str, options: Any) -> None:
    """
    Check a field that holds a mapping of options, or `None`.

    Raises:
        `ValueError`: it is not a mapping, contains NaN or infinity, or has a switch in quotes.
    """
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ValueError(f"{field}={options!r} is not allowed. Set `{field}` to a mapping: `{field}: {{key: value}}`.")
    for key, value in options.items():
        if key not in _TEXTS and isinstance(value, str) and value.lower() in _SWITCHES:  # "false" is true to Python
            reject(field, options, key, "is text, not a switch", "Set it to true or false, without quotes")
        if not _is_finite(value):
            reject(field, options, key, "must be finite", "Set it to a finite number")


def _is_finite(value: Any) -> bool:
    """Whether every number is finite, also inside lists and mappings."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
