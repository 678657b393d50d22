"""Seconds of an optimizer step, by phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from .log import PHASES


class StepClock(TrainerCallback):
    """
    Adds up the seconds of optimizer steps by phase. A phase nested in another counts only as the inner one.

    On a GPU, phases are marked by events in its stream, which are read when the log asks: no phase waits for it.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._start()

    def _start(self) -> None:
        """Begin to count from 0."""
        self._phase: str | None = None  # the current phase; `None` outside optimizer steps
        self._since: Any = None  # beginning of the phase: seconds, or an event of the GPU
        # Phase, beginning and end of all that is over since `seconds_per_step` was last called
        self._laps: list[tuple[str, Any, Any]] = []
        self._steps = 0  # optimizer steps since then

    def on_train_begin(self, args, state, control, **kwargs):
        self._start()  # an earlier run may have ended inside a step

    def on_step_begin(self, args, state, control, **kwargs):
        self._enter("update")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._enter(None)  # what follows, such as a validation, is not part of the step
        self._steps += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """
        Count the time within this context as the phase `name`, one of `PHASES`, if it belongs to an optimizer step.
        The phase outside goes on afterwards.
        """
        outer = self._phase
        if outer is None:
            yield
            return
        self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def seconds_per_step(self) -> dict[str, float]:
        """Seconds per phase and optimizer step, since the last call."""
        seconds = dict.fromkeys(PHASES, 0.0)
        n_steps = max(self._steps, 1)
        if self._on_gpu and self._laps:
            self._laps[-1][2].synchronize()  # waits until the GPU has passed the last event, and so all others
        for phase, start, end in self._laps:
            # Events give milliseconds.
            seconds[phase] += start.elapsed_time(end) / 1000 if self._on_gpu else end - start
        self._laps = []
        self._steps = 0
        return {name: value / n_steps for name, value in seconds.items()}

    def _enter(self, name: str | None) -> None:
        """Begin a phase, and note the time of the one that ends; `None` is no phase."""
        now: Any = time.perf_counter()
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        if self._phase is not None:
            self._laps.append((self._phase, self._since, now))
        self._phase = name
        self._since = now
