"""The entries of a log, the points of a curve in them, and bounds on them."""

import math
import operator
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


Entry = Mapping[str, Any]
Points = list[tuple[float, float]]  # optimizer step and value

# Phases of an optimizer step, in this order. `anchor` is every forward pass without a gradient, including a reference
# model's; `sync` hands the weights to vLLM; `update` is the rest: forward and backward passes, the exchange of
# gradients, the optimizer, and the host's work in between.
PHASES = ("generate", "score", "anchor", "update", "sync")

# A single entry is noise; and some metrics, such as opo/chi2, are 0 in the first optimizer step of each rollout.
ENTRIES_BEYOND, _ENTRIES = 3, 10
_WATCH = re.compile(r"(?P<action>warn|stop) if (?P<metric>\S+) (?P<side>[<>]) (?P<bound>\S+)")
_SIDES = {"<": operator.lt, ">": operator.gt}

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
    found = [(entry["step"], number(entry, name)) for entry in log if chosen(entry)]
    return [(step, value) for step, value in found if math.isfinite(value)]


@dataclass
class Watch:
    """
    A bound on a metric of the log.

    Args:
        text (`str`): `"warn if METRIC < NUMBER"`, or with `stop` for `warn`, or `>` for `<`.

    Raises:
        `ValueError`: the text is not of this form.
    """

    text: str
    # Whether each of the last entries with a number for the metric was beyond the bound
    recent: deque[bool] = field(default_factory=deque)
    fired: bool = False  # since the last time that no recent entry was beyond the bound
    without: int = 0  # entries without the metric so far; −1 once an entry has had it

    def __post_init__(self):
        self.recent = deque(self.recent, _ENTRIES)
        found = _WATCH.fullmatch(str(self.text).strip())
        try:
            self.stops, self.metric = found["action"] == "stop", found["metric"]
            self.bound, self.beyond = float(found["bound"]), _SIDES[found["side"]]
        except (TypeError, ValueError):
            raise ValueError(
                f"watches contains {self.text!r}, which is not a watch. Write it as 'warn if entropy < 0.1' or "
                "'stop if opo/chi2 > 2', with any metric of the log."
            ) from None

    def fires(self, entry: Mapping[str, Any]) -> bool:
        """Record the next log entry; returns whether too many recent entries are now beyond the bound."""
        value = number(entry, self.metric)
        if math.isnan(value):  # nothing to compare
            return False
        self.recent.append(self.beyond(value, self.bound))
        fires = not self.fired and sum(self.recent) == ENTRIES_BEYOND
        self.fired = fires or (self.fired and any(self.recent))
        return fires

    def state(self) -> dict[str, Any]:
        """What to make this watch of again, besides its text, as JSON."""
        return {"recent": list(self.recent), "fired": self.fired, "without": self.without}
