"""
Ctrl-C while a trainer trains: it finishes the current optimizer step, saves a checkpoint and ends.

It cannot stop within an optimizer step: a checkpoint holds no gradients.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from transformers import TrainerCallback

from .checkpoint import last_complete


class SaveOnInterrupt(TrainerCallback):
    """
    Within this context, Ctrl-C ends training after the current optimizer step, with a checkpoint; another one ends it
    at once. `train` runs in it, and a handler of your own stays.

    Whichever process receives the signal, all of them stop after the same step: they agree once per optimizer step.

    Raises:
        `KeyboardInterrupt`: from `trainer.train`, when the checkpoint is written.
    """

    way_out, way_back = "Another Ctrl-C", 'trainer.train(resume_from_checkpoint="last")'

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._was_passed_on = False  # whether the signal has come once more
        self._received = 0  # number of the signal that this process has received; 0: none
        self._agreed = 0  # number of the signal that any process has received, once all have agreed to stop; 0: none

    def __enter__(self):
        """Handle signals by `_receive`, and be called back at the end of each optimizer step."""
        self._before = {number: signal.signal(number, self._receive) for number in self._handled()}
        self.trainer.add_callback(self)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Restore the handlers; a signal that came after the last step is raised again."""
        self.trainer.remove_callback(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._received and error is None:  # the signal came after the last step
            signal.raise_signal(self._received)

    def _handled(self) -> Sequence[int]:
        """Signals that this context handles: none in place of a handler of one's own, or where Python forbids it."""
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return [signal.SIGINT] if is_default and threading.current_thread() is threading.main_thread() else []

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Note a signal and say what follows; the handler that Python calls."""
        if self._received:
            self._receive_again(number, frame)
            return
        self._received = number
        self._received_at = time.monotonic()
        if self.trainer.args.local_process_index == 0:  # one message per machine
            message = (
                f"\n{signal.Signals(number).name}: the run saves a checkpoint after this optimizer step and ends. "
                f"{self.way_out} ends it now.\n"
            )
            os.write(2, message.encode())  # not by `print`, as the signal may interrupt one

    def _receive_again(self, number: int, frame: FrameType | None) -> None:
        """End at once, as Python does, unless it is the same Ctrl-C once more."""
        # A launcher passes on what the terminal has sent to all: within a second, but in native code, such as a long
        # backward pass, Python handles neither. Torch's does so exactly once.
        is_passed_on = "TORCHELASTIC_RUN_ID" in os.environ and not self._was_passed_on
        self._was_passed_on = True
        if time.monotonic() - self._received_at <= 1:
            return
        if not is_passed_on:
            signal.default_int_handler(number, frame)
        os.write(2, b"\nThis Ctrl-C may be the one that torch's launcher passes on. Another one ends it now.\n")

    def on_step_end(self, args, state, control, **kwargs):
        """Agree with all processes whether one has received a signal; if so, have a checkpoint saved."""
        accelerator = self.trainer.accelerator
        self._agreed = self._received
        if accelerator.num_processes > 1:
            received = torch.tensor(self._received, device=accelerator.device)
            self._agreed = int(accelerator.reduce(received, reduction="max"))
        control.should_save = control.should_save or self._agreed > 0  # `on_save` then ends the run

    def on_save(self, args, state, control, **kwargs):
        """End the run, if the checkpoint was saved because of a signal."""
        if self._agreed:  # number of the signal; 0: none
            # If a process exited while the first one is still writing, the launcher would end them all.
            self.trainer.accelerator.wait_for_everyone()
            name = signal.Signals(self._agreed).name
            last = last_complete(args.output_dir)
            self.trainer.accelerator.print(
                f"Ended by {name} after optimizer step {state.global_step}. The last complete checkpoint is {last}: "
                f"resume with `{self.way_back}`.",
                flush=True,
            )
            self._end()  # raises `KeyboardInterrupt`, or what a subclass raises

    def _end(self) -> None:
        raise KeyboardInterrupt
