"""Watches: bounds on logged metrics that warn or end a run."""

import difflib
import math
import operator
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from transformers import TrainerCallback

from .log import number


logger = get_logger(__name__)

# A single entry is noise; and some metrics, such as opo/chi2, are 0 in the first optimizer step of each rollout.
_ENTRIES_BEYOND, _ENTRIES = 3, 10
# A metric that the first entries lack is misspelt.
_ENTRIES_WITHOUT = 10

_WATCH = re.compile(r"(?P<action>warn|stop) if (?P<metric>\S+) (?P<side>[<>]) (?P<bound>\S+)")
_SIDES = {"<": operator.lt, ">": operator.gt}


@dataclass
class Watch:
    """
    A bound on a metric of the log.

    Args:
        text (`str`): `"warn if METRIC < NUMBER"`, or with `stop` for `warn`, or `>` for `<`.

    Attributes:
        recent (`deque[bool]`): for each of the last entries with a number for the metric, whether it was beyond the
            bound.
        fired (`bool`): whether the watch has fired since it last saw no recent entry beyond the bound.
        without (`int`): entries without the metric so far; −1 once an entry has had it.

    Raises:
        `ValueError`: the text is not of this form.
    """

    text: str
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_ENTRIES))
    fired: bool = False
    without: int = 0

    def __post_init__(self):
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
        fires = not self.fired and sum(self.recent) == _ENTRIES_BEYOND
        self.fired = fires or (self.fired and any(self.recent))
        return fires

    def state(self) -> dict[str, Any]:
        """State for [`~Watch.restore`], as JSON."""
        return {"recent": list(self.recent), "fired": self.fired, "without": self.without}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of [`~Watch.state`]."""
        self.recent.clear()
        self.recent.extend(state["recent"])
        self.fired, self.without = state["fired"], state["without"]


class Watches(TrainerCallback):
    """
    Warn, or end the run with a checkpoint, when a metric is beyond its bound in three of ten entries of the log.

    `watches` are texts of the form that [`Watch`] reads.
    """

    def __init__(self, watches: list[str]):
        self.watches = [Watch(text) for text in watches]

    def on_log(self, args, state, control, logs=None, **kwargs):
        fired = [watch for watch in self.watches if self._fires(watch, logs)]
        for watch in fired:
            value = number(logs, watch.metric)
            logger.warning(
                f"Watch '{watch.text}': {watch.metric} was {value:.4g} in step {state.global_step}, and beyond its "
                f"bound in {_ENTRIES_BEYOND} of the last {len(watch.recent)} entries of the log."
            )
        # Processes must agree to stop, and some metrics differ between them.
        if any(watch.stops for watch in self.watches) and any(gather_object([any(watch.stops for watch in fired)])):
            logger.warning(f"The run ends at step {state.global_step}, with a checkpoint.")
            control.should_training_stop = control.should_save = True
            # A run resumed from this checkpoint must be guarded, too.
            for watch in self.watches:
                if watch.stops:
                    watch.recent.clear()
                    watch.fired = False

    def _fires(self, watch: Watch, logs: Mapping[str, Any]) -> bool:
        if watch.metric in logs:
            watch.without = -1
        elif watch.without >= 0 and "grad_norm" in logs:
            watch.without += 1
            if watch.without == _ENTRIES_WITHOUT:
                watch.without = -1
                near = ", ".join(difflib.get_close_matches(watch.metric, logs, n=3, cutoff=0.3)) or "none"
                logger.warning(
                    f"Watch '{watch.text}': the first {_ENTRIES_WITHOUT} entries of the log have no {watch.metric!r}. "
                    f"The nearest metrics: {near}."
                )
        return watch.fires(logs)
