"""Values of a log's entries."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def number(entry: Mapping[str, Any], name: str) -> float:
    """A value of a log entry; NaN where it is missing, no number, or `None`, which TRL logs where all were NaN."""
    try:
        return float(entry.get(name, math.nan))
    except (TypeError, ValueError):
        return math.nan


def validations(log: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries of a log that have an accuracy on the validation problems, with its interval."""
    names = ("accuracy", "low", "high")
    return [row for row in log if all(math.isfinite(number(row, f"validation/{name}")) for name in names)]
