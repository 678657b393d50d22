"""Watches: bounds on logged metrics that warn or end a run."""

import difflib
from collections.abc import Mapping
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from transformers import TrainerCallback

from .log import ENTRIES_BEYOND, Watch, number


logger = get_logger(__name__)

# A metric that the first entries lack is misspelt.
_ENTRIES_WITHOUT = 10


class Watches(TrainerCallback):
    """
    Warn, or end the run with a checkpoint, when a metric is beyond its bound in three of ten entries of the log.

    `watches` are texts of the form that [`Watch`] reads.
    """

    def __init__(self, watches: list[str]):
        self.watches = [Watch(text) for text in watches]

    def on_train_begin(self, args, state, control, **kwargs):
        # Not those of an earlier call of `train`; a checkpoint is restored later
        self.watches = [Watch(watch.text) for watch in self.watches]

    def on_log(self, args, state, control, logs=None, **kwargs):
        fired = [watch for watch in self.watches if self._fires(watch, logs)]
        for watch in fired:
            value = number(logs, watch.metric)
            logger.warning(
                f"Watch '{watch.text}': {watch.metric} was {value:.4g} in step {state.global_step}, and beyond its "
                f"bound in {ENTRIES_BEYOND} of the last {len(watch.recent)} entries of the log."
            )
        # Processes must agree to stop, and some metrics differ between them.
        if any(watch.stops for watch in self.watches) and any(gather_object([any(watch.stops for watch in fired)])):
            logger.warning(f"The run ends at step {state.global_step}, with a checkpoint.")
            control.should_training_stop = control.should_save = True
            # A run resumed from this checkpoint must be guarded, too.
            self.watches = [Watch(each.text, without=each.without) if each.stops else each for each in self.watches]

    def state_dict(self) -> dict[str, Any]:
        """Text of each watch → its state, for [`~Watches.load_state_dict`]."""
        return {watch.text: watch.state() for watch in self.watches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the watches that a state of [`~Watches.state_dict`] has."""
        self.watches = [Watch(watch.text, **state.get(watch.text, {})) for watch in self.watches]

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
