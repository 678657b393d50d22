"""The entries of a log, and the points of a curve in them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any


Entry = Mapping[str, Any]
Points = list[tuple[float, float]]  # optimizer step and value

# Phases of an optimizer step, in this order. `anchor` is every forward pass without a gradient, including a reference
# model's; `sync` hands the weights to vLLM; `update` is the rest: forward and backward passes, the exchange of
# gradients, the optimizer, and the host's work in between.
PHASES = ("generate", "score", "anchor", "update", "sync")

_TOO_LARGE = 1e40  # for the tensors that metrics are computed from, and for means and squares


def number(entry: Entry, name: str) -> float:
    """A value of a log entry; NaN if it is missing, not a number, or `None`, which TRL logs if all values were NaN."""
    value: Any = entry.get(name)
    return float(value) if isinstance(value, int | float) and abs(value) < _TOO_LARGE else math.nan


def off_policy(entry: Entry) -> bool:
    """Whether the policy had moved since its rollout; until then χ² and similar metrics are 0 by construction."""
    return number(entry, "opo/off_policy_steps") > 0


def finite(log: Sequence[Entry], name: str, chosen: Callable[[Entry], bool] = lambda entry: True) -> Points:
    """Optimizer step and value of a metric, in the chosen entries that have a finite number for it."""
    points = [(entry["step"], number(entry, name)) for entry in log if chosen(entry)]
    return [(step, value) for step, value in points if math.isfinite(value)]


def values_of(points: Points) -> list[float]:
    """The values of points, without their steps."""
    return [value for _, value in points]
