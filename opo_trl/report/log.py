"""Reading the entries of a log: the points of a curve."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..metrics.log import PHASES, Entry, number


Points = list[tuple[float, float]]  # optimizer step and value


def off_policy(entry: Entry) -> bool:
    """Whether the policy had moved since its rollout; until then χ² and similar metrics are 0 by construction."""
    return number(entry, "opo/off_policy_steps") > 0


def finite(log: Sequence[Entry], name: str, chosen: Callable[[Entry], bool] = lambda entry: True) -> Points:
    """Optimizer step and value of a metric, in the chosen entries that have a finite number for it."""
    found = [(entry["step"], number(entry, name)) for entry in log if chosen(entry)]
    return [(step, value) for step, value in found if math.isfinite(value)]


def validations(log: Sequence[Entry]) -> list[Entry]:
    """The entries that have an accuracy on the validation problems, with its interval."""
    names = ("accuracy", "low", "high")
    return [row for row in log if all(math.isfinite(number(row, f"validation/{name}")) for name in names)]


def seconds_by_phase(log: Sequence[Entry]) -> dict[str, float]:
    """Mean seconds per optimizer step by phase, over all steps, whether they generate or not; 0 if not logged."""
    points = {phase: finite(log, f"opo/time/{phase}") for phase in PHASES}
    return {phase: float(np.mean([value for _, value in found])) if found else 0.0 for phase, found in points.items()}
