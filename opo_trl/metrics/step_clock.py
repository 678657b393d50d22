"""Seconds of an optimizer step, by phase."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback

from .log import PHASES


class StepClock(TrainerCallback):
    """
    Adds up the seconds of optimizer steps by phase. A phase nested in another counts only as the inner one.

    On a GPU, phases are marked by events in its stream, which are read once the device has passed them: no phase waits
    for the device.
    """

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._phase: str | None = None
        self._since: Any = None  # seconds, or an event of the GPU
        self._laps: deque[tuple[str, Any, Any]] = deque()  # phase, beginning, end: those still to be added up
        self._steps, self._by_phase = 0, dict.fromkeys(PHASES, 0.0)  # since they were last asked for
        self._seconds, self._first_token = 0.0, 0

    def on_train_begin(self, args, state, control, **kwargs):
        # An earlier run may have ended inside a step.
        self._phase, self._steps, self._by_phase = None, 0, dict.fromkeys(PHASES, 0.0)
        self._laps.clear()
        self._seconds, self._first_token = 0.0, state.num_input_tokens_seen

    def on_step_begin(self, args, state, control, **kwargs):
        self._enter("update")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._enter(None)  # what follows, such as a validation, is not part of the step
        self._steps += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as one of `PHASES`, if it belongs to an optimizer step."""
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
        self._add_up(wait=True)
        seconds, steps = self._by_phase, max(self._steps, 1)
        self._steps, self._by_phase = 0, dict.fromkeys(PHASES, 0.0)
        self._seconds += sum(seconds.values())
        return {name: value / steps for name, value in seconds.items()}

    def tokens_per_second(self, tokens: float) -> float:
        """
        Tokens of all rollouts, including prompts, over all processes, per second of optimizer steps: the mean since
        the run was started or resumed, up to the last call of [`~StepClock.seconds_per_step`]. `tokens` are those of
        the run so far (`TrainerState.num_input_tokens_seen`).
        """
        return (tokens - self._first_token) / max(self._seconds, 1e-9)

    def _enter(self, name: str | None) -> None:
        now = self._now()
        if self._phase is not None:
            self._laps.append((self._phase, self._since, now))
        self._phase, self._since = name, now
        self._add_up()

    def _add_up(self, *, wait: bool = False) -> None:
        while self._laps:
            phase, start, end = self._laps[0]
            if self._on_gpu and not end.query():
                if not wait:
                    return
                end.synchronize()
            self._by_phase[phase] += start.elapsed_time(end) / 1000 if self._on_gpu else end - start
            self._laps.popleft()

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
